"""The torch engine's kernels on a GPU beside half precision: models of BERT-base's and BERT-large's size.

    python benchmarks/gpu_latency.py [--rounds N] [--models NAME ...] [--shapes ROWSxLENGTH[:PADDING] ...]

It writes its own section of results/gpu.md, after each row, so that an interrupted run leaves what was measured.
Without a GPU it writes the section on kernels that read and write 8 bits: what they are for a layer of BERT, how close
their references in torch are to the frozen proxy, and "not measured"; existing figures are not replaced. Weights are
random, with which the time is the same. INT8 and FP8 are ``Quantizer.lower`` of the model, cast to bfloat16. All are
captured into a CUDA graph and its replays timed, interleaved with the reference, so that no time of launches is in
them; ``torch.compile(mode="reduce-overhead")`` does that for a user. A share is that of the rate of one large product
in the same type, measured first: of the multiply-adds of all linear layers. TensorRT's engines are measured where its
library is installed, as a call from the memory of the host. What is too large for the memory of a GPU, or needs a newer
one, is a row with the reason.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from datetime import date
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, BertConfig, BertModel
from transformers.masking_utils import eager_mask

from quantizer import Quantizer
from quantizer.engines import BuildOptions, build_engine, load_engine
from quantizer.engines.torch_engine.gpu_engine import GpuEngine, engine_on
from quantizer.engines.torch_engine.gpu_file import load_on_gpu
from quantizer.engines.torch_engine.gpu_operators import OPERATORS
from quantizer.engines.torch_engine.kernel_plan import KernelPlan
from quantizer.errors import QuantizerError
from quantizer.tasks.metrics import sqnr_db

RESULTS = Path(__file__).parent / "results" / "gpu.md"
HEADING = "## On a GPU (`gpu_latency.py`)"
KERNELS_HEADING = "## Kernels that read and write 8 bits (`gpu_latency.py`)"
SIZES = {
    "BERT-base": {},
    "BERT-large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}
SHAPES = ((1, 128, 0.0), (8, 128, 0.0), (32, 128, 0.0), (32, 512, 0.0), (16, 512, 0.5))
"""Samples, tokens of each, and the part of the tokens that is padding."""
MASK = (
    "The mask excludes the last token of each sample. Where a part of the tokens is padding, lengths of samples "
    "are spread evenly; our kernels skip it, also in the row of float16 with our attention."
)
_SIDE = 8192
_TENSORRT = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
"""The modules of the backends."""
Batch = dict[str, torch.Tensor]
Shape = tuple[int, int, float]
Run = Callable[[Batch], Any]


@dataclass(frozen=True)
class Contestant:
    """What is timed: ``make`` returns what runs a batch, for a model in float32 on the CPU."""

    name: str
    rate: str
    make: Callable[[torch.nn.Module, Path], Run]
    replays: bool = True


def why_not() -> str | None:
    """Why nothing can be measured here; None: there is a GPU."""
    if not torch.cuda.is_available():
        return "torch sees no GPU here"
    major, minor = torch.cuda.get_device_capability()
    return None if (major, minor) >= (8, 0) else f"the GPU is sm_{major}{minor}, and bfloat16 needs sm_80 or later"


def batch(rows: int, length: int, padding: float = 0.0) -> Batch:
    """Random tokens, the last of each row masked: a mask of nothing is left out by transformers, but in a capture.

    A part ``padding`` of all tokens is masked at the ends of the rows, whose lengths differ.
    """
    ids = torch.randint(0, 30_000, (rows, length), generator=torch.Generator().manual_seed(0))
    lengths = length * (1 - padding * 2 * (torch.arange(rows) + 0.5) / rows)
    mask = (torch.arange(length) < lengths.clamp(1, length - 1)[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask}


def _without_padding(_: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **__: Any) -> Any:
    """Our attention as one of transformers; its mask is the same for all queries."""
    call = OPERATORS["padded_attention"].triton
    return call(query, key, value, mask[:, :, :1], scaling, None, None, 0).transpose(1, 2), None


AttentionInterface.register("without_padding", _without_padding)
AttentionMaskInterface.register("without_padding", eager_mask)


def in_torch(model: torch.nn.Module, _: Path, *, dtype: torch.dtype, compiles: bool, attention: str = "sdpa") -> Run:
    """The float model in half precision."""
    config = deepcopy(model.config)
    config._attn_implementation = attention
    module = BertModel(config)
    module.load_state_dict(model.state_dict())
    module = module.to("cuda", dtype).eval()
    return partial(_called, _compiled(module) if compiles else module)


def lowered(model: torch.nn.Module, _: Path, *, dtype: str, triton: bool) -> Run:
    """The integers or FP8 codes of a quantized model in torch's kernels, compiled; all else in bfloat16."""
    # Plans in FP8 are TensorRT's, as no engine of a CPU has it. Torch has no kernel for their attention.
    backend = "torch" if dtype == "int8" else "tensorrt"
    quantizer = Quantizer(backend=backend, dtype=dtype, preset="plain", sites={"matmul": False})
    quantizer.calibrate(model, [batch(4, 64), batch(4, 128)], progress=False)
    return partial(_called, _compiled(quantizer.lower(model, triton=triton).to("cuda", torch.bfloat16)))


