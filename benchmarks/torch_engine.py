"""The torch engine beside torch itself, torchao's PT2E and OpenVINO: MiniLM, one thread.

    python benchmarks/torch_engine.py [ROUNDS]

Everything that can be compiled is, by the same Inductor, with freezing: the float model by ``torch.compile``, torchao's
quantized graph (``X86InductorQuantizer``, static ranges, exported and calibrated at each shape by itself), and our
engine, whose file is one for all shapes. torchao is no dependency of anything here: without it its rows are left out.
Latencies are medians of one interleaved run for each shape; SQNR is of the embeddings of STS-B dev, 200 pairs, to the
float model, and of torchao's of its own batch.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import calibrated
from common import heading
from common import minilm
from common import stsb

from quantizer.engines import BuildOptions
from quantizer.engines import Engine
from quantizer.engines import build_engine
from quantizer.engines import interleaved_latency
from quantizer.engines import load_engine
from quantizer.export import export_onnx
from quantizer.tasks import Task

SHAPES = ((1, 16), (1, 128), (8, 128))
OURS = {"torch engine, compiled": True, "torch engine, eager": False}
Batch = dict[str, torch.Tensor]


class Positional(torch.nn.Module):
    """The model with its inputs by position, as PT2E's graph takes them; returns the last hidden state."""

    def __init__(self, model: torch.nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.model(**dict(zip(self.names, inputs, strict=True))).last_hidden_state


def engines(model: torch.nn.Module, task: Task, folder: Path) -> tuple[dict[str, Engine], list[str]]:
    """OpenVINO's engines and ours, and a line for each on what it loses."""
    found: dict[str, Engine] = {}
    rows, lines = stsb("dev", 200), []
    base = task.predict(lambda batch: model(**batch), rows)
    plain = export_onnx(model, folder / "float.onnx", task.example(), opset=20, dtype=torch.float32)
    found["OpenVINO, float"] = _built("openvino", plain)
    for backend in ("openvino", "torch"):
        quantizer = calibrated(model, task, backend=backend)
        frozen = quantizer.quantize(model)
        path = quantizer.export(frozen, folder / f"{backend}.onnx", task.example())
        proxy = task.predict(lambda batch, frozen=frozen: frozen(**batch), rows)
        roads = OURS if backend == "torch" else {"OpenVINO, INT8": None}
        for name, compiled in roads.items():
            found[name] = _built(backend, path, compiled)
            given = task.predict(partial(_run, found[name]), rows)
            distances = [task.paired(expected, given)["sqnr_db"] for expected in (base, proxy)]
            far = task.paired(base, proxy)["sqnr_db"]
            lines.append(f"| {name} | {distances[0]:.1f} | {distances[1]:.1f} | {far:.1f} |")
    return found, lines


def _built(backend: str, path: Path, compiled: bool | None = None) -> Engine:
    target = path.with_name(f"{path.stem}-{compiled}.engine")
    return load_engine(backend, build_engine(backend, path, target, BuildOptions(compiled=compiled)).path, threads=1)


def _run(engine: Engine, batch: Batch) -> Any:
    return engine({name: np.asarray(value) for name, value in batch.items()})


def pt2e(model: torch.nn.Module, batches: list[Batch]) -> Callable[..., Any]:
    """torchao's quantized graph, compiled, from batches of one shape."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import X86InductorQuantizer
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import get_default_x86_inductor_quantization_config

    module = Positional(model, list(batches[0])).eval()
    graph = torch.export.export(module, tuple(batches[0].values())).module()
    # The pooler's output is not returned, and the quantizer stumbles over what nobody reads.
    graph.graph.eliminate_dead_code()
    graph.recompile()
    quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(graph, quantizer)
    for batch in batches:
        prepared(*batch.values())
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
    model: torch.nn.Module, task: Task, found: dict[str, Engine], shape: tuple[int, int], rounds: int
) -> tuple[dict[str, float], str]:
    """Milliseconds of everything at one shape, and what torchao's graph loses there."""
    batches = batches_of(task, *shape)
    tensors = batches[0]
    arrays = {name: value.numpy() for name, value in tensors.items()}
    torch._dynamo.reset()
    compiled = torch.compile(model)
    calls: dict[str, Callable[[], object]] = {
        "torch, eager float": lambda: model(**tensors),
        "torch.compile, float": lambda: compiled(**tensors),
        **{name: partial(engine, arrays) for name, engine in found.items()},
    }
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
            found, lines = engines(model, task, Path(folder))
        with torch.no_grad():
            taken = {shape: times(model, task, found, shape, rounds) for shape in SHAPES}
    print(
        "| milliseconds | "
        + " | ".join(f"{batch} x {sequence}" for batch, sequence in SHAPES)
        + " |\n|---|---|---|---|"
    )
    for name in next(iter(taken.values()))[0]:
        print(f"| {name} | " + " | ".join(f"{taken[shape][0][name]:.2f}" for shape in SHAPES) + " |")
    print("\n| dB | to float | to the proxy | proxy to float |\n|---|---|---|---|\n" + "\n".join(lines))
    print(f"\ntorchao, of its own batch to float: {', '.join(lost for _, lost in taken.values())} dB")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
