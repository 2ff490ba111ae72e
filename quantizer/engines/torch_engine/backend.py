"""Backend of PyTorch on the CPU, with the integer kernels of oneDNN.

An engine file holds a graph of torch operators, lowered from the ONNX file. An eager engine is built in seconds for
every CPU and runs operator by operator. A compiled engine is a shared library of Inductor: it needs a C++ compiler and
about a minute, and belongs to the torch release and processor type. If both are possible, the faster one is written.

An ONNX file can also be loaded on an NVIDIA GPU, where Triton kernels compute the linear layers and norms.
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


class TorchBackend:
    """Backend of PyTorch for the CPU, which also loads ONNX files on a GPU."""

    device = "cpu"
    devices = ("cpu", "cuda")

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

    def load(
        self,
        path: Path,
        *,
        threads: int = 1,
        verify: bool = True,
        trust: bool = False,
        device: str = "cpu",
        inference_precision: str = "float16",
    ) -> TorchEngine:
        """Load an engine file, or lower an ``.onnx`` file for eager execution.

        Args:
            path: a file of ``build``, or a file with the suffix ``.onnx``.
            threads: number of CPU threads.
            verify: compare an engine file with the checksum in it.
            trust: load a compiled engine, which is native code, even if this process has not built it.
            device: ``cuda`` for an ``.onnx`` file on a GPU, which needs the extra ``triton``.
            inference_precision: type of non-quantized operations on a GPU, ``float16`` or ``bfloat16``.
        """
        if device != "cpu":
            from quantizer.engines.torch_engine.gpu_engine import load_on_gpu

            return load_on_gpu(path, threads=threads, inference_precision=inference_precision)
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


for _name in ("torch", "torch-avx2"):
    backends.add(_name)(TorchBackend(_name))
