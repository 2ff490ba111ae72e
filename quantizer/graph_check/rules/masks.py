"""Rule of mask constants: half precision can add to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from quantizer.graph_check.finding import Fault
from quantizer.graph_check.rule import rules
from quantizer.graph_check.subject import Subject
from quantizer.numerics.float16 import FLOAT16_MASK
from quantizer.qdq.graph import constant, name_of, readers
from quantizer.qdq.masks import masks_only


@rules.add("mask-range")
def mask_range(subject: Subject) -> Iterator[Fault]:
    """Keep a mask's constant within FP16, with room for the scores that are added to it."""
    for node in subject.nodes:
        for index, value in enumerate(node.inputs):
            held = constant(value)
            if held is None or not held.size or str(held.dtype) not in ("float16", "float32"):
                continue
            lowest = float(np.min(held))
            low = lowest < FLOAT16_MASK and (held.dtype == np.float16 or (lowest < _LOWEST and _becomes_half(node)))
            if low and masks_only(node, index):
                problem = (
                    f"the constant {lowest:.5g} in half precision: added to a score it is -inf, and a row of -inf is "
                    "NaN after softmax"
                )
                yield Fault(name_of(node), problem, f"use {FLOAT16_MASK:g}: exp of it is 0 too")


_LOWEST = float(np.finfo(np.float16).min)


def _becomes_half(node: Any) -> bool:
    """Return whether a node's result is FP16, directly or behind a Cast."""
    if node.op_type == "Cast":
        return str(node.outputs[0].dtype) == "FLOAT16"
    casts = [reader for reader in readers(node.outputs[0]) if reader.op_type == "Cast"]
    return any(str(cast.outputs[0].dtype) == "FLOAT16" for cast in casts)
