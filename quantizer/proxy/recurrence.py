"""Recurrent layers of torch in Python, whose matrix multiplications are sites.

A layer runs in Python only if one of its sites is active or observed; otherwise torch's kernel runs it.

Legend as in ``numerics/recurrence.py``; x [T, B, I], hidden [B, P], cell [B, H], weights in torch's order; D
directions, 1 or 2. The arguments are those of torch's kernels, such as ``torch.lstm``.
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
    """One direction of one layer: one linear for all inputs, then one for the hidden state in each step.

    Attributes:
        kind: the name of its cell, of ``CELLS``.
        backward: whether it runs from the last step to the first.
        weights: the number of elements of its recurrent weight.
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
        """Return its sites, in the order of its source."""
        # Not self._modules, because rewritten source does not see sites there.
        return [child for child in vars(self)["_modules"].values() if isinstance(child, Site)]

    def is_watched(self) -> bool:
        """Return whether a site is active or watched, so that the layer must run in Python."""
        return any(site.active or site.observer is not None or site.judge is not None for site in self.sites())

    def forward(self, x: Tensor, hidden: Tensor, cell: Tensor, weights: LayerWeights) -> tuple[Tensor, Tensor, Tensor]:
        """Return the hidden states [T, B, P] of all steps, and both states after the last step."""
        recorded = as_operator(self, x) if torch.compiler.is_exporting() else None
        if recorded is not None and recorded.at_run_time:
            return recorded.of_inputs(x, hidden, cell, weights)
        inputs = input_product(x, weights.input, weights.input_bias)
        if recorded is not None:
            return recorded.of_products(inputs, hidden, cell, weights)

        def recurrent(state: Tensor) -> Tensor:
            return recurrent_product(state, weights.hidden, weights.hidden_bias)

        def projected(state: Tensor) -> Tensor:
            assert weights.projection is not None
            return recurrent_product(state, weights.projection)

        project = None if weights.projection is None else projected
        return steps(self.kind, inputs, (hidden, cell), recurrent, project, backward=self.backward)


def as_operator(layer: Any, x: Tensor) -> RecordedLayer | None:
    """Return a frozen layer as an operator; None for a single step, which needs no operator."""
    # The source has a site for a projection even without one.
    inputs, step, *projection = layer.sites() if layer.projects else layer.sites()[:2]
    at_run_time = all(_at_run_time(site) for site in (inputs, step, *projection))
    if isinstance(x.shape[0], int) and x.shape[0] == 1 and not (at_run_time and layer.kind == "lstm"):
        return None
    in_float = next((site for site in (inputs, step, *projection) if not (site.active and site.frozen)), None)
    if in_float is not None:
        raise ExportError(
            f"{in_float.path} is not quantized but other sites of its recurrent layer are, which cannot be exported: "
            "exclude the complete layer to keep it in float"
        )
    return RecordedLayer(
        kind=layer.kind,
        backward=layer.backward,
        given=inputs,
        step=step,
        projection=projection[0] if projection else None,
        at_run_time=at_run_time,
    )


