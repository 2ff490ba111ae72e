"""Compatibility with other tools: pytorch-quantization, Model Optimizer, transformers and tripy."""

from __future__ import annotations
