"""A GPU for tests on a machine without one: its kernels are their references in torch, on the CPU.

There is no TensorRT beside it, whose builder needs the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import Any

import pytest

from quantizer.engines import for_this_gpu
from quantizer.engines.tensorrt import TensorRTBackend
from quantizer.engines.torch_engine import gpu_file
from quantizer.engines.torch_engine.gpu_engine import GpuEngine, engine_of
from quantizer.errors import MissingDependencyError
from quantizer.utils import gpu

NAME = "NVIDIA H200 (compute capability 9.0)"


def on_cpu(imported: Any, _: str, **options: Any) -> GpuEngine:
    """Return an engine with reference kernels on the CPU."""
    return engine_of(imported, "cpu", triton=False, **options)


@contextmanager
def gpu_stand_in(capability: tuple[int, int] = (9, 0)) -> Iterator[pytest.MonkeyPatch]:
    """Let this machine have a GPU, and Triton."""

    def no_tensorrt(*_: object) -> None:
        raise MissingDependencyError("tensorrt", "tensorrt")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "is_present", lambda: True)
        patch.setattr(gpu, "capability", lambda: capability)
        patch.setattr(gpu, "description", lambda: NAME)
        patch.setattr(for_this_gpu, "find_spec", lambda name: ModuleSpec(name, None))
        patch.setattr(gpu_file, "import_library", lambda *_: None)
        patch.setattr(gpu_file, "engine_of", on_cpu)
        patch.setattr(TensorRTBackend, "check", no_tensorrt)
        # Inductor takes a minute.
        patch.setattr(gpu_file, "missing_compiler", lambda: "this test compiles nothing")
        yield patch
