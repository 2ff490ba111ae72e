"""CUDA graphs of a function of tensors, one for each combination of input shapes.

A graph replays all kernels of a call with one launch. Its inputs and outputs have fixed places in memory, so calls copy
inputs in and outputs out, one call at a time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Compute = Callable[..., Sequence[Tensor]]

_MOST_GRAPHS = 16
"""Graphs that are kept; each holds the memory of all its intermediate values."""


def captured(compute: Compute, inputs: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """Return a function of inputs of the same shapes on a GPU that replays a CUDA graph, and copies the outputs.

    Raises:
        RuntimeError: an operator of the function cannot be captured, such as one that waits for the GPU.
    """
    places = [tensor.clone() for tensor in inputs]
    cuda: Any = torch.cuda
    stream = cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Kernels compile, and libraries allocate their workspaces, before the capture.
        for _ in range(2):
            compute(*places)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads may copy tensors to and from the GPU meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = compute(*places)

    def replay(given: Sequence[Tensor]) -> list[Tensor]:
        for place, tensor in zip(places, given, strict=True):
            place.copy_(tensor)
        graph.replay()
        return [output.clone() for output in outputs]

    return replay


class ShapeGraphs:
    """A function that captures a graph at the second call with the same input shapes, and replays it from then on.

    Attributes:
        reason: why nothing is captured any more; None: graphs are captured.
    """

    def __init__(
        self,
        compute: Compute,
        capture: Callable[[Compute, Sequence[Tensor]], Callable[[Sequence[Tensor]], Sequence[Tensor]]] = captured,
    ) -> None:
        self.reason: str | None = None
        self._compute, self._capture = compute, capture
        self._graphs: OrderedDict[tuple[torch.Size, ...], Callable[[Sequence[Tensor]], Sequence[Tensor]] | None]
        self._graphs = OrderedDict()
        self._too_large: set[tuple[torch.Size, ...]] = set()
        self._turn = threading.Lock()

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        """Return the outputs of the function, in memory of their own."""
        shapes = tuple(tensor.shape for tensor in inputs)
        with self._turn:
            replay = None if shapes in self._too_large else self._replay(shapes, inputs)
            if replay is not None:
                return replay(inputs)
            if self.reason is None:
                # Another thread may capture a graph next, and kernels of this call would break the capture.
                return self._compute(*inputs)
        return self._compute(*inputs)

    def _replay(
        self, shapes: tuple[torch.Size, ...], inputs: Sequence[Tensor]
    ) -> Callable[[Sequence[Tensor]], Sequence[Tensor]] | None:
        """Return the replay of these shapes, captured at their second call; None before, or if the capture failed."""
        is_known = shapes in self._graphs
        replay = self._graphs.pop(shapes, None)
        if replay is None and is_known and self.reason is None:
            replay = self._captured(shapes, inputs)
        self._graphs[shapes] = replay
        while len(self._graphs) > _MOST_GRAPHS:
            self._graphs.popitem(last=False)
        return replay

    def forget(self) -> None:
        """Drop all graphs, so that the next calls capture new ones."""
        with self._turn:
            self._graphs.clear()
            self._too_large.clear()

    def _captured(
        self, shapes: tuple[torch.Size, ...], inputs: Sequence[Tensor]
    ) -> Callable[[Sequence[Tensor]], Sequence[Tensor]] | None:
        try:
            return self._capture(self._compute, inputs)
        except torch.OutOfMemoryError:
            # The kept graphs hold memory that this call needs. Their shapes are captured again.
            self._graphs.clear()
            self._too_large.add(shapes)
        except RuntimeError as error:
            self.reason = f"no CUDA graphs: {(str(error).splitlines() or [type(error).__name__])[0]}"
        return None
