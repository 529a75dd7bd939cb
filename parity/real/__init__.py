"""The proof on real input (`make real`): trained models that packages carry, read by transformers and by us.

SmolLM2-135M, a Llama, comes as a GGUF file with its rows of q and k stored for adjacent rotary pairs. So it proves the
permutation between the pairings on rows that neither this project nor transformers has written. all-MiniLM-L6-v2, a
BERT, comes in Hugging Face's layout as an early version wrote it, and is run on sentences of different lengths.
"""
