"""Proxies: copies of a model that share its parameters and simulate the quantized operations."""

from __future__ import annotations
