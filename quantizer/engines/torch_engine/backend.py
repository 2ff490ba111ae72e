"""Backends of PyTorch: on the CPU with the integer kernels of oneDNN, and on an NVIDIA GPU with kernels of Triton.

An engine file for a CPU holds a graph of torch operators, lowered from the ONNX file. An eager engine is built in
seconds for every CPU and runs operator by operator. A compiled engine is a shared library of Inductor: it needs a C++
compiler and about a minute, and belongs to the torch release and processor type. If both are possible, the faster one
is written. For engines for a GPU see ``gpu_file.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quantizer.engines.backends import backends
from quantizer.engines.base import USUAL_SIZES, BuildOptions, InputSizes
from quantizer.engines.engine_file import write_engine
from quantizer.engines.for_this_cpu import saturation_warnings
from quantizer.engines.inspection import RUNS
from quantizer.utils.cpu import cpu_instructions
from quantizer.utils.records import Inspection

if TYPE_CHECKING:
    from quantizer.engines.torch_engine.engine import TorchEngine
    from quantizer.engines.torch_engine.gpu_engine import GpuEngine


class TorchBackend:
    """Backend of PyTorch for the CPU."""

    device = "cpu"

    def __init__(self, name: str = "torch") -> None:
        self.name = name

    def check(self, options: BuildOptions) -> None:
        """Raise for GPU options, a torch without oneDNN, or a missing compiler."""
        options.check_for(self)
        # This imports torch, which takes seconds.
        from quantizer.engines.torch_engine.engine import checked_library

        checked_library(self.name, options.compiled)

    def build(self, onnx_path: Path, engine_path: Path, options: BuildOptions) -> Sequence[str]:
        """Lower the ONNX file, write it eager or compiled, and return warnings."""
        from quantizer.engines.torch_engine.engine import built_file

        self.check(options)
        report = options.progress or (lambda share, phase: None)
        usual = {name: sizes[1] for name, sizes in options.dynamic.items()}
        file, warnings = built_file(onnx_path, options.compiled, report, usual)
        write_engine(engine_path, memoryview(file.packed()), cpu=cpu_instructions())
        report(1.0, "compile")
        return *warnings, *saturation_warnings(self.name, onnx_path)

    def load(self, path: Path, *, threads: int = 1, verify: bool = True, trust: bool = False) -> TorchEngine:
        """Load an engine file, or lower an ``.onnx`` file for eager execution.

        Args:
            path: a file of ``build``, or a file with the suffix ``.onnx``.
            threads: number of CPU threads.
            verify: compare an engine file with the checksum in it.
            trust: load a compiled engine, which is native code, even if this process has not built it.
        """
        from quantizer.engines.torch_engine.engine import loaded, read_file

        return loaded(read_file(path, verify=verify, trust=trust), threads)

    def inspect(
        self,
        path: Path,
        *,
        threads: int = 1,
        sizes: InputSizes = USUAL_SIZES,
        runs: int = RUNS,
        trust: bool = False,
    ) -> Inspection:
        """Run an engine file or an ``.onnx`` file; an eager engine is timed operator by operator."""
        from quantizer.engines.torch_engine.engine import read_file
        from quantizer.engines.torch_engine.inspect import inspect_graph

        return inspect_graph(self.name, read_file(path, trust=trust), sizes, threads, runs)


class GpuTorchBackend:
    """Backend of PyTorch for an NVIDIA GPU; it also builds engines on a machine without one."""

    name = "torch-cuda"
    device = "cuda"

    def check(self, options: BuildOptions) -> None:
        """Raise for options of other backends."""
        options.check_for(self)

    def build(self, onnx_path: Path, engine_path: Path, options: BuildOptions) -> Sequence[str]:
        """Write the graph of the ONNX file; on a machine with a GPU, measure its kernels first."""
        from quantizer.engines.torch_engine.gpu_file import built_for_gpu

        self.check(options)
        report = options.progress or (lambda share, phase: None)
        file, warnings = built_for_gpu(onnx_path, options, report)
        write_engine(engine_path, memoryview(file.packed()))
        report(1.0, "compile")
        return warnings

    def load(self, path: Path, *, threads: int = 1, verify: bool = True, trust: bool = False) -> GpuEngine:
        """Load an engine file or an ``.onnx`` file onto the GPU; a file contains no native code."""
        from quantizer.engines.torch_engine.gpu_file import load_on_gpu

        return load_on_gpu(path, threads=threads, verify=verify)

    def inspect(
        self,
        path: Path,
        *,
        threads: int = 1,
        sizes: InputSizes = USUAL_SIZES,
        runs: int = RUNS,
        trust: bool = False,
    ) -> Inspection:
        """Run an engine file or an ``.onnx`` file on the GPU; layers have no times."""
        from quantizer.engines.torch_engine.gpu_file import inspect_on_gpu

        return inspect_on_gpu(path, self.name, threads, sizes)


for _name in ("torch", "torch-avx2"):
    backends.add(_name)(TorchBackend(_name))
backends.add("torch-cuda")(GpuTorchBackend())
