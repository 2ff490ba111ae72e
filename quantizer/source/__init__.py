"""Rewriting model source in memory: find quantizable calls, wrap them, rebuild the functions."""

from __future__ import annotations

from quantizer.source.operator_patches import OperatorPatch
from quantizer.source.operator_patches import operator_patches
from quantizer.source.operator_patches import register_operator_patch
from quantizer.source.operator_patches import unregister_operator_patch
from quantizer.source.patched import patched

__all__ = [
    "OperatorPatch",
    "operator_patches",
    "patched",
    "register_operator_patch",
    "unregister_operator_patch",
]
