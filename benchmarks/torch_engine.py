"""The torch engine beside torch itself, torchao's PT2E and OpenVINO: MiniLM, one thread.

    python benchmarks/torch_engine.py [ROUNDS]

Everything that can be compiled is, by the same Inductor, with freezing: the float model by ``torch.compile``, torchao's
quantized graph (``X86InductorQuantizer``, static ranges, exported and calibrated at each shape by itself), and our
engine, whose file is one for all shapes. The lowered module (``Quantizer.lower``) is the model's own Python around
integer kernels, and is timed as it is, compiled, and with the fused attention of torch, which a float model beside it
has too; the task loads the model with eager attention. torchao is no dependency of anything here: without it its rows
are left out. Latencies are medians of one interleaved run for each shape; SQNR is of the embeddings of STS-B dev, 200
pairs, to the float model, and of torchao's of its own batch.
"""

from __future__ import annotations

import copy
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Positional, calibrated, heading, minilm, stsb

from quantizer import Quantizer
from quantizer.engines import BuildOptions, Engine, build_engine, interleaved_latency, load_engine
from quantizer.export.exporter import export_onnx
from quantizer.tasks import Task

SHAPES = ((1, 16), (1, 128), (8, 128))
OURS = {"torch engine, compiled": True, "torch engine, eager": False}
Batch = dict[str, torch.Tensor]


@dataclass
class Contestants:
    """What is timed: engines, modules, and a line for each on what it loses."""

    engines: dict[str, Engine]
    modules: dict[str, torch.nn.Module]
    lines: list[str]


def contestants(model: torch.nn.Module, task: Task, folder: Path) -> Contestants:
    """OpenVINO's engines and ours, and the lowered modules."""
    found: dict[str, Engine] = {}
    modules: dict[str, torch.nn.Module] = {}
    rows, lines = stsb("dev", 200), []
    base = task.predict(lambda batch: model(**batch), rows)
    plain = export_onnx(model, folder / "float.onnx", task.example(), opset=20, dtype=torch.float32)
    found["OpenVINO, float"] = _built("openvino", plain)
    for backend in ("openvino", "torch"):
        quantizer = calibrated(model, task, backend=backend)
        frozen = quantizer.quantize(model)
        path = quantizer.export(frozen, folder / f"{backend}.onnx", task.example())
        proxy = task.predict(lambda batch, frozen=frozen: frozen(**batch), rows)
        far = task.paired(base, proxy)["sqnr_db"]
        if backend == "torch":
            modules = lowered_modules(quantizer, model)
            for name, module in modules.items():
                given = task.predict(lambda batch, module=module: module(**batch), rows)
                lines.append(_line(task, name, given, base, proxy, far))
        roads = OURS if backend == "torch" else {"OpenVINO, INT8": None}
        for name, compiled in roads.items():
            found[name] = _built(backend, path, compiled)
            given = task.predict(partial(_run, found[name]), rows)
            lines.append(_line(task, name, given, base, proxy, far))
    return Contestants(found, modules, lines)


def _line(task: Task, name: str, given: Any, base: Any, proxy: Any, far: float) -> str:
    distances = [task.paired(expected, given)["sqnr_db"] for expected in (base, proxy)]
    return f"| {name} | {distances[0]:.1f} | {distances[1]:.1f} | {far:.1f} |"


