"""In-memory rewriting of model source: find quantizable calls, wrap them, rebuild the functions."""

from __future__ import annotations

from quantizer.rewrite.constructor_patch import patched
from quantizer.rewrite.operator_patches import (
    OperatorPatch,
    operator_patches,
    register_operator_patch,
    unregister_operator_patch,
)

__all__ = [
    "OperatorPatch",
    "operator_patches",
    "patched",
    "register_operator_patch",
    "unregister_operator_patch",
]
