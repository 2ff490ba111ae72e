"""Engines of PyTorch, for CPUs: oneDNN's integer operators, eager or compiled by Inductor."""
