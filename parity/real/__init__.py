"""The proof on real input: SmolLM2-135M, a trained Llama, whose GGUF file a package carries (`make real`).

The file is read twice, by transformers and by us, and its rows of q and k are stored for adjacent rotary pairs. So it
proves the permutation between the pairings on rows that neither this project nor transformers has written.
"""
