"""One file per family, named by its model type."""
