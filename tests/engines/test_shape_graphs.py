"""Graphs of calls by their shapes, with a capture that needs no GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quantizer.engines.torch_engine.shape_graphs import ShapeGraphs


class Captures:
    """A capture of a function that doubles its input, which counts captures and replays by the number of rows."""

    def __init__(self, error: str = "", *, largest: int = 100) -> None:
        self.error, self.largest = error, largest
        self.captured, self.replayed, self.computed = list[int](), list[int](), list[int]()

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
        if len(inputs[0]) > self.largest:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
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


def test_a_shape_without_memory_for_its_graph_is_left_out_alone() -> None:
    captures = Captures(largest=5)
    graphs = ShapeGraphs(captures.compute, captures.capture)
    for rows in (2, 2, 7, 7, 7):
        _called(graphs, rows)
    assert graphs.reason is None
    assert captures.computed == [2, 7, 7, 7]
    for rows in (2, 2, 2, 7):
        _called(graphs, rows)
    # The error dropped the graph of 2 rows, and its shape was captured again.
    assert captures.captured == [2, 2]
    assert captures.computed == [2, 7, 7, 7, 2, 7]
    captures.largest = 100
    graphs.forget()
    for _ in range(2):
        _called(graphs, 7)
    assert captures.captured == [2, 2, 7]


def test_nothing_is_computed_during_a_capture() -> None:
    captures, began, go_on, finished = Captures(), threading.Event(), threading.Event(), list[bool]()

    def compute(x: Tensor) -> list[Tensor]:
        if len(x) == 5:
            began.set()
            go_on.wait(5)
        return captures.compute(x)

    def capture(
        compute: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]
    ) -> Callable[[Sequence[Tensor]], list[Tensor]]:
        finished.append(5 in captures.computed)
        return captures.capture(compute, inputs)

    graphs = ShapeGraphs(compute, capture)
    _called(graphs, 2)
    other = threading.Thread(target=_called, args=(graphs, 5))
    other.start()
    assert began.wait(5)
    threading.Timer(0.2, go_on.set).start()
    _called(graphs, 2)
    other.join()
    assert finished == [True]


def test_calls_run_at_once_where_nothing_is_captured() -> None:
    both = threading.Barrier(2)

    def compute(x: Tensor) -> list[Tensor]:
        both.wait(5)
        return [2 * x]

    graphs = ShapeGraphs(compute)
    graphs.reason = "a CPU has no CUDA graphs"
    threads = [threading.Thread(target=lambda: _called(graphs, 2)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not both.broken
