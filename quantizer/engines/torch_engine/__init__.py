"""Engines of PyTorch on the CPU: oneDNN's integer operators, eager or compiled by Inductor."""
