"""Transformer layers and models, written from the papers they come from: the same functions as in `transformers`.

One file per kind of layer (`norm`, `rope`, `mask`, ...), reading like the equation it implements, and one file per
model, named by its `model_type` and composing them. Nothing here imports `transformers`.
"""
