"""The engine that ``backend: auto`` would choose beside every engine in float, ONNX Runtime's own quantizer and NNCF.

    python benchmarks/chosen_engine.py [minilm | bert-base | dinov2 | efficientnet]... [ROUNDS]

One thread. Each candidate is quantized from one calibration, with the groups kept in float that its own engine runs
slower in INT8; engines are built with each shape as the usual one, and timed in interleaved rounds. Every other round
chooses, as ``auto`` does, and the rounds between say what the choice is worth, so that no engine is praised for the
noise that it was chosen by. BERT-base has random weights, with which the time is the same, and all but MiniLM have
``preset: plain``. NNCF has its transformer preset for all but EfficientNet.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import torch
import transformers
from common import SHARED, heading, minilm, stsb
from data import imagenet_sample
from efficientnet_lite import efficientnet_lite0
from engine_speed import dynamic_file, openvino_engine, plain_session
from peers import nncf_by_default
from torch import nn

from quantizer import Quantizer, measure_latency_costs
from quantizer.engines import BuildOptions, build_engine, interleaved_latency, load_engine, medians
from quantizer.engines.for_this_cpu import Variant, cpu_candidates, cpu_variants
from quantizer.errors import EngineError
from quantizer.export.exporter import export_onnx
from quantizer.pipeline.fastest_engine import choose
from quantizer.report.record import Candidate

Shape = tuple[int, int | None]
Run = Callable[[dict[str, np.ndarray]], object]
Make = Callable[[Shape], Run]
BASE, DYNAMIC, NNCF = "ONNX Runtime FP32, its own session", "ONNX Runtime, quantize_dynamic", "OpenVINO, NNCF INT8"
TEXTS, IMAGES = ((1, 16), (1, 128), (8, 128), (32, 128)), ((1, None), (8, None))
_WORK = 4096
"""Rows times tokens up to which a shape gets all rounds."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with what it is calibrated on; ``inputs`` makes those of a shape."""

    model: nn.Module
    calibration: Sequence[Any]
    inputs: Callable[[int, int | None], dict[str, np.ndarray]]
    shapes: Sequence[Shape]
    preset: str = "plain"
    transformer: bool = True


def case_minilm() -> Case:
    model, task = minilm()
    return Case(
        model=model,
        calibration=task.batches(stsb("train", 64)),
        inputs=lambda batch, sequence: _arrays(task.random_batch(batch, sequence or 128)),
        shapes=TEXTS,
        preset="balanced",
    )


def case_bert_base() -> Case:
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig()).eval()

    def inputs(batch: int, sequence: int | None) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 30_000, (batch, sequence or 128), generator=torch.Generator().manual_seed(1))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    batches = [inputs(4, 64) for _ in range(2)]
    return Case(model=model, calibration=batches, inputs=lambda *size: _arrays(inputs(*size)), shapes=TEXTS)


def case_dinov2() -> Case:
    model = transformers.AutoModel.from_pretrained(SHARED / "models/dinov2-small", dtype=torch.float32).eval()
    images = imagenet_sample()[0]
    return Case(
        model=model,
        calibration=[{"pixel_values": part} for part in images[:32].split(8)],
        inputs=lambda batch, _: {"pixel_values": images[:batch].numpy()},
        shapes=IMAGES,
    )


def case_efficientnet() -> Case:
    images, _, tuned = imagenet_sample()
    return Case(
        model=efficientnet_lite0(),
        calibration=images[tuned].split(16),
        inputs=lambda batch, _: {"pixel_values": images[:batch].numpy()},
        shapes=IMAGES,
        transformer=False,
    )


CASES = {
    "minilm": case_minilm,
    "bert-base": case_bert_base,
    "dinov2": case_dinov2,
    "efficientnet": case_efficientnet,
}


def _arrays(batch: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in batch.items()}


def engines(case: Case, folder: Path) -> tuple[dict[str, Make], list[str]]:
    """What makes each engine, by name, and a line on each plan; names of candidates are those of ``Candidate``."""
    found: dict[str, Make] = {}
    lines = []
    example = case.calibration[0]
    plain = export_onnx(case.model, folder / "float.onnx", example, opset=20, dtype=torch.float32)
    names = cpu_candidates()[0]
    quantizer = Quantizer(backend=names[0], preset=case.preset)
    quantizer.calibrate(case.model, case.calibration, progress=False)
    batch, sequence = case.shapes[-2]
    paths: dict[str, Path] = {}
    for name in names:
        # Always a new one: groups that are slower in one engine may be faster in another.
        mine = quantizer.for_backend(name)
        back = 0
        try:
            latency_costs = measure_latency_costs(mine, case.model, example, batch=batch, sequence=sequence or 128)
        except EngineError as error:
            lines.append(f"{name}: {error}")
        else:
            back = len(latency_costs.slower())
            if back:
                mine.fallback(None, latency_costs=latency_costs)
        paths[name] = mine.export(mine.quantize(case.model), folder / f"{name}.onnx", example)
        lines.append(f"{name} int8: {back} slower groups kept in float, {mine.coverage.share:.1%} of multiply-adds")
    for variant in cpu_variants(names, dtype="int8"):
        path = plain if variant.dtype is None else paths[variant.backend]
        found[variant.name] = partial(_built, variant, path)
    theirs = {BASE: plain_session(plain), DYNAMIC: plain_session(dynamic_file(plain, folder / "dynamic.onnx"))}
    theirs[NNCF] = openvino_engine(_nncf_file(plain, case, folder))
    return found | {one: partial(_same, run) for one, run in theirs.items()}, lines