def _compiled(module: torch.nn.Module) -> torch.nn.Module:
    """Compile the one block that a model repeats, once for a shape: the whole takes as many times longer."""
    for layer in module.encoder.layer:
        layer.compile(dynamic=False)
    return module


def _called(module: Any, given: Batch) -> Any:
    with torch.no_grad():
        return module(**given)


def in_tensorrt(model: torch.nn.Module, folder: Path, *, backend: str, dtype: str) -> Run:
    """An engine of TensorRT's libraries, whose inputs come from the memory of the host."""
    quantizer = Quantizer(backend=backend, dtype=dtype, preset="plain")
    quantizer.calibrate(model, [batch(4, 64), batch(4, 128)], progress=False)
    path = quantizer.export(quantizer.quantize(model), folder / f"{backend}.onnx", batch(2, 32))
    sizes = {"batch": (1, 8, 32), "sequence": (16, 128, 512)}
    built = build_engine(backend, path, folder / f"{backend}.engine", BuildOptions(dynamic=sizes))
    engine = load_engine(backend, built.path)
    return lambda given: engine({name: given[name].cpu().numpy() for name in engine.input_names})


@dataclass(frozen=True)
class InKernels:
    """A call of a torch engine with tensors of the GPU."""

    engine: GpuEngine

    def __call__(self, given: Batch) -> Any:
        return self.engine.compute(*(given[name] for name in self.engine.input_names))


def other_methods(plan: KernelPlan) -> Iterator[str]:
    """Lines on the layers that were faster without the kernel; equal layers of a model share a line."""
    layers: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for kernel in plan.kernels:
        if kernel.measured:
            layers[kernel.measured].append(", ".join(kernel.sites))
    for measured, sites in layers.items():
        others = f" and {len(sites) - 1} more" if len(sites) > 1 else ""
        yield f"- {sites[0]}{others}: {'; '.join(measured)}"


def in_kernels(model: torch.nn.Module, folder: Path, *, dtype: str) -> InKernels:
    """The torch engine of a file, whose kernels read and write 8 bits; other operations in float16."""
    backend = "torch" if dtype == "int8" else "tensorrt"
    quantizer = Quantizer(backend=backend, dtype=dtype, preset="plain", sites={"matmul": False})
    quantizer.calibrate(model, [batch(4, 64), batch(4, 128)], progress=False)
    path = quantizer.export(quantizer.quantize(model), folder / f"{dtype}.onnx", batch(2, 32))
    engine = load_on_gpu(path)
    for shape in SHAPES:
        engine.tune(batch(*shape))
    return InKernels(engine)


