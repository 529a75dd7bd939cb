"""Your own layer, held against any class in transformers: `parity check`."""
