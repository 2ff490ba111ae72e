"""Readers of the results of convolutions: the values that they read give an output quantizer its range.

A rectifier or a move (a maximum of neighbours, a reshaping) commutes with rounding, so that an engine computes it in
integers between a convolution and its output quantizer. What counts are the values that anything else reads.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quantizer.proxy.site import Site

_aten = torch.ops.aten
_RECTIFIERS = frozenset({"relu", "relu_", "hardtanh", "hardtanh_", "clamp", "clamp_", "clamp_min", "clamp_min_"})
_MOVES = frozenset(
    [
        *("max_pool2d_with_indices", "max_pool3d_with_indices", "upsample_nearest1d", "upsample_nearest2d"),
        *("upsample_nearest3d", "_upsample_nearest_exact2d", "constant_pad_nd", "view", "_unsafe_view", "reshape"),
        *("permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "slice", "select", "split", "clone", "alias"),
        *("split_with_sizes", "detach", "flatten", "as_strided", "lift_fresh", "_reshape_alias", "pixel_shuffle"),
        *("pixel_unshuffle", "channel_shuffle", "native_channel_shuffle", "max_pool2d", "dropout"),
    ]
)


@cache
def _name(func: Any) -> str:
    return str(func._schema.name).removeprefix("aten::")


class OutputReaders:
    """The tensors of one pass that an output site rounds, or that are moved or rectified ones of such.

    Args:
        observe: receives an output site, each tensor of it that is read by anything but a rectifier or a move, and the
            number of the call in the pass that the tensor comes from.
    """

    def __init__(self, observe: Callable[[Site, Tensor, int], None]) -> None:
        self._observe = observe
        # As in OriginTracker: a new tensor may get the id of a deleted one.
        self._sites: dict[int, tuple[weakref.ref[Tensor], Site, int]] = {}
        self._whole: set[int] = set()

    def begin(self, value: Tensor, site: Site, call: int) -> None:
        """Follow the result of a call, by its number in the pass."""
        self._follow(value, site, call)
        self._whole.add(id(value))

    def site_of(self, value: Any) -> Site | None:
        """Return the output site that rounds a tensor; None if none does."""
        found = self._sites.get(id(value))
        return found[1] if found is not None and found[0]() is value else None

    def take(self, value: Tensor) -> Site | None:
        """Return the output site of the result of a call that nothing has read yet, and follow it no more."""
        site = self.site_of(value)
        if site is None or id(value) not in self._whole:
            return None
        del self._sites[id(value)]
        self._whole.discard(id(value))
        return site

    def read(self, value: Any) -> None:
        """Note that a tensor is read."""
        site = self.site_of(value)
        if site is not None:
            self._whole.discard(id(value))
            self._observe(site, value, self._sites[id(value)][2])

    def computes(self, func: Any, args: Iterable[Any], inputs: Iterable[Tensor]) -> tuple[Site, int] | None:
        """Note that an operation reads tensors; return the output site and call of its result (None: of none)."""
        if not self._sites:
            return None
        followed = [(tensor, site) for tensor in inputs if (site := self.site_of(tensor)) is not None]
        if not followed:
            return None
        name = _name(func)
        if name in _MOVES or (name in _RECTIFIERS and _keeps_zero(name, list(args)[1:])):
            self._whole.discard(id(followed[0][0]))
            return followed[0][1], self._sites[id(followed[0][0])][2]
        for tensor, _ in followed:
            self.read(tensor)
        return None

    def follow_results(self, result: Any, site: Site, call: int) -> None:
        """Follow what a rectifier or a move made."""
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self._follow(tensor, site, call)

    def _follow(self, value: Tensor, site: Site, call: int) -> None:
        self._sites[id(value)] = (weakref.ref(value), site, call)


def _keeps_zero(name: str, limits: list[Any]) -> bool:
    """Return whether a rectifier has 0 as its lower limit, so that it commutes with rounding."""
    if name.startswith("relu"):
        return True
    low = limits[0] if limits else (-1.0 if name.startswith("hardtanh") else None)
    return isinstance(low, int | float) and low == 0
