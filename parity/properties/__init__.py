"""The properties every layer is held against, one file each."""
