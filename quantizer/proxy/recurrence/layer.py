"""One direction of one recurrent layer in Python, whose products are sites.

Legend: as in ``numerics/recurrence.py``; x [T, B, I], hidden [B, P], cell [B, H], weights in torch's order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantizer.numerics.recurrence import steps
from quantizer.operations.catalogue import input_product, recurrent_product
from quantizer.proxy.recurrence.recorded import as_operator
from quantizer.proxy.site import Site


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The parameters of one direction of one layer: [G, I], [G, P], twice [G] or None, and [P, H] or None."""

    input: Tensor
    hidden: Tensor
    input_bias: Tensor | None = None
    hidden_bias: Tensor | None = None
    projection: Tensor | None = None


class RecurrentLayer(nn.Module):
    """One direction of one layer: a product with all inputs at once, then one with the hidden state in each step.

    Attributes:
        kind: the name of its cell, of ``CELLS``.
        backward: whether it runs from the last step to the first.
        weights: how many weights its recurrent product has.
        projects: whether hidden states are multiplied by a projection.
        is_cell: whether it is a cell, called with one step at a time.
    """

    def __init__(
        self, kind: str, weights: int, *, backward: bool = False, projects: bool = False, is_cell: bool = False
    ) -> None:
        super().__init__()
        self.kind = kind
        self.weights = weights
        self.backward = backward
        self.projects = projects
        self.is_cell = is_cell

    def sites(self) -> list[Site]:
        """Return its sites, in the order of its text."""
        # Not self._modules: rewritten text does not see sites there.
        return [child for child in vars(self)["_modules"].values() if isinstance(child, Site)]

    def is_watched(self) -> bool:
        """Return whether one of its sites rounds, observes or is judged, so that it has to run here."""
        return any(site.active or site.observer is not None or site.judge is not None for site in self.sites())

    def forward(self, x: Tensor, hidden: Tensor, cell: Tensor, weights: LayerWeights) -> tuple[Tensor, Tensor, Tensor]:
        """Return the hidden states [T, B, P] of all steps, and both states after the last."""
        recorded = as_operator(self, x) if torch.compiler.is_exporting() else None
        if recorded is not None and recorded.at_run_time:
            return recorded.of_inputs(x, hidden, cell, weights)
        given = input_product(x, weights.input, weights.input_bias)
        if recorded is not None:
            return recorded.of_products(given, hidden, cell, weights)

        def recurrent(state: Tensor) -> Tensor:
            return recurrent_product(state, weights.hidden, weights.hidden_bias)

        def projected(state: Tensor) -> Tensor:
            assert weights.projection is not None
            return recurrent_product(state, weights.projection)

        project = None if weights.projection is None else projected
        return steps(self.kind, given, (hidden, cell), recurrent, project, backward=self.backward)
