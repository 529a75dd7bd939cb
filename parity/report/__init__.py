"""One self-contained page about a run or a check, readable offline."""
