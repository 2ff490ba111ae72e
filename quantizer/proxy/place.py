"""A place: a call of an operation behind a convolution that an engine computes in integers along with it.

Such a call quantizes no operand of its own. Where a target runs a convolution in integers only if its result is
quantized, the place has a site for its own result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quantizer.numerics import torch_operators as ops
from quantizer.numerics.qtype import UINT8
from quantizer.proxy.site import OUTPUT, Site, SourceCall
from quantizer.rewrite.source_sites import SiteSource


class PlaceObserver(Protocol):
    """A listener to each call of a place while a proxy observes."""

    def enter(self, place: Place, values: list[Any]) -> None:
        """Receive the tensors that a call computes with, before it."""


class Place(SourceCall):
    """The module that the rewritten source calls in place of an operation that is no site.

    Attributes:
        observer: receives each call (None: no observer).
    """

    def __init__(self, source: SiteSource, path: str) -> None:
        super().__init__(source, path)
        self.observer: PlaceObserver | None = None

    @property
    def result_site(self) -> Site | None:
        """The site of the result; None if there is none."""
        found = self._modules.get(OUTPUT)
        assert found is None or isinstance(found, Site)
        return found

    def forward(self, *args: Any, **keywords: Any) -> Any:
        function, rest = self._function_of(args)
        output = self.result_site
        if output is None:
            return function(*rest, **keywords)
        if self.observer is not None:
            self.observer.enter(self, rest)
        result = self._computed(output, function, rest, keywords)
        rounded = output.of_result(result)
        if rounded is result or not self.source.in_place:
            return rounded
        return result.copy_(rounded)

    def _computed(self, output: Site, function: Callable[..., Any], args: list[Any], keywords: dict[str, Any]) -> Any:
        share = _SHARES.get(self.source.operation)
        if share is None or not output.active or not output.quantizer(0).enabled:
            return function(*args, **keywords)
        # An engine multiplies integers of both.
        given, *rest = [*args, *keywords.values()]
        result = given * _rounded_share(share(given))
        return given.copy_(result) if any(rest) else result

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without observer: copies and pickles have none."""
        return {**super().__getstate__(), "observer": None}  # type: ignore[no-untyped-call]


_SHARES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.sigmoid,
    "hardswish": nn.functional.hardsigmoid,
    "mish": lambda x: torch.tanh(nn.functional.softplus(x)),
}
"""Operations that multiply x by a share of it, 0 to 1, and what computes the share."""


def _rounded_share(x: Tensor) -> Tensor:
    """Return x [*], of 0 to 1, rounded to 255 steps."""
    scale = torch.tensor(1 / UINT8.qmax, dtype=torch.float32, device=x.device)
    zero_point = torch.zeros((), dtype=torch.uint8, device=x.device)
    rounded: Tensor = ops.fake_quantize(x, scale, UINT8.name, None, None, zero_point)
    return rounded


def add_output_sites(proxy: nn.Module, paths: Collection[str] | None = None) -> None:
    """Give the convolutions, adds and places of a proxy a site for their results; those that have one keep it.

    ``paths`` are the names of the sites to add; None: all.
    """
    for module in list(proxy.modules()):
        if not isinstance(module, SourceCall) or OUTPUT in module._modules:
            continue
        if not isinstance(module, Place) and module.operation.kind not in ("conv", "residual_add"):
            continue
        if paths is not None and f"{module.path}.{OUTPUT}" not in paths:
            continue
        name = f"{module.source.name}.{OUTPUT}"
        file, line = module.source.file, module.source.line
        source = SiteSource(name=name, operation=OUTPUT, form="call", file=file, line=line)
        site = Site(source, f"{module.path}.{OUTPUT}")
        site.train(module.training)
        module.add_module(OUTPUT, site)
