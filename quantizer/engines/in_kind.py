"""Outputs of an engine in the kind of its inputs: tensors for tensors, arrays for arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt


def in_kind(inputs: Any, names: Iterable[str], arrays: Iterable[npt.NDArray[Any]]) -> dict[str, Any]:
    """Return the outputs of an engine by name, in the kind of its inputs."""
    given = inputs.values() if isinstance(inputs, Mapping) else [inputs]
    # A tensor is told by duck typing, so that arrays need no import of torch.
    device = next((value.device for value in given if hasattr(value, "detach")), None)
    if device is None:
        return dict(zip(names, arrays, strict=True))
    import torch

    writable = (array if array.flags.writeable else array.copy() for array in map(np.asarray, arrays))
    return {name: torch.from_numpy(array).to(device) for name, array in zip(names, writable, strict=True)}
