"""Engines of ONNX Runtime, for CPUs."""
