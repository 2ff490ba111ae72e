"""Workloads of a run: the model and rows of a configuration, or a module and batches given in Python."""
