"""What makes each process of the tests quicker: torch reads its translations once, garbage is looked for seldom."""

from __future__ import annotations

import copy
import gc
from functools import cache
from importlib.util import find_spec
from typing import Any

__all__ = ["collect_seldom", "read_torchlib_once"]


def collect_seldom() -> None:
    """Leave what is there to the end of the process, and look for cycles in what is new a tenth as often.

    Models and libraries are millions of objects that stay, and each search goes through them: an eighth of all time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


def read_torchlib_once() -> bool:
    """Keep the 500 functions that each export reads from onnxscript's source, half of the time of a small one.

    Returns:
        Whether there are any.
    """
    if find_spec("onnxscript") is None:
        return False
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    read = cache(ONNXRegistry.from_torchlib)

    def from_torchlib(*opset: int, **named: int) -> Any:
        registry = copy.copy(read(*opset, **named))
        registry.functions = {target: list(found) for target, found in registry.functions.items()}
        return registry

    ONNXRegistry.from_torchlib = staticmethod(from_torchlib)
    return True