def without_gpu(reason: str) -> Iterator[str]:
    """The lines of the section on kernels, whose references run on this CPU, for two layers of BERT-base's width."""
    torch.manual_seed(0)
    model = BertModel(BertConfig(num_hidden_layers=2)).eval()
    quantizer = Quantizer(backend="torch", preset="plain")
    quantizer.calibrate(model, [batch(4, 64), batch(4, 128)], progress=False)
    frozen, given = quantizer.quantize(model), batch(1, 32)
    with tempfile.TemporaryDirectory() as folder:
        path = quantizer.export(frozen, Path(folder) / "torch.onnx", batch(2, 32))
        engine = engine_on(path, "cpu", triton=False)
    with torch.no_grad():
        expected = frozen(**given).last_hidden_state
    ratio = sqnr_db(expected.numpy(), engine(given)[engine.output_names[0]].numpy())
    yield f"Not measured: {reason}. On a machine with a GPU, `make gpu` measures them in the section above.\n"
    yield "Kernels of the first of two layers of BERT-base's width:\n"
    yield "| layers | kernel | results in bits |\n|---|---|---|"
    for kernel in engine.plan.of("encoder.layer.0"):
        layers = ", ".join(site.removeprefix("encoder.layer.0.") for site in kernel.sites)
        bits = ", ".join(str(result.bits) for result in kernel.writes)
        yield f"| {layers} | {' + '.join((kernel.kernel, *kernel.fused))} | {bits} |"
    yield f"\nTheir references on a CPU, with float16 between kernels: SQNR to the frozen proxy {ratio:.1f} dB."


def contestants() -> Iterator[Contestant]:
    """Those that this machine may run, the reference first."""
    for dtype, compiles in ((torch.float16, False), (torch.float16, True), (torch.bfloat16, True)):
        name = f"{str(dtype).removeprefix('torch.')}{', torch.compile' if compiles else ''}"
        yield Contestant(name, "float16", partial(in_torch, dtype=dtype, compiles=compiles))
    ours = partial(in_torch, dtype=torch.float16, compiles=True, attention="without_padding")
    yield Contestant("float16, our attention, torch.compile", "float16", ours)
    formats = ["int8"] + (["fp8"] if torch.cuda.get_device_capability() >= (8, 9) else [])
    for dtype in formats:
        for triton in (False, True):
            name = f"ours, {dtype}, {'Triton, ' if triton else ''}torch.compile"
            yield Contestant(name, dtype, partial(lowered, dtype=dtype, triton=triton))
    for dtype in formats:
        yield Contestant(f"ours, {dtype}, kernels that read and write 8 bits", dtype, partial(in_kernels, dtype=dtype))
    for backend, module in _TENSORRT.items():
        if find_spec(module) is not None:
            for dtype in formats:
                make = partial(in_tensorrt, backend=backend, dtype=dtype)
                yield Contestant(f"ours, {dtype}, {backend}", dtype, make, replays=False)


def rates() -> dict[str, float]:
    """Multiply-adds a second of one product of square matrices, by type."""
    x = torch.randn(_SIDE, _SIDE, device="cuda")
    half, whole = x.half(), (x * 20).to(torch.int8)
    calls: dict[str, Callable[[], object]] = {
        "float16": lambda: half @ half,
        "int8": lambda: torch._int_mm(whole, whole.t()),
    }
    if torch.cuda.get_device_capability() >= (8, 9):
        codes, one = x.to(torch.float8_e4m3fn), torch.ones((), device="cuda")
        calls["fp8"] = lambda: torch._scaled_mm(codes, codes.t(), one, one, out_dtype=torch.bfloat16)
    return {
        name: _SIDE**3 / (statistics.median(milliseconds({name: call}, 20)[name]) / 1000)
        for name, call in calls.items()
    }