def _at_run_time(site: Site) -> bool:
    return site.quantizer(0).dynamic and site.quantizer(0).block_size is None


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedLayer:
    """A frozen layer, exported as one operator.

    Attributes:
        kind: the name of its cell.
        backward: whether it runs from the last step to the first.
        given: the site of the input weight.
        step: the site of the recurrent weight.
        projection: the site of the projection; None without one.
        at_run_time: whether ranges are dynamic; the operator then also multiplies the inputs.
    """

    kind: str
    backward: bool
    given: Site
    step: Site
    projection: Site | None
    at_run_time: bool

    def of_inputs(self, x: Tensor, hidden: Tensor, cell: Tensor, weights: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return the result of the layer for x [T, B, I]."""
        stored: list[Tensor] = []
        for site in (self.given, self.step):
            quantizer = site.quantizer_of("weight")
            assert quantizer.stored is not None
            assert quantizer.scale is not None
            stored += [quantizer.stored, quantizer.scale.expand(quantizer.stored.shape[0])]
        bias = None
        if weights.input_bias is not None:
            bias = torch.cat([_shifted(self.given, weights.input_bias), _shifted(self.step, weights.hidden_bias)])
        result: tuple[Tensor, Tensor, Tensor] = ops.dynamic_lstm(x, hidden, cell, *stored, bias, self.backward)
        return result

    def of_products(self, given: Tensor, hidden: Tensor, cell: Tensor, weights: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return the result of the layer for its inputs multiplied by their weight, [T, B, G]."""
        rounded, weight = self.step.quantizer_of("input"), self.step.quantizer_of("weight")
        after = None if self.projection is None else self.projection.quantizer_of("input")
        projection = None if self.projection is None else self.projection.quantizer_of("weight")
        result: tuple[Tensor, Tensor, Tensor] = ops.recurrence(
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
        return result


def _shifted(site: Site, bias: Tensor) -> Tensor:
    return bias if site.bias_shift is None else bias + site.bias_shift.to(bias)


_CELLS = {nn.LSTMCell: "lstm", nn.GRUCell: "gru"}


def add_recurrences(model: nn.Module) -> None:
    """Add a ``Recurrence``, which the rewritten ``forward`` calls, to each of torch's recurrent modules."""
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
    """The layers of a recurrent module: ``l0``, ``l0_reverse``, ``l1`` and so on; the module owns their parameters."""

    def __init__(self, layers: dict[str, RecurrentLayer]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def layers(self) -> list[RecurrentLayer]:
        """Return all directions of all layers, in the order of torch's states."""
        return [child for child in self._modules.values() if isinstance(child, RecurrentLayer)]

    def forward(self, kernel: Callable[..., Any], x: Tensor, states: Any, *args: Any) -> Any:
        """Return the result of ``kernel(x, states, *args)``, with watched layers computed in Python.

        Args:
            kernel: torch's kernel, for a sequence or for a cell.
            x: [T, B, I] or [B, T, I]; [B, I] for a cell.
            states: [L D, B, P]; for an LSTM a tuple with also [L D, B, H].
            args: the other arguments of the kernel.
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
            initial, own = [state[part] for state in before], list(weights[start * each : (start + directions) * each])
            if any(layer.is_watched() for layer in layers[part]):
                x, final = _in_python(layers[part], x, initial, own, has_biases)
            else:
                first = initial[0] if len(initial) == 1 else tuple(initial)
                x, *kernel_states = kernel(x, first, own, has_biases, 1, 0.0, train, bidirectional, False)
                final = tuple(kernel_states)
            after.append(final)
            if dropout and train and start + directions < len(layers):
                x = functional.dropout(x, dropout)
        last = [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*after, strict=True)]
        return x.transpose(0, 1) if batch_first else x, *last


def _in_python(
    layers: Sequence[RecurrentLayer], x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], has_biases: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the outputs [T, B, D P] of one layer, and its states [D, B, P] and [D, B, H] after the last step."""
    each = len(weights) // len(layers)
    results = []
    for place, layer in enumerate(layers):
        own = weights[place * each : (place + 1) * each]
        biases = own[2:4] if has_biases else (None, None)
        named = LayerWeights(own[0], own[1], biases[0], biases[1], own[-1] if layer.projects else None)
        results.append(layer(x, states[0][place], states[-1][place], named))
    outputs, *after = zip(*results, strict=True)
    states_after = after if CELLS[layers[0].kind].has_cell else after[:1]
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
    return joined, tuple(torch.stack(state) for state in states_after)


def _cell(layer: RecurrentLayer, x: Tensor, states: Any, weights: LayerWeights) -> Any:
    """Return the states after one step: a tensor [B, H], or a tuple of two for an LSTM."""
    hidden, cell = states if CELLS[layer.kind].has_cell else (states, states)
    _, hidden, cell = layer(x.unsqueeze(0), hidden, cell, weights)
    return (hidden, cell) if CELLS[layer.kind].has_cell else hidden
