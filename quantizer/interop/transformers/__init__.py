"""Quantized checkpoints of transformers: hooks of ``from_pretrained`` and ``save_pretrained``."""
