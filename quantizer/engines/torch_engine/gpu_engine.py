"""Engines of the torch backend on an NVIDIA GPU, from the graph of an ONNX file; see ``gpu_lowering.py``.

A kernel that does not compile for the GPU is replaced by operations of torch when the engine is loaded, with its reason
in the plan. From the second call with the same shapes on, an engine replays a CUDA graph. ``GpuEngine.tune`` measures
the methods of the linear layers for a shape: tiles of the kernel, products of torch, and float16; and those of
attentions with padding: tiles of the kernel and PyTorch's ``scaled_dot_product_attention``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from quantizer.engines.base import InputSizes
from quantizer.engines.measure import made_up_inputs
from quantizer.engines.torch_engine.engine import TorchEngine
from quantizer.engines.torch_engine.gpu_lowering import KERNELS, lower_for_gpu
from quantizer.engines.torch_engine.gpu_operators import (
    OPERATORS,
    attention_entry,
    attention_with,
    drop_float16_weight,
    has_float16_weight,
    kernel_takes,
    linear_with,
    product_of,
    rows_of,
)
from quantizer.engines.torch_engine.graph_file import program
from quantizer.engines.torch_engine.kernel_plan import KernelPlan, kernel_plan
from quantizer.engines.torch_engine.lowering import aten, is_call
from quantizer.engines.torch_engine.shape_graphs import ShapeGraphs, captured
from quantizer.errors import EngineError
from quantizer.export.onnx_import.graph_builder import OperatorGraph
from quantizer.export.onnx_import.importer import Imported, import_onnx
from quantizer.numerics.formats import FP8
from quantizer.numerics.triton_kernels.tiles import FLOAT16, TABLE, methods_for
from quantizer.utils import gpu

_LEAST_CAPABILITY = (8, 0)
"""The first compute capability with matrix multiplications of INT8 and with bfloat16 in Triton."""

PRECISIONS = {"float16": torch.float16, "bfloat16": torch.bfloat16}
"""The types of non-quantized operations by name."""


class GpuEngine(TorchEngine):
    """Lowered graph on a GPU.

    With ``compiled``, Inductor compiles the graph at the first call: its kernels for the operators between ours.

    Attributes:
        plan: what each kernel reads and writes, how layers are computed after ``tune``, and why.
        no_graphs: why calls do not replay CUDA graphs; None: they do.
    """

    name = "torch-cuda"

    def __init__(
        self,
        module: OperatorGraph,
        imported: Imported,
        device: str,
        threads: int,
        reasons: Mapping[str, str],
        fallbacks: Mapping[str, str],
        *,
        compiled: bool = False,
    ) -> None:
        super().__init__(self._on_device, imported.inputs, imported.outputs, threads)
        self.device = device
        self._module, self._program = module, program(module)
        if compiled:
            # One compilation for all sizes: at each new one, a call would wait for another.
            dynamic = any(size is None for spec in imported.inputs for size in spec.shape)
            self._program = torch.compile(fx.GraphModule(module, module.graph), dynamic=dynamic)
        self._reasons, self._fallbacks = reasons, fallbacks
        self._graphs = ShapeGraphs(self.compute)
        if device == "cpu":
            self._graphs.reason = "a CPU has no CUDA graphs"

    @property
    def plan(self) -> KernelPlan:
        return kernel_plan(self._module, self._reasons, self._fallbacks, TABLE)

    @property
    def no_graphs(self) -> str | None:
        return self._graphs.reason

    def compute(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs for inputs by position, all on the device of the engine, without CUDA graphs."""
        outputs: tuple[Tensor, ...] = self._program(*inputs)
        return outputs

    def _on_device(self, *inputs: Tensor) -> list[Tensor]:
        outputs = self._graphs(*(tensor.to(self.device) for tensor in inputs))
        return [output.cpu() for output in outputs]

    def tune(
        self,
        inputs: Any,
        file: str | Path | None = None,
        *,
        seconds: Callable[[Callable[[], object]], float] | None = None,
    ) -> int:
        """Measure how linear layers and attentions are fastest for inputs of a shape; compute them so from then on.

        The candidates are the tiles of the kernel, ``torch._int_mm`` or ``torch._scaled_mm`` with a kernel for what
        follows, and the matrix multiplication in float16, which keeps a second copy of the weight. Those of an
        attention with padding are the tiles of its kernel and PyTorch's function; its time depends on the padding in
        ``inputs``. ``plan`` says which layers are not computed by the kernel.

        Args:
            inputs: inputs as in a call of the engine.
            file: the table of measurements to read first and to write; layers in it are not measured again.
            seconds: returns the seconds of a call; None: measured on the GPU.

        Returns:
            the number of layers that were measured; layers of one size count once.

        Raises:
            EngineError: inputs of another type or shape, or a damaged file.
        """
        if file is not None:
            TABLE.read(Path(file))
        tuner = _Tuner(self._module, seconds or gpu_seconds)
        with torch.inference_mode():
            tuner.run(*self._tensors(inputs))
        self._graphs.forget()
        if file is not None:
            TABLE.write(Path(file))
        return tuner.count

    def _tensors(self, inputs: Any) -> list[Tensor]:
        """Return the inputs of a call on the device."""
        return [torch.from_numpy(array.copy()).to(self.device) for array in self._checked(inputs).values()]


