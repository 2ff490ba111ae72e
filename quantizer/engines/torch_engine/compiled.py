"""The compiled road: Inductor's ahead-of-time compiler, which fuses all that lies between the integer kernels.

The prepacking stays in the graph as an operator on a constant. With freezing, Inductor computes it while it compiles,
and the kernels' own layout of the weights becomes part of the library that it builds.
"""

from __future__ import annotations

import atexit
import hashlib
import io
import re
import threading
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from quantizer.common.interrupts import interrupts_end_the_block
from quantizer.engines.base import TensorSpec
from quantizer.engines.measure.dummy_inputs import made_up_inputs
from quantizer.engines.torch_engine.lowered_graph import LoweredGraph
from quantizer.engines.torch_engine.lowering.node_shapes import prepacking_without_data
from quantizer.engines.trust import note_built
from quantizer.errors import EngineError
from quantizer.files import scratch

_SETTINGS = {"freezing": True, "cpp.dynamic_threads": True}

_MOST_LOADED = 8
_LOADED: OrderedDict[bytes, Any] = OrderedDict()
_LOADING = threading.Lock()
"""Packages that were loaded last, by their SHA-256. The C library never unmaps one, so each is loaded once."""

# Each has a folder of its own until it goes.
atexit.register(_LOADED.clear)


def missing_compiler() -> str | None:
    """Return why nothing can be compiled here; None if a C++ compiler is found."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "no C++ compiler is found (g++ or clang++ in PATH, or the one that CXX names)"
    return None


def compile_graph(
    module: LoweredGraph,
    specs: Sequence[TensorSpec],
    batch: int,
    sequence: int,
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> bytes:
    """Return the package of a lowered graph: an archive with a shared library that holds the weights.

    Args:
        module: the graph.
        specs: its inputs; their dynamic axes stay dynamic.
        batch: size of the first dimension of an input, where it is dynamic, to compile with.
        sequence: size of its other dynamic dimensions.
        sizes: sizes of dynamic dimensions by name, where they are known; they come before the two.

    Raises:
        EngineError: torch cannot export or compile it.
    """
    dynamic = torch.export.Dim.DYNAMIC
    axes = tuple({axis: dynamic for axis, size in enumerate(spec.shape) if size is None} for spec in specs)
    arrays = made_up_inputs(specs, batch, sequence, sizes=sizes)
    inputs = tuple(torch.from_numpy(arrays[spec.name]) for spec in specs)
    with (
        interrupts_end_the_block(),
        scratch() as folder,
        torch.no_grad(),
        prepacking_without_data(),
        warnings.catch_warnings(),
    ):
        path = folder / "compiled.pt2"
        try:
            # Inductor warns of its own deprecated calls.
            warnings.simplefilter("ignore")
            # Its names are those of the import, which an ONNX file does not choose.
            program = torch.export.export(fx.GraphModule(module, module.graph), inputs, dynamic_shapes=axes)
            torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=_SETTINGS)
        except (AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            # What the compiler stumbles over comes as any of these.
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise EngineError(f"Inductor could not compile the graph: {lines[0]}") from error
        package = path.read_bytes()
    note_built(package)
    return package


class CompiledGraph:
    """Package that ``compile_graph`` returned, ready to run. Nothing in it is unpickled.

    Args:
        package: the package.

    Raises:
        EngineError: it is damaged, or was built by another torch or for another processor.
    """

    def __init__(self, package: bytes) -> None:
        digest = hashlib.sha256(package).digest()
        with _LOADING:
            self._runner = _LOADED.pop(digest, None) or _loaded(package)
            _LOADED[digest] = self._runner
            while len(_LOADED) > _MOST_LOADED:
                _LOADED.popitem(last=False)

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Run it once."""
        return self._runner.run(list(inputs))


def _loaded(package: bytes) -> Any:
    with scratch() as folder:
        path = folder / "compiled.pt2"
        path.write_bytes(package)
        try:
            # torch's own loading function unpickles what it finds beside the library; the runner does not.
            return torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
        except RuntimeError as error:
            first = str(error).partition("\n")[0]
            raise EngineError(f"torch {torch.__version__} cannot load the compiled graph: {first}") from error


def kernel_calls(package: bytes, *names: str) -> int:
    """Return how often the library's source, which a package holds, calls kernels of oneDNN of these names."""
    with zipfile.ZipFile(io.BytesIO(package)) as archive:
        sources = [archive.read(name).decode() for name in archive.namelist() if name.endswith(".wrapper.cpp")]
    pattern = rf"\baoti_torch_cpu__(?:{'|'.join(names)})(?:_binary)?(?:_tensor)?\("
    return sum(len(re.findall(pattern, source)) for source in sources)
