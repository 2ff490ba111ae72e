"""Engines of TensorRT and of TensorRT-RTX."""
