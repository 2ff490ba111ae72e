"""PyTorch on the CPU, with the integer kernels of oneDNN.

An engine file holds a graph of torch's operators, lowered from the ONNX file, and needs nothing but torch. There are
two roads. The eager one calls operator by operator; its file is built in seconds, and for every CPU. The compiled one
is a shared library that Inductor builds, which takes a C++ compiler and about a minute, and belongs to the release of
torch and the kind of processor that built it. Where both can be had they are timed, and the faster one is written.
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
    """Backend of PyTorch for the CPU."""

    device = "cpu"

    def __init__(self, name: str = "torch") -> None:
        self.name = name

    def check(self, options: BuildOptions) -> None:
        """Raise for options that are for a GPU, a torch without oneDNN, or a compiler that is missing."""
        options.check_for(self)
        # It imports torch, which takes seconds.
        from quantizer.engines.torch_engine.engine import checked_library

        checked_library(self.name, options.compiled)

    def build(self, onnx_path: Path, engine_path: Path, options: BuildOptions) -> Sequence[str]:
        """Lower the ONNX file, compile it where that makes it faster, and write the result."""
        from quantizer.engines.torch_engine.engine import built_file

        self.check(options)
        report = options.progress or (lambda share, phase: None)
        usual = {name: sizes[1] for name, sizes in options.dynamic.items()}
        file, warnings = built_file(onnx_path, options.compiled, report, usual)
        write_engine(engine_path, memoryview(file.packed()), cpu=cpu_instructions())
        report(1.0, "compile")
        return *warnings, *saturation_warnings(self.name, onnx_path)

    def load(self, path: Path, *, threads: int = 1, verify: bool = True, trust: bool = False) -> TorchEngine:
        """Load an engine file, or lower an ``.onnx`` file for the eager road.

        Args:
            path: a file that ``build`` wrote, or one whose name ends in ``.onnx``.
            threads: threads of the CPU to run on.
            verify: compare an engine file with the checksum in it.
            trust: load a compiled engine, which is native code, also where this process has not built it.
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
        """Run an engine file, or an ``.onnx`` file: an eager one operator by operator, a compiled one as a whole."""
        from quantizer.engines.torch_engine.engine import read_file
        from quantizer.engines.torch_engine.inspect import inspect_graph

        return inspect_graph(self.name, read_file(path, trust=trust), sizes, threads, runs)


for _name in ("torch", "torch-avx2"):
    backends.add(_name)(TorchBackend(_name))