class _Tuner(fx.Interpreter):
    """Interpreter that measures the methods of each linear layer or attention that has no entry in the table.

    Attributes:
        count: the layers that were measured.
    """

    def __init__(self, module: OperatorGraph, seconds: Callable[[Callable[[], object]], float]) -> None:
        super().__init__(module)
        self.count = 0
        self._seconds = seconds

    def run_node(self, n: fx.Node) -> Any:
        if is_call(n, OPERATORS["linear_8bit"].triton):
            self._measure_linear(*self.fetch_args_kwargs_from_env(n)[0])
        elif is_call(n, OPERATORS["padded_attention"].triton):
            self._measure_attention(*self.fetch_args_kwargs_from_env(n)[0])
        return super().run_node(n)

    def _measure_linear(self, a: Tensor, weight: Tensor, *operands: Any) -> None:
        product = product_of(rows_of(a), weight, *operands)
        if product in TABLE:
            return
        had_copy = has_float16_weight(weight)
        calls = {method: partial(linear_with, method, a, weight, *operands) for method in methods_for(product)}
        times = TABLE.measure(product, calls, self._seconds)
        # A copy that an earlier shape uses may be read by another thread.
        if not had_copy and not (times and TABLE[product].method == FLOAT16):
            drop_float16_weight(weight)
        self.count += 1

    def _measure_attention(self, *operands: Any) -> None:
        query, key, value, mask, _, quantized_as, *_ = operands
        entry = attention_entry(query, key, quantized_as)
        if entry in TABLE or not kernel_takes(query, key, value, mask):
            return
        calls = {method: partial(attention_with, method, *operands) for method in methods_for(entry)}
        TABLE.measure(entry, calls, self._seconds)
        self.count += 1


_TIMED, _CALLS = 10, 10
"""The timed replays, and the calls in each."""


def gpu_seconds(call: Callable[[], object]) -> float:
    """Return the median time of a call by the clock of the GPU, in seconds.

    The calls are replayed from a CUDA graph, as an engine does, so that a method with several kernels does not lose by
    their launches. What cannot be captured is timed as it is.
    """

    def several() -> list[Tensor]:
        for _ in range(_CALLS):
            call()
        return []

    try:
        run: Callable[[], object] = partial(captured(several, []), [])
    except RuntimeError:
        run = several
    cuda: Any = torch.cuda
    times: list[float] = []
    for turn in range(-2, _TIMED):
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if turn >= 0:
            times.append(start.elapsed_time(end) / 1000 / _CALLS)
    return statistics.median(times)


def no_gpu() -> str | None:
    """Return why kernels cannot run on this machine; None if they can."""
    if not gpu.is_present():
        return "torch sees no NVIDIA GPU on this machine; use backend torch for the CPU"
    capability = gpu.capability()
    if capability < _LEAST_CAPABILITY:
        found, least = map(gpu.dotted, (capability, _LEAST_CAPABILITY))
        return f"the GPU has compute capability {found}, but the kernels need {least} or later; use the CPU"
    return None


