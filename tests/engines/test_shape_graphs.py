"""Graphs of calls by their shapes, with a capture that needs no GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quantizer.engines.torch_engine.shape_graphs import ShapeGraphs


class Captures:
    """A capture of a function that doubles its input, which counts captures and replays by the number of rows."""

    def __init__(self, error: str = "") -> None:
        self.error, self.captured, self.replayed, self.computed = error, list[int](), list[int](), list[int]()

    def compute(self, x: Tensor) -> list[Tensor]:
        """Double x."""
        self.computed.append(len(x))
        return [2 * x]

    def capture(
        self, compute: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]
    ) -> Callable[[Sequence[Tensor]], list[Tensor]]:
        """Count a capture."""
        if self.error:
            raise RuntimeError(self.error)
        self.captured.append(len(inputs[0]))

        def replay(given: Sequence[Tensor]) -> list[Tensor]:
            self.replayed.append(len(given[0]))
            return [2 * given[0]]

        return replay


def _called(graphs: ShapeGraphs, rows: int) -> None:
    x = torch.randn(rows, 3)
    assert torch.equal(graphs(x)[0], 2 * x)


def test_a_shape_is_captured_at_its_second_call() -> None:
    captures = Captures()
    graphs = ShapeGraphs(captures.compute, captures.capture)
    for rows in (2, 2, 5, 2, 5, 5):
        _called(graphs, rows)
    assert captures.computed == [2, 5]
    assert captures.captured == [2, 5]
    assert captures.replayed == [2, 2, 5, 5]
    graphs.forget()
    _called(graphs, 2)
    assert captures.computed == [2, 5, 2]


def test_the_graphs_of_old_shapes_are_dropped() -> None:
    captures = Captures()
    graphs = ShapeGraphs(captures.compute, captures.capture)
    for _ in range(2):
        for rows in range(1, 18):
            _called(graphs, rows)
    assert captures.captured == []  # each shape was dropped before its second call
    for rows in (16, 17, 16):
        _called(graphs, rows)
    assert captures.captured == [16, 17]


def test_a_function_that_cannot_be_captured_is_called() -> None:
    captures = Captures("operation not permitted when stream is capturing\nmore")
    graphs = ShapeGraphs(captures.compute, captures.capture)
    for rows in (2, 2, 2):
        _called(graphs, rows)
    assert captures.computed == [2, 2, 2]
    assert graphs.reason == "no CUDA graphs: operation not permitted when stream is capturing"
