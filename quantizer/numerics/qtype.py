"""Number formats as data. No integer range is spelled out anywhere else."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["INT8", "QType", "qtype"]


@dataclass(frozen=True, kw_only=True, slots=True)
class QType:
    """A low-precision format: its name, storage, and the range of its values, symmetric around zero.

    ``qmin`` is the lowest stored value. Scales come from ``qmax`` alone (scale = amax / qmax), so the range is that of
    the target's ``QuantizeLinear``: [-128, 127] for INT8, in training and in the engine alike.
    """

    name: str
    bits: int
    storage: torch.dtype
    qmin: int
    qmax: int


INT8 = QType(name="int8", bits=8, storage=torch.int8, qmin=-128, qmax=127)

_QTYPES = {entry.name: entry for entry in (INT8,)}


def qtype(name: str) -> QType:
    """The format called ``name``.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in _QTYPES:
        raise ValueError(f"unknown dtype {name!r}; known: {', '.join(sorted(_QTYPES))}")
    return _QTYPES[name]