def no_fp8(module: OperatorGraph) -> str | None:
    """Return why the GPU cannot run the FP8 layers of a graph; None if it can, or if there are none."""
    if all(tensor.dtype is not FP8.storage for tensor in module.buffers()) or gpu.has_fp8():
        return None
    found, least = map(gpu.dotted, (gpu.capability(), gpu.LEAST_FOR_FP8))
    return f"it is in FP8, which needs compute capability {least} or later, but the GPU has {found}; use INT8"


def engine_on(
    path: Path, device: str, *, threads: int = 1, dtype: torch.dtype = torch.float16, triton: bool = True
) -> GpuEngine:
    """Return the engine of an ONNX file on a device; for arguments and errors see ``engine_of``."""
    with refusals_name(path):
        return engine_of(import_onnx(path, fp8=True), device, threads=threads, dtype=dtype, triton=triton)


@contextmanager
def refusals_name(path: Path) -> Iterator[None]:
    """Name the file of a graph in errors, and say if it does not fit into the memory of the GPU."""
    try:
        yield
    except EngineError as error:
        raise EngineError(f"backend torch-cuda cannot run {path}: {error}") from error
    except torch.OutOfMemoryError as error:
        first = str(error).partition("\n")[0]
        raise EngineError(f"{path} does not fit into the free memory of the GPU: {first}") from error


def engine_of(
    imported: Imported,
    device: str,
    *,
    threads: int = 1,
    dtype: torch.dtype = torch.float16,
    triton: bool = True,
    compiled: bool = False,
    usual: Mapping[str, int] = MappingProxyType({}),
) -> GpuEngine:
    """Lower a graph in place, and return its engine on a device.

    Args:
        imported: a graph of ``import_onnx``.
        device: a device of torch.
        threads: number of CPU threads.
        dtype: type of values that are not quantized.
        triton: run Triton's kernels; False: their references in torch, which also run on a CPU.
        compiled: let Inductor compile the graph.
        usual: usual sizes of dynamic dimensions, by name, at which kernels are tried.

    Raises:
        EngineError: the graph does not run.
        torch.OutOfMemoryError: it does not fit into the memory of the GPU.
    """
    sizes, reasons = lower_for_gpu(imported, dtype=dtype, triton=triton, usual=usual)
    if device == "cuda" and (reason := no_fp8(imported.module)) is not None:
        raise EngineError(reason)
    module = imported.module.to(device)
    create_on(module, device)
    fallbacks = replace_failing(module, sample_inputs(imported, sizes, device)) if triton else {}
    return GpuEngine(module, imported, device, threads, reasons, fallbacks, compiled=compiled)


_FACTORIES = (aten.arange.default, aten.arange.start_step, aten.full.default, aten.scalar_tensor.default)


def create_on(module: OperatorGraph, device: str) -> None:
    """Let the operators of a graph create new tensors on a device."""
    for node in module.graph.nodes:
        if is_call(node, *_FACTORIES):
            node.kwargs = {**node.kwargs, "device": device}


def sample_inputs(imported: Imported, sizes: InputSizes, device: str) -> list[Tensor]:
    """Return generated inputs of a graph, by position."""
    arrays = made_up_inputs(imported.inputs, sizes)
    return [torch.from_numpy(arrays[spec.name]).to(device) for spec in imported.inputs]


def replace_failing(module: OperatorGraph, inputs: Sequence[Tensor]) -> dict[str, str]:
    """Run a graph, and replace each kernel that fails by its reference; return the reasons by node name."""
    trial = _Trial(module)
    with torch.inference_mode():
        trial.run(*inputs)
    return trial.reasons


class _Trial(fx.Interpreter):
    """Interpreter that replaces kernels that fail.

    Attributes:
        reasons: why they failed, by node name.
    """

    def __init__(self, module: OperatorGraph) -> None:
        super().__init__(module)
        self.reasons: dict[str, str] = {}

    def run_node(self, n: fx.Node) -> Any:
        if not is_call(n, *KERNELS):
            return super().run_node(n)
        try:
            return super().run_node(n)
        except torch.OutOfMemoryError:
            # The reference needs more memory.
            raise
        except Exception as error:  # noqa: BLE001 - the compiler of kernels raises errors of many classes
            first = (str(error).strip().splitlines() or [""])[0]
            self.reasons[n.name] = f"its kernel failed: {type(error).__name__}: {first}"
            n.target = OPERATORS[str(n.target).split(".")[1]].reference
            return super().run_node(n)
