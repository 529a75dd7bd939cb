"""Functions beside layers, each beside what it must equal: one file each, found because it is there."""
