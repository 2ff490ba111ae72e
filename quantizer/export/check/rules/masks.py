"""Mask constants that half precision can add to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from quantizer.export.check.finding import Fault
from quantizer.export.check.graph import constant
from quantizer.export.check.graph import name_of
from quantizer.export.check.graph import readers
from quantizer.export.check.rule import rules
from quantizer.export.check.subject import Subject
from quantizer.export.masks import masks_only
from quantizer.proxy.regions import MASK

__all__ = ["mask_range"]


@rules.add("mask-range")
def mask_range(subject: Subject) -> Iterator[Fault]:
    """A mask's constant fits FP16, with room for the scores that are added to it."""
    for node in subject.nodes:
        for index, value in enumerate(node.inputs):
            held = constant(value)
            if held is None or not held.size or str(held.dtype) not in ("float16", "float32"):
                continue
            lowest = float(np.min(held))
            low = lowest < MASK and (held.dtype == np.float16 or (lowest < _LOWEST and _becomes_half(node)))
            if low and masks_only(node, index):
                problem = (
                    f"the constant {lowest:.5g} in half precision: added to a score it is -inf, and a row of -inf is "
                    "NaN after softmax"
                )
                yield Fault(name_of(node), problem, f"use {MASK:g}: exp of it is 0 too")


_LOWEST = float(np.finfo(np.float16).min)


def _becomes_half(node: Any) -> bool:
    """It makes, or hands a Cast, what is then FP16."""
    if node.op_type == "Cast":
        return str(node.outputs[0].dtype) == "FLOAT16"
    casts = [reader for reader in readers(node.outputs[0]) if reader.op_type == "Cast"]
    return any(str(cast.outputs[0].dtype) == "FLOAT16" for cast in casts)
