"""Rewriting model source in memory: find quantizable calls, wrap them, rebuild the functions."""

from __future__ import annotations

from quantizer.source.patched import patched

__all__ = ["patched"]
