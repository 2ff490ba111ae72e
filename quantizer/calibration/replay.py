"""A second pass of kept batches, in which the calls of some sites show the error that candidate ranges make.

Legend: y the site's float output, as rows; y_c the output with the operands rounded that the caller has switched on.
The error is the mean over rows of |y_c - y|^2 / |y|^2. It is relative to each row, because in the absolute error a few
rows with huge values would outweigh all others. A row is the last axis; for a convolution it is one image.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.common.progress import counted
from quantizer.observe.padding import padding_mask, without_padding
from quantizer.observe.replay_batches import Batch
from quantizer.proxy.call_numbers import current_call, numbered
from quantizer.proxy.restored_state import unmoved
from quantizer.proxy.site import CallOverride, Site
from quantizer.proxy.split_attention import observed_probabilities

_ROWS = 512
"""The number of rows of a linear's input that are tried: enough to tell ranges apart, and cheaper than all."""

_BATCHED = 3  # the number of axes from which the first one is taken for the batch

_ITEMS = 4
"""The number of items of a batch that are tried if rows depend on each other."""


class SiteCall:
    """One call of a site, with its real operands.

    Attributes:
        site: the site that is called.
        number: which of the site's calls in its pass this is, from 0.
    """

    def __init__(
        self, site: Site, function: Callable[..., Any], args: list[Any], keywords: dict[str, Any], mask: Tensor | None
    ) -> None:
        self.site = site
        self._function = function
        self._all = (args, keywords, mask)
        self.number = current_call(site.path)

    def operand(self, name: str) -> Any:
        """Return the operand before rounding, without padding."""
        args, keywords, mask = self._all
        place = [entry.name for entry in self.site.operation.operands].index(name)
        if self.site.operation.operands[place].index is None:
            # Fused attention computes its probabilities itself; their last two axes are no tokens to leave out.
            return observed_probabilities(args, keywords)
        value = self.site.argument(place, args, keywords)
        last = self.site.operation.name == "linear"
        return without_padding(value, mask, channels_last=last) if isinstance(value, Tensor) else value

    @cached_property
    def expected(self) -> Tensor | None:
        """The rows of the float output, float64; None if it is no tensor. Read it before any quantizer is on."""
        return self._rows()

    def error(self) -> float:
        """Return the relative error of the output with the site's current quantizers; read ``expected`` first."""
        expected, rows = self.expected, self._rows()
        assert expected is not None
        assert rows is not None
        power = expected.square().sum(1)
        error = (rows - expected).square().sum(1)
        return float((error[power > 0] / power[power > 0]).mean()) if bool((power > 0).any()) else 0.0

    @cached_property
    def _some(self) -> tuple[list[Any], dict[str, Any], Tensor | None]:
        return _sample(self.site, *self._all)

    def _rows(self) -> Tensor | None:
        args, keywords, mask = self._some
        output = self.site.rounded(self._function, args, keywords)
        if not isinstance(output, Tensor):
            return None
        values = without_padding(output, mask, channels_last=self.site.operation.name == "linear")
        by_image = self.site.operation.kind == "conv" and values.dim() > 1
        return (values.flatten(1) if by_image else values.reshape(-1, values.shape[-1] if values.dim() else 1)).double()


def replay(
    proxy: nn.Module, sites: Collection[Site], batches: Iterable[Batch], visit: Callable[[SiteCall], None], title: str
) -> None:
    """Run batches through a proxy and pass every call of ``sites`` to ``visit``.

    Args:
        proxy: the calibrated proxy, its sites inactive and unobserved.
        sites: the sites whose calls are visited.
        batches: inputs of the proxy.
        visit: a function that may switch on quantizers of the call's site, and switches them off again.
        title: the text of the progress bar.
    """
    watcher = _Watcher(visit)
    with torch.no_grad(), counted(list(batches), title, unit="batch") as steps:
        for args, keywords in steps:
            watcher.mask = padding_mask(keywords, args)
            run_judged(proxy, sites, (args, keywords), watcher)


def run_judged(proxy: nn.Module, sites: Collection[Site], batch: Batch, judge: CallOverride) -> None:
    """Run a batch through a proxy, with ``judge`` in place of every call of ``sites``, whether they are active or not.

    Args:
        proxy: the proxy.
        sites: the sites whose calls are made by ``judge``.
        batch: the inputs, which the model may change.
        judge: receives each call, and returns its result.
    """
    active = {site: site.active for site in sites}
    try:
        for site in sites:
            # An active site asks no judge.
            site.active, site.judge = False, judge
        # forward() instead of a call: the hooks of the proxy are for calibration.
        with unmoved(proxy), numbered(proxy):
            proxy.forward(*batch[0], **batch[1])
    finally:
        for site, was in active.items():
            site.active, site.judge = was, None


class _Watcher:
    """An override of the sites' calls, which passes each to ``visit`` and then computes the float result.

    Attributes:
        mask: the real tokens of the batch, [B, S]; None: all tokens are real.
    """

    def __init__(self, visit: Callable[[SiteCall], None]) -> None:
        self.mask: Tensor | None = None
        self._visit = visit

    def __call__(self, site: Site, function: Callable[..., Any], args: list[Any], keywords: dict[str, Any]) -> Any:
        self._visit(SiteCall(site, function, args, keywords, self.mask))
        # A call in place writes into the tensor itself, since other code may hold the same tensor.
        return function(*args, **keywords)


def _sample(
    site: Site, args: list[Any], keywords: dict[str, Any], mask: Tensor | None
) -> tuple[list[Any], dict[str, Any], Tensor | None]:
    """Return a part of a call's operands that is enough to compare ranges, and the mask [B, S] of that part."""
    if site.operation.name == "linear" and args and isinstance(args[0], Tensor):
        rows = without_padding(args[0], mask, channels_last=True).reshape(-1, args[0].shape[-1])
        return [rows[:: max(1, len(rows) // _ROWS)], *args[1:]], keywords, None
    if site.operation.kind == "conv" and args and isinstance(args[0], Tensor):
        weight = args[1] if len(args) > 1 else keywords.get("weight")
        # A single image has no batch axis.
        batched = isinstance(weight, Tensor) and args[0].dim() == weight.dim()
        return [args[0][:_ITEMS] if batched else args[0], *args[1:]], keywords, None
    tensors = [value for value in (*args, *keywords.values()) if isinstance(value, Tensor)]
    alike = len({(tensor.dim(), tensor.shape[0] if tensor.dim() else 0) for tensor in tensors}) == 1
    # In an einsum the equation names the axes, and the first need not be the batch.
    if not alike or tensors[0].dim() < _BATCHED or site.operation.equation:
        return args, keywords, mask

    def first(value: Any) -> Any:
        return value[:_ITEMS] if isinstance(value, Tensor) else value

    some = {name: first(value) for name, value in keywords.items()}
    return [first(value) for value in args], some, mask if mask is None else mask[:_ITEMS]
