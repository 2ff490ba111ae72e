"""PyTorch on the CPU, with the integer kernels of oneDNN.

An engine file holds a graph of torch's operators, lowered from the ONNX file, and needs nothing but torch. There are
two roads. The eager one calls operator by operator; its file is built in seconds, and for every CPU. The compiled one
is a shared library that Inductor builds, which takes a C++ compiler and about a minute, and belongs to the release of
torch and the kind of processor that built it. Where both can be had they are timed, and the faster one is written.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING

from quantizer.engines.backends import backends
from quantizer.engines.base import BuildOptions, BuildResult
from quantizer.engines.candidates import saturation_warnings
from quantizer.engines.cpu import cpu_instructions
from quantizer.engines.engine_file import checked_onnx, checked_output, write_engine
from quantizer.engines.inspection.from_layers import RUNS
from quantizer.engines.inspection.inspection import Inspection
from quantizer.engines.optional_import import import_library
from quantizer.errors import EngineError

if TYPE_CHECKING:
    from quantizer.engines.torch_engine.engine import TorchEngine


class TorchBackend:
    """Backend of PyTorch for the CPU."""

    device = "cpu"

    def __init__(self, name: str = "torch") -> None:
        self.name = name

    def check(self, options: BuildOptions) -> None:
        """Raise for options that are for a GPU, a torch without oneDNN, or a compiler that is missing."""
        if options.compute_capability is not None:
            raise EngineError(
                f"backend {self.name} builds for the CPU: leave out compute_capability {options.compute_capability!r}"
            )
        options.check_for(self.name)
        _engine_module().checked_library(self.name, options.compiled)

    def build(self, onnx_path: Path, engine_path: Path, options: BuildOptions) -> BuildResult:
        """Lower the ONNX file, compile it where that makes it faster, and write the result."""
        self.check(options)
        started = time.perf_counter()
        checked_onnx(onnx_path)
        checked_output(engine_path, onnx_path)
        report = options.progress or (lambda share, phase: None)
        usual = {name: sizes[1] for name, sizes in options.dynamic.items()}
        file, warnings = _engine_module().built_file(onnx_path, options.compiled, report, usual)
        write_engine(engine_path, memoryview(file.packed()), cpu=cpu_instructions())
        report(1.0, "compile")
        return BuildResult(
            engine_path,
            engine_path.stat().st_size,
            time.perf_counter() - started,
            (*warnings, *saturation_warnings(self.name, onnx_path)),
        )

    def load(self, path: Path, *, threads: int = 1, verify: bool = True, trust: bool = False) -> TorchEngine:
        """Load an engine file, or lower an ``.onnx`` file for the eager road.

        Args:
            path: a file that ``build`` wrote, or one whose name ends in ``.onnx``.
            threads: threads of the CPU to run on.
            verify: compare an engine file with the checksum in it.
            trust: load a compiled engine, which is native code, also where this process has not built it.
        """
        module = _engine_module()
        found: TorchEngine = module.loaded(module.read_file(path, verify=verify, trust=trust), threads)
        return found

    def inspect(
        self,
        path: Path,
        *,
        threads: int = 1,
        batch: int = 8,
        sequence: int = 128,
        sizes: Mapping[str, int] = MappingProxyType({}),
        runs: int = RUNS,
        trust: bool = False,
    ) -> Inspection:
        """Run an engine file, or an ``.onnx`` file: an eager one operator by operator, a compiled one as a whole."""
        found: Inspection = _engine_module().inspected(
            self.name, path, threads, batch, sequence, sizes, runs, trust=trust
        )
        return found


def _engine_module() -> ModuleType:
    """Import what imports torch, which takes seconds."""
    return import_library("torch", f"{__package__}.engine")


for _name in ("torch", "torch-avx2"):
    backends.add(_name)(TorchBackend(_name))
