"""Data as people have it, read as the batches of a model."""