def milliseconds(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """The times of calls that take turns, by the GPU's own clock."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-3, rounds):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if turn >= 0:
                taken[name].append(start.elapsed_time(end))
    return taken


def multiply_adds(model: torch.nn.Module, rows: int, length: int) -> int:
    """Those of all linear layers on a batch; the pooler reads one token a row."""
    sizes = {name: m.weight.numel() for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    return sum(size * rows * (1 if name.startswith("pooler") else length) for name, size in sizes.items())


def section(models: list[str], shapes: list[Shape], rounds: int) -> Iterator[str]:
    """The lines of the section."""
    fastest = rates()
    yield f"{date.today()}, {torch.cuda.get_device_name()}, torch {torch.__version__}, {rounds} interleaved rounds.\n"
    told = ", ".join(f"{name} {2 * rate / 1e12:.0f}" for name, rate in fastest.items())
    yield f"{MASK}\n"
    yield f"Measured rates of one matrix multiplication of {_SIDE} x {_SIDE}, in TFLOPS or TOPS: {told}.\n"
    for title in models:
        torch.manual_seed(0)
        model = BertModel(BertConfig(**SIZES[title])).eval()
        yield f"### {title}\n"
        yield "| milliseconds (to float16; share of the rate) | " + " | ".join(map(_words, shapes)) + " |"
        yield "|---" * (1 + len(shapes)) + "|"
        with tempfile.TemporaryDirectory() as folder:
            yield from _rows(model, Path(folder), shapes, rounds, fastest)
        yield ""


def _rows(
    model: torch.nn.Module, folder: Path, shapes: list[Shape], rounds: int, fastest: dict[str, float]
) -> Iterator[str]:
    """One row for each contestant, and then the layers whose kernels were slower than other methods.

    Each takes turns with the first, so that not all have to fit into memory at once.
    """
    reference: Run | None = None
    notes: list[str] = []
    for one in contestants():
        try:
            run = one.make(model, folder)
            if isinstance(run, InKernels) and (lines := list(other_methods(run.engine.plan))):
                notes += [f"\nIn {one.name}, other methods are faster for some layers:\n", *lines]
            reference = reference or run
            cells = [_cell(model, reference, run, one, shape, rounds, fastest[one.rate]) for shape in shapes]
        except (RuntimeError, QuantizerError) as error:
            cells = [" ".join(str(error).split()).replace("|", "/")[:200], *("" for _ in shapes[1:])]
        yield f"| {one.name} | " + " | ".join(cells) + " |"
        torch.compiler.reset()
        torch.cuda.empty_cache()
    yield from notes


def _cell(
    model: torch.nn.Module, reference: Run, run: Run, one: Contestant, shape: Shape, rounds: int, rate: float
) -> str:
    given = {name: value.cuda() for name, value in batch(*shape).items()}
    call = captured(run, given) if one.replays else partial(run, given)
    taken = milliseconds({"reference": captured(reference, given), "this": call}, rounds)
    ratio = statistics.median(a / b for a, b in zip(taken["reference"], taken["this"], strict=True))
    time = statistics.median(taken["this"])
    share = multiply_adds(model, *shape[:2]) / (time / 1000) / rate
    return f"{time:.2f} ({ratio:.2f}; {share:.0%})"


def captured(run: Run, given: Batch) -> Callable[[], None]:
    """The kernels of a call, recorded, to be run again without the host."""
    for _ in range(3):
        run(given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(given)
    return graph.replay


def write_section(text: str, heading: str = HEADING) -> None:
    """Put the section in the place of the former one, or at the end."""
    before = RESULTS.read_text(encoding="utf-8")
    head, found, rest = before.partition(f"{heading}\n")
    _, next_heading, after = rest.partition("\n## ")
    end = f"\n## {after}" if next_heading else ""
    gap = "" if found else "\n"
    RESULTS.write_text(f"{head}{gap}{heading}\n\n{text.strip()}\n{end}", encoding="utf-8")


def _shape(text: str) -> Shape:
    sizes, _, padding = text.partition(":")
    rows, length = sizes.split("x")
    return int(rows), int(length), float(padding or 0)


def _words(shape: Shape) -> str:
    rows, length, padding = shape
    return f"{rows} x {length}" + (f", {padding:.0%} padding" if padding else "")


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--rounds", type=int, default=30)
    asked.add_argument("--models", nargs="+", choices=list(SIZES), default=list(SIZES))
    asked.add_argument("--shapes", nargs="+", type=_shape, default=list(SHAPES), metavar="ROWSxLENGTH[:PADDING]")
    given = asked.parse_args()
    reason = why_not()
    if reason is None:
        lines = []
        for line in section(given.models, given.shapes, given.rounds):
            print(line, flush=True)
            lines.append(line)
            write_section("\n".join(lines))
        return
    print(f"not measured: {reason}")
    if HEADING not in RESULTS.read_text(encoding="utf-8"):
        write_section(f"Not measured: {reason}. On a machine with one, `make gpu` writes this section.")
    text = "\n".join(without_gpu(reason))
    print(text)
    write_section(text, KERNELS_HEADING)


if __name__ == "__main__":
    main()
