"""Execution of lowered graphs: eager with prepacked weights, or compiled ahead of time by Inductor, and thread counts.

Inductor fuses the operators between integer kernels. Prepacking stays in the graph as an operator on a constant: with
freezing, Inductor computes it at compile time, so the library contains the packed weights.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import io
import re
import threading
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import fx

from quantizer.engines.base import InputSizes
from quantizer.engines.measure import made_up_inputs
from quantizer.engines.torch_engine.lowering import (
    CONVOLUTION_PREPACK,
    LINEAR,
    LINEAR_PREPACK,
    aten,
    is_call,
    only_reader,
    prepacking_without_data,
    quantize,
)
from quantizer.errors import EngineError
from quantizer.export.onnx_import.graph_builder import OperatorGraph
from quantizer.export.qdq.onnx_file import TensorSpec
from quantizer.numerics.weight_codes import byte_codes, spend_deprecation_warning
from quantizer.utils.child_process import interrupts_end_the_block
from quantizer.utils.cpu import note_built
from quantizer.utils.files import scratch


@contextmanager
def computing_threads(count: int) -> Iterator[None]:
    """Let torch compute on ``count`` threads inside the block.

    ``torch.set_num_threads`` also sets the default of new threads, so concurrent calls would leave wrong numbers
    behind. Only the number of this thread is set, if torch uses OpenMP.
    """
    # The first call of get_num_threads in a thread also initializes its number.
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    set_openmp, set_mkl = _setters()
    set_openmp(count)
    # MKL returns the previous number.
    before_mkl = set_mkl(count)
    try:
        yield
    finally:
        set_openmp(before)
        set_mkl(before_mkl)


@cache
def _setters() -> tuple[Callable[[int], object], Callable[[int], int]]:
    """Return functions that set the thread count of the calling thread in OpenMP and in MKL."""
    # PyDLL keeps the GIL; releasing it would take longer than the call.
    library = ctypes.PyDLL(torch._C.__file__)
    try:
        openmp = library.omp_set_num_threads
    except AttributeError:
        # torch lacks OpenMP, or the system hides symbols of dependencies.
        return torch.set_num_threads, lambda count: count
    # The lower-case name is the Fortran function, whose argument is an address.
    mkl = getattr(library, "MKL_Set_Num_Threads_Local", None)
    return openmp, mkl or (lambda count: count)


def prepare_eager(module: OperatorGraph) -> OperatorGraph:
    """Prepare a lowered graph in place for eager execution, and return it."""
    spend_deprecation_warning()
    for node in list(module.graph.nodes):
        if is_call(node, LINEAR_PREPACK, CONVOLUTION_PREPACK):
            _prepack(module, node)
        elif is_call(node, quantize) and node.args[5] is torch.uint8 and node.args[3:5] == (0, 255):
            node.target, node.args = byte_codes, node.args[:3]
        elif is_call(node, aten.mul.Tensor) and _owned(node.args[0]):
            node.target = aten.mul_.Tensor
    module.graph.eliminate_dead_code()
    read = {node.target for node in module.graph.nodes if node.op == "get_attr"}
    for name in [name for name, _ in module.named_buffers() if name not in read]:
        delattr(module, name)
    return module


def _prepack(module: OperatorGraph, node: fx.Node) -> None:
    values = [module.get_buffer(str(value.target)) if isinstance(value, fx.Node) else value for value in node.args]
    kernel: Any = node.target
    name = f"{node.name}_held"
    # Packed weights are opaque, so they are not a buffer that could be saved or moved.
    setattr(module, name, kernel(*values))
    with module.graph.inserting_before(node), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fx warns that the attribute is not a parameter or buffer
        packed = module.graph.get_attr(name)
    node.replace_all_uses_with(packed)
    module.graph.erase_node(node)


def _owned(value: Any) -> bool:
    """Return whether a value may be overwritten: the output of a kernel with a single reader."""
    return is_call(value, LINEAR, aten.gelu.default) and only_reader(value) is not None


_SETTINGS = {"freezing": True, "cpp.dynamic_threads": True}

_MAX_LOADED = 8
_LOADED: OrderedDict[bytes, Any] = OrderedDict()
_LOADING = threading.Lock()
"""Recently loaded packages by SHA-256; the C library never unmaps them, so each is loaded once."""

# Each package owns a folder until it is dropped.
atexit.register(_LOADED.clear)


def missing_compiler() -> str | None:
    """Return why compilation is impossible; None if a C++ compiler exists."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "no C++ compiler found (g++ or clang++ in PATH, or the compiler in CXX)"
    return None


def compile_graph(
    module: OperatorGraph,
    specs: Sequence[TensorSpec],
    sizes: InputSizes,
) -> bytes:
    """Return the compiled package of a lowered graph: an archive with a shared library that contains the weights."""
    dynamic = torch.export.Dim.DYNAMIC
    axes = tuple({axis: dynamic for axis, size in enumerate(spec.shape) if size is None} for spec in specs)
    arrays = made_up_inputs(specs, sizes)
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
            # Inductor warns about its own deprecated calls.
            warnings.simplefilter("ignore")
            # The names come from the import, not from the ONNX file.
            program = torch.export.export(fx.GraphModule(module, module.graph), inputs, dynamic_shapes=axes)
            torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=_SETTINGS)
        except (AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            # Compiler failures raise any of these.
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise EngineError(f"Inductor could not compile the graph: {lines[0]}") from error
        package = path.read_bytes()
    note_built(package)
    return package


class CompiledGraph:
    """Loaded package of ``compile_graph``; loading unpickles nothing."""

    def __init__(self, package: bytes) -> None:
        digest = hashlib.sha256(package).digest()
        with _LOADING:
            self._runner = _LOADED.pop(digest, None) or _loaded(package)
            _LOADED[digest] = self._runner
            while len(_LOADED) > _MAX_LOADED:
                _LOADED.popitem(last=False)

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Run the graph once."""
        return self._runner.run(list(inputs))


def _loaded(package: bytes) -> Any:
    with scratch() as folder:
        path = folder / "compiled.pt2"
        path.write_bytes(package)
        try:
            # torch's loading function unpickles other files of the package; the runner does not.
            return torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
        except RuntimeError as error:
            first = str(error).partition("\n")[0]
            raise EngineError(f"torch {torch.__version__} cannot load the compiled graph: {first}") from error


def kernel_calls(package: bytes, *names: str) -> int:
    """Return the number of calls of these oneDNN kernels in the source of a package's library."""
    with zipfile.ZipFile(io.BytesIO(package)) as archive:
        sources = [archive.read(name).decode() for name in archive.namelist() if name.endswith(".wrapper.cpp")]
    pattern = rf"\baoti_torch_cpu__(?:{'|'.join(names)})(?:_binary)?(?:_tensor)?\("
    return sum(len(re.findall(pattern, source)) for source in sources)
