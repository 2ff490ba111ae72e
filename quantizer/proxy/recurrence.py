"""Recurrent layers of torch in Python, whose products are sites.

Legend: as in ``numerics/recurrence.py``; x [T, B, I], hidden [B, P], cell [B, H], weights in torch's order.

Legend: as above; D directions, which is 1 or 2. The arguments are those of torch's kernels, such as
``torch.lstm``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quantizer.errors import ExportError
from quantizer.numerics import recurrence as ops
from quantizer.numerics.recurrence import CELLS, steps
from quantizer.proxy.site import Site
from quantizer.rewrite.host_argument import RECURRENCE
from quantizer.rewrite.operations import input_product, recurrent_product


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


_CELLS = {nn.LSTMCell: "lstm", nn.GRUCell: "gru"}


def add_recurrences(model: nn.Module) -> None:
    """Give each of torch's recurrent modules in a model a ``Recurrence``, which its rewritten ``forward`` calls."""
    for module in list(model.modules()):
        if isinstance(module, nn.RNNBase | nn.RNNCellBase) and RECURRENCE not in module._modules:
            module.add_module(RECURRENCE, _made_for(module).train(module.training))


def _made_for(module: nn.RNNBase | nn.RNNCellBase) -> Recurrence:
    if isinstance(module, nn.RNNCellBase):
        plain = f"rnn_{getattr(module, 'nonlinearity', 'tanh')}"
        kind = next((name for cls, name in _CELLS.items() if isinstance(module, cls)), plain)
        return Recurrence({"l0": RecurrentLayer(kind, _size(module.weight_hh), is_cell=True)})
    projects = bool(getattr(module, "proj_size", 0))
    weights, layers = _size(module.weight_hh_l0), {}
    for layer in range(module.num_layers):
        for backward in (False, True)[: 1 + bool(module.bidirectional)]:
            name = f"l{layer}_reverse" if backward else f"l{layer}"
            layers[name] = RecurrentLayer(module.mode.lower(), weights, backward=backward, projects=projects)
    return Recurrence(layers)


def _size(weight: Any) -> int:
    return int(weight.numel())


class Recurrence(nn.Module):
    """The layers of a recurrent module, ``l0``, ``l0_reverse``, ``l1`` and so on; their parameters are the module's."""

    def __init__(self, layers: dict[str, RecurrentLayer]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def layers(self) -> list[RecurrentLayer]:
        """Return all directions of all layers, in the order of torch's states."""
        return [child for child in self._modules.values() if isinstance(child, RecurrentLayer)]

    def forward(self, kernel: Callable[..., Any], x: Tensor, states: Any, *args: Any) -> Any:
        """Return what ``kernel(x, states, *args)`` does, with the layers in Python whose products are watched.

        Args:
            kernel: that of torch, for a whole sequence or for a cell.
            x: [T, B, I] or [B, T, I]; of a cell [B, I].
            states: [L D, B, P]; of an LSTM a tuple of them and [L D, B, H].
            args: its further arguments.
        """
        layers = self.layers()
        if not any(layer.is_watched() for layer in layers):
            return kernel(x, states, *args)
        if layers[0].is_cell:
            return _cell(layers[0], x, states, LayerWeights(*args))
        return self._sequence(kernel, x, states, *args)

    def _sequence(
        self,
        kernel: Callable[..., Any],
        x: Tensor,
        states: Any,
        weights: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        layers = self.layers()
        directions = 1 + bool(bidirectional)
        each = len(weights) // len(layers)
        before = states if isinstance(states, tuple | list) else (states,)
        after: list[tuple[Tensor, ...]] = []
        x = x.transpose(0, 1) if batch_first else x
        for start in range(0, len(layers), directions):
            part = slice(start, start + directions)
            given, own = [state[part] for state in before], list(weights[start * each : (start + directions) * each])
            if any(layer.is_watched() for layer in layers[part]):
                x, found = _in_python(layers[part], x, given, own, has_biases)
            else:
                first = given[0] if len(given) == 1 else tuple(given)
                x, *rest = kernel(x, first, own, has_biases, 1, 0.0, train, bidirectional, False)
                found = tuple(rest)
            after.append(found)
            if dropout and train and start + directions < len(layers):
                x = functional.dropout(x, dropout)
        last = [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*after, strict=True)]
        return x.transpose(0, 1) if batch_first else x, *last


def _in_python(
    layers: Sequence[RecurrentLayer], x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], has_biases: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the outputs [T, B, D P] of one layer, and its states [D, B, P] and [D, B, H] behind the last step."""
    each = len(weights) // len(layers)
    found = []
    for place, layer in enumerate(layers):
        own = weights[place * each : (place + 1) * each]
        biases = own[2:4] if has_biases else (None, None)
        named = LayerWeights(own[0], own[1], biases[0], biases[1], own[-1] if layer.projects else None)
        found.append(layer(x, states[0][place], states[-1][place], named))
    outputs, *after = zip(*found, strict=True)
    kept = after if CELLS[layers[0].kind].has_cell else after[:1]
    whole = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
    return whole, tuple(torch.stack(state) for state in kept)


def _cell(layer: RecurrentLayer, x: Tensor, states: Any, weights: LayerWeights) -> Any:
    """Return the states after one step: a tensor [B, H], of an LSTM a tuple of two."""
    hidden, cell = states if CELLS[layer.kind].has_cell else (states, states)
    _, hidden, cell = layer(x.unsqueeze(0), hidden, cell, weights)
    return (hidden, cell) if CELLS[layer.kind].has_cell else hidden