def _same(run: Run, shape: Shape) -> Run:
    return run


@cache
def _built(variant: Variant, path: Path, shape: Shape) -> Run:
    """An engine with a usual shape; only OpenVINO's depends on it."""
    batch, sequence = shape
    usual = {"batch": (batch,) * 3, "sequence": (sequence or 1,) * 3}
    options = BuildOptions(dynamic=usual, inference_precision=variant.precision, compiled=variant.compiled)
    target = path.with_name(f"{path.stem}-{variant.file_name}.engine")
    return load_engine(variant.backend, build_engine(variant.backend, path, target, options).path, threads=1)


def _nncf_file(plain: Path, case: Case, folder: Path) -> Path:
    names = [port.get_any_name() for port in openvino.Core().read_model(plain).inputs]
    arrays = [_arrays(one) if isinstance(one, Mapping) else {names[0]: one.numpy()} for one in case.calibration]
    path = folder / "nncf.xml"
    openvino.save_model(nncf_by_default(plain, arrays, transformer=case.transformer), path, compress_to_fp16=False)
    return path


def report(name: str, rounds: int) -> None:
    """Print the times of one model, what is chosen at each shape, and what that is worth."""
    case = CASES[name]()
    with tempfile.TemporaryDirectory() as folder:
        found, lines = engines(case, Path(folder))
        shown = [f"{batch} x {sequence}" if sequence else f"batch {batch}" for batch, sequence in case.shapes]
        taken = []
        for batch, sequence in case.shapes:
            given = case.inputs(batch, sequence)
            shape = (batch, sequence)
            usual = {one: shape if one.startswith("openvino") else case.shapes[0] for one in found}
            calls = {one: partial(make(usual[one]), given) for one, make in found.items()}
            fewer = max(10, rounds * _WORK // (batch * (sequence or 256)))
            taken.append(interleaved_latency(calls, rounds=2 * min(rounds, fewer) // 2, warmup=2))
            # Of a BERT-base the engines of all shapes together take more than 20 GB.
            del calls
            _built.cache_clear()
    print(f"### {name}\n")
    print("| milliseconds | " + " | ".join(shown) + " |\n|---|" + "---|" * len(shown))
    for one in found:
        print(f"| {one} | " + " | ".join(f"{1000 * statistics.median(seconds[one]):.2f}" for seconds in taken) + " |")
    rows: dict[str, list[str]] = {}
    for shape, seconds in zip(shown, taken, strict=True):
        for label, cell in _verdicts(shape, seconds).items():
            rows.setdefault(label, []).append(cell)
    print("\n| at each shape | " + " | ".join(shown) + " |\n|---|" + "---|" * len(shown))
    for label, cells in rows.items():
        print(f"| {label} | " + " | ".join(cells) + " |")
    print("\n" + "; ".join(lines) + "\n", flush=True)


def _verdicts(shape: str, seconds: dict[str, list[float]]) -> dict[str, str]:
    """Return what is chosen by every other round, and what the other rounds say of it."""
    peers = (BASE, DYNAMIC, NNCF)
    chosen_by = medians({one: samples[::2] for one, samples in seconds.items()})
    tried = [
        Candidate(backend=one.rpartition(" ")[0], format=one.rpartition(" ")[2], milliseconds=(1000 * chosen_by[one],))
        for one in seconds
        if one not in peers
    ]
    best = choose(tried, [shape], []).candidates[0].name
    worth = {one: samples[1::2] for one, samples in seconds.items()}

    def ratio(other: str) -> float:
        return statistics.median(b / a for a, b in zip(worth[best], worth[other], strict=True))

    floats = [one.name for one in tried if one.is_float] + [BASE]
    return {
        "chosen": best,
        "to the fastest float engine": f"{min(map(ratio, floats)):.2f}",
        **{f"to {peer}": f"{ratio(peer):.2f}" for peer in peers},
    }


def main(words: Sequence[str]) -> None:
    """Report on the models that are named, or on all."""
    torch.set_num_threads(1)
    print(heading("The chosen engine, one thread"))
    rounds = next((int(word) for word in words if word.isdigit()), 60)
    for name in [word for word in words if not word.isdigit()] or list(CASES):
        report(name, rounds)


if __name__ == "__main__":
    main(sys.argv[1:])
