"""Data for NVIDIA's Triton on the engines of a target.

It is from the documents and the sources of Triton's backends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TritonServer:
    """The one of Triton's backends that runs the engines of a target.

    Attributes:
        chosen_by: the line of a configuration that names it.
        file: the name of the file that it loads.
        takes: what that file is: our engine's, the ONNX file, or the engine without the line after it; None: another
            one, which has to be built on a GPU.
        kind: the kind of its instances.
        batches: whether requests of any size up to ``max_batch_size`` run as they are, and may be put together.
        basic_level: its number of the level of basic optimizations, for engine files that run as here at that one;
            None: it has no levels.
        parameters: its parameters by name; ``{threads}`` stands for the number of threads.
        hints: further parameters, by the inference precision of the engine.
        remarks: what a configuration says of itself.
        unhinted: what it says besides where there are no hints for the precision.
        gpu_tool: the program that runs the engines from the command line; None: they run on a CPU.
    """

    chosen_by: str
    file: str
    takes: Literal["engine", "onnx", "plan"] | None
    kind: Literal["KIND_CPU", "KIND_GPU"]
    batches: bool = True
    basic_level: str | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    hints: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    unhinted: tuple[str, ...] = ()
    gpu_tool: str | None = None
