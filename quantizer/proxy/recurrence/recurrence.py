"""The recurrence of one of torch's recurrent modules, as layers that run in Python or in torch's kernel.

Legend: as in ``layer.py``; D directions, which is 1 or 2. The arguments are those of torch's kernels, such as
``torch.lstm``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quantizer.numerics.recurrence import CELLS
from quantizer.proxy.recurrence.layer import LayerWeights, RecurrentLayer
from quantizer.rewrite.host_argument import RECURRENCE

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
