"""A recurrent layer while a graph is recorded: the loop over its steps as one operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantizer.errors import ExportError
from quantizer.numerics import recurrence as ops
from quantizer.proxy.site import Site


def as_operator(layer: Any, x: Tensor) -> RecordedLayer | None:
    """Return a frozen layer as an operator; None if its one step is recorded as it is."""
    # The text has a site for a projection also where there is none.
    given, step, *projection = layer.sites() if layer.projects else layer.sites()[:2]
    at_run_time = all(_at_run_time(site) for site in (given, step, *projection))
    if isinstance(x.shape[0], int) and x.shape[0] == 1 and not (at_run_time and layer.kind == "lstm"):
        return None
    left = next((site for site in (given, step, *projection) if not (site.active and site.frozen)), None)
    if left is not None:
        raise ExportError(
            f"{left.path} does not round and other products of its recurrent layer do, for which there is no graph: "
            "exclude the whole layer, which leaves it float"
        )
    return RecordedLayer(
        kind=layer.kind,
        backward=layer.backward,
        given=given,
        step=step,
        projection=projection[0] if projection else None,
        at_run_time=at_run_time,
    )


def _at_run_time(site: Site) -> bool:
    return site.quantizer(0).dynamic and site.quantizer(0).block_size is None


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedLayer:
    """A layer to be recorded.

    Attributes:
        kind: the name of its cell.
        backward: whether it runs from the last step to the first.
        given: the site of its product with the inputs.
        step: the site of its recurrent product.
        projection: the site of its product with the projection; None if it has none.
        at_run_time: whether ranges are taken at run time, for which the operator computes the product with the inputs,
            too.
    """

    kind: str
    backward: bool
    given: Site
    step: Site
    projection: Site | None
    at_run_time: bool

    def of_inputs(self, x: Tensor, hidden: Tensor, cell: Tensor, weights: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the layer does of x [T, B, I]."""
        stored: list[Tensor] = []
        for site in (self.given, self.step):
            quantizer = site.quantizer_of("weight")
            assert quantizer.stored is not None
            assert quantizer.scale is not None
            stored += [quantizer.stored, quantizer.scale.expand(quantizer.stored.shape[0])]
        bias = None
        if weights.input_bias is not None:
            bias = torch.cat([_shifted(self.given, weights.input_bias), _shifted(self.step, weights.hidden_bias)])
        found: tuple[Tensor, Tensor, Tensor] = ops.dynamic_lstm(x, hidden, cell, *stored, bias, self.backward)
        return found

    def of_products(self, given: Tensor, hidden: Tensor, cell: Tensor, weights: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the layer does of its products with the inputs, [T, B, G]."""
        rounded, weight = self.step.quantizer_of("input"), self.step.quantizer_of("weight")
        after = None if self.projection is None else self.projection.quantizer_of("input")
        projection = None if self.projection is None else self.projection.quantizer_of("weight")
        found: tuple[Tensor, Tensor, Tensor] = ops.recurrence(
            self.kind,
            given,
            hidden,
            cell,
            weight.stored,
            None if weights.hidden_bias is None else _shifted(self.step, weights.hidden_bias),
            None if projection is None else projection.stored,
            weight.scale,
            weight.dtype,
            weight.axis,
            rounded.scale,
            rounded.dtype,
            rounded.zero_point,
            None if projection is None else projection.scale,
            None if after is None else after.scale,
            None if after is None else after.zero_point,
            self.backward,
        )
        return found


def _shifted(site: Site, bias: Tensor) -> Tensor:
    return bias if site.bias_shift is None else bias + site.bias_shift.to(bias)
