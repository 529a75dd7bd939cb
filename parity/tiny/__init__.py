"""Tiny checkpoints: lopsided sizes, weights on which mistakes show, and Hugging Face directories to read them from."""