def lowered_modules(quantizer: Quantizer, model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The lowered model with the attention that the model has, and with torch's fused one."""
    found = {"lowered module, eager": quantizer.lower(model)}
    before = model.config._attn_implementation
    model.config._attn_implementation = "sdpa"
    found["lowered module, eager, fused attention"] = quantizer.lower(model)
    model.config._attn_implementation = before
    return found


def _built(backend: str, path: Path, compiled: bool | None = None) -> Engine:
    target = path.with_name(f"{path.stem}-{compiled}.engine")
    return load_engine(backend, build_engine(backend, path, target, BuildOptions(compiled=compiled)).path, threads=1)


def _run(engine: Engine, batch: Batch) -> Any:
    return engine({name: np.asarray(value) for name, value in batch.items()})


def pt2e(model: torch.nn.Module, batches: Sequence[Batch], axes: Sequence[Any] | None = None) -> Callable[..., Any]:
    """torchao's quantized graph, compiled, which takes its inputs by position.

    Args:
        model: the float model.
        batches: those that it is calibrated on, of one shape but for the axes.
        axes: of each input, as ``torch.export`` takes them; None: the shape is fixed.
    """
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

    names = list(batches[0])
    example = tuple(batches[0].values())
    dynamic = None if axes is None else (tuple(axes),)
    graph = torch.export.export(Positional(model, names).eval(), example, dynamic_shapes=dynamic).module()
    # The pooler's output is not returned, and the quantizer stumbles over what nobody reads.
    graph.graph.eliminate_dead_code()
    graph.recompile()
    quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(graph, quantizer)
    with torch.no_grad():
        for batch in batches:
            prepared(*(batch[name] for name in names))
    converted = convert_pt2e(prepared)
    return torch.compile(converted)


def batches_of(task: Task, batch: int, sequence: int) -> list[Batch]:
    """Texts of STS-B train, cut or filled to one shape: eight batches, the first of them for timing."""
    rows = stsb("train", 4 * batch)
    texts = [text for row in rows for text in (row.first, row.second)]
    sized = {"padding": "max_length", "truncation": True, "max_length": sequence, "return_tensors": "pt"}
    tokenizer = task.inputs.tokenizer
    return [dict(tokenizer(texts[at : at + batch], **sized)) for at in range(0, len(texts), batch)]


def times(
    model: torch.nn.Module, task: Task, found: Contestants, shape: tuple[int, int], rounds: int
) -> tuple[dict[str, float], str]:
    """Milliseconds of everything at one shape, and what torchao's graph loses there."""
    batches = batches_of(task, *shape)
    tensors = batches[0]
    arrays = {name: value.numpy() for name, value in tensors.items()}
    torch._dynamo.reset()
    fused = copy.deepcopy(model)
    fused.config._attn_implementation = "sdpa"
    calls: dict[str, Callable[[], object]] = {
        "torch, eager float": partial(model, **tensors),
        "torch, eager float, fused attention": partial(fused, **tensors),
        "torch.compile, float": partial(torch.compile(model), **tensors),
        **{name: partial(engine, arrays) for name, engine in found.engines.items()},
        **{name: partial(module, **tensors) for name, module in found.modules.items()},
    }
    fastest = found.modules["lowered module, eager, fused attention"]
    calls["lowered module, compiled, fused attention"] = partial(torch.compile(fastest), **tensors)
    lost = "-"
    if find_spec("torchao") is not None:
        theirs = pt2e(model, batches)
        calls["torchao PT2E, compiled"] = lambda: theirs(*tensors.values())
        plain, given = model(**tensors).last_hidden_state, theirs(*tensors.values())
        lost = f"{10 * torch.log10(plain.square().sum() / (given - plain).square().sum()):.1f}"
    seconds = interleaved_latency(calls, rounds=max(15, rounds // shape[0]), warmup=3)
    return {name: 1000 * statistics.median(taken) for name, taken in seconds.items()}, lost


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    torch._inductor.config.freezing = True
    warnings.simplefilter("ignore")
    model, task = minilm()
    print(heading("The torch engine, MiniLM-L6, one thread"))
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        with torch.inference_mode(False):
            found = contestants(model, task, Path(folder))
        with torch.no_grad():
            taken = {shape: times(model, task, found, shape, rounds) for shape in SHAPES}
    print(
        "| milliseconds | "
        + " | ".join(f"{batch} x {sequence}" for batch, sequence in SHAPES)
        + " |\n|---|---|---|---|"
    )
    for name in next(iter(taken.values()))[0]:
        print(f"| {name} | " + " | ".join(f"{taken[shape][0][name]:.2f}" for shape in SHAPES) + " |")
    print("\n| dB | to float | to the proxy | proxy to float |\n|---|---|---|---|\n" + "\n".join(found.lines))
    print(f"\ntorchao, of its own batch to float: {', '.join(lost for _, lost in taken.values())} dB")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
