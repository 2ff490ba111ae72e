"""Outputs of engines and of PyTorch: how far they are apart, and how far they may be."""
