"""Passes from a Q/DQ graph of ``torch.fx`` to oneDNN's integer operators, one a file."""
