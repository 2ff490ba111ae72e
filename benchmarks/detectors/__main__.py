"""What INT8 costs a detector: mAP50-95, recall, confidence and latency, beside other quantizers with their defaults.

    python benchmarks/detectors [NAME...] [--tools TOOL...] [--scenes N]

Detectors are trained on synthetic scenes first, unless their weights are there (``train.py``). All tools calibrate on
the same 128 training scenes, and all engines detect in the same other scenes. Every engine has one thread.

``recall`` is the share of objects with a detection of their class whose overlap (IoU) is at least 0.5 and whose
confidence is at least 0.25. ``confidence`` is the mean confidence over the objects that the float model finds so; an
object that another engine misses counts with 0. Speed-ups are over the fastest engine in float, by the fastest call of
each in interleaved rounds, with batches of 1 and 8.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "field"))

from common import heading
from detectors import DETECTORS, Detector
from scenes import CLASSES, SIDE, Scene, scene, write_scenes
from subjects import Batch, Run, Subject
from tools import TOOLS, Made
from torch import nn
from train import trained

import quantizer
from quantizer.engines import interleaved_latency
from quantizer.tasks.datasets.examples import Boxes
from quantizer.tasks.object_detection import Detections, average_precision, match_objects
from quantizer.utils.records import paired_interval

Array = npt.NDArray[Any]

_FLOAT = ("openvino-float32", "openvino-bfloat16", "onnxruntime-float32")
_CONVERTED = {"convert-openvino": "openvino", "convert-onnxruntime": "onnxruntime"}
"""Backends of ``quantizer convert``, for detectors that have a checkpoint."""
_TOOLS = (*_FLOAT, "openvino", "onnxruntime", *_CONVERTED, "nncf", "quantize-static")
_CALIBRATION = 128
_SCENES = 500
_FIRST = 1_000_000
"""The number of the first scene that is scored; training scenes start at 0."""
_BATCH = 8
_SURE = 0.25
_RESAMPLES = 200
_ROUNDS = 60


@dataclass(frozen=True, eq=False)
class Judged:
    """The detections of an engine beside the objects.

    Attributes:
        matches: see ``match_objects`` [N x K].
        confidence: the highest confidence of a detection of each object, over all scenes; 0 without one.
    """

    matches: Array
    confidence: Array

    @property
    def score(self) -> float:
        """mAP50-95."""
        return float(average_precision(self.matches, np.ones((1, len(self.matches))))[0])

    @property
    def recall(self) -> float:
        """The share of the objects that are found."""
        return float((self.confidence >= _SURE).mean())

    def mean_confidence(self, base: Judged) -> float:
        """Return the mean confidence of the objects that the float model finds."""
        return float(self.confidence[base.confidence >= _SURE].mean())


@cache
def _scored(number: int) -> list[Scene]:
    return [scene(_FIRST + at) for at in range(number)]


def _judge(found: Sequence[Detections], scenes: Sequence[Scene]) -> Judged:
    examples = [
        Boxes(
            Path(f"{at}.png"),
            tuple(map(tuple, made.boxes.tolist())),
            tuple(CLASSES[kind] for kind in made.labels),
            (False,) * len(made.labels),
        )
        for at, made in enumerate(scenes)
    ]
    confidence = [_confidence(one, made) for one, made in zip(found, scenes, strict=True)]
    return Judged(match_objects(found, examples, CLASSES), np.concatenate(confidence))


def _confidence(found: Detections, made: Scene) -> Array:
    """Return the highest confidence of a detection of each object [N]."""
    low = np.maximum(made.boxes[:, None, :2], found.boxes[None, :, :2])
    high = np.minimum(
        made.boxes[:, None, :2] + made.boxes[:, None, 2:], found.boxes[None, :, :2] + found.boxes[None, :, 2:]
    )
    common = (high - low).clip(min=0).prod(-1)
    union = made.boxes[:, 2:].prod(-1)[:, None] + found.boxes[:, 2:].prod(-1)[None] - common
    right = (common >= 0.5 * union) & (made.labels[:, None] == found.classes[None])
    return np.max(np.where(right, found.scores[None], 0.0), axis=1, initial=0.0)


def _batches(detector: Detector, scenes: Sequence[Scene]) -> list[Batch]:
    images = torch.from_numpy(np.stack([made.image for made in scenes]).transpose(0, 3, 1, 2)).float() / 255
    return [{detector.input_name: part.contiguous()} for part in images.split(_BATCH)]


def _subject(name: str, model: nn.Module, number: int) -> Subject:
    detector = DETECTORS[name]
    scored, calibration = _scored(number), [scene(at) for at in range(_CALIBRATION)]
    batches = _batches(detector, scored)

    def predict(run: Run) -> Any:
        found: list[Detections] = []
        for batch in batches:
            found.extend(detector.read(run(batch)))
        return _judge(found, scored)

    return Subject(
        title=detector.title,
        metric="mAP50-95",
        model=model,
        calibration=_batches(detector, calibration),
        inputs=lambda rows: {detector.input_name: batches[0][detector.input_name][:rows].contiguous()},
        predict=predict,
        figures=lambda base, found: {"score": found.score, "base": base.score},
        is_transformer=detector.is_transformer,
    )


def _converted(detector: Detector, model: nn.Module, backend: str, folder: Path, number: int) -> Made:
    """Return what ``quantizer convert`` makes of a checkpoint; the note is the mAP that it reports."""
    assert detector.save is not None
    detector.save(model, folder / "checkpoint")
    calibration = write_scenes(folder / "calibration", range(_CALIBRATION)).parent
    evaluation = write_scenes(folder / "evaluation", range(_FIRST, _FIRST + number))
    data = {"calibration": calibration, "evaluation": f"coco-json:{evaluation}"}
    command = [sys.executable, "-P", "-m", "quantizer", "convert", "--model", str(folder / "checkpoint")]
    command += ["--task", "object-detection", "--quantization", "--backend", backend, "--output", str(folder / "made")]
    command += [word for option, path in data.items() for word in (f"--{option}", str(path))]
    subprocess.run(command, check=True, stdout=sys.stderr)
    made = folder / "made" / backend
    record = json.loads((made / "report.json").read_text())
    return Made(lambda: _in_torch(quantizer.load(made)), note=str(record.get("scores")))


def _made(tool: str, name: str, subject: Subject, folder: Path, number: int) -> Made:
    if tool in _CONVERTED:
        return _converted(DETECTORS[name], trained(name), _CONVERTED[tool], folder, number)
    return TOOLS[tool].make(subject, folder)


def _title(tool: str) -> str:
    return f"ours, `quantizer convert`, {_CONVERTED[tool]}" if tool in _CONVERTED else TOOLS[tool].title


def _in_torch(model: nn.Module) -> Run:
    def run(batch: Batch) -> Any:
        with torch.no_grad():
            return model(**batch)

    return run


def _row(title: str, found: Judged, base: Judged, times: Sequence[str], seconds: float) -> str:
    random = np.random.default_rng(0)
    number = len(base.matches)
    weights = random.multinomial(number, np.full(number, 1 / number), size=_RESAMPLES)
    low, high = paired_interval(*(average_precision(one.matches, weights) for one in (base, found)))
    confidence, before = found.mean_confidence(base), base.mean_confidence(base)
    cells = [
        f"{100 * found.score:.2f}",
        f"{100 * (found.score - base.score):+.2f} [{100 * low:+.2f}, {100 * high:+.2f}]",
        f"{100 * found.recall:.1f}%",
        f"{confidence:.3f} ({confidence - before:+.3f})",
        *times,
        f"{seconds:.0f}",
    ]
    return f"| {title} | {' | '.join(cells)} |"


def _table(name: str, tools: Sequence[str], number: int, rounds: int) -> None:
    model = DETECTORS[name].ready(trained(name))
    subject = _subject(name, model, number)
    tools = [tool for tool in tools if tool not in _CONVERTED or DETECTORS[name].save is not None]
    base: Judged = subject.predict(_in_torch(model))
    print(f"\n### {subject.title}, {SIDE} x {SIDE} pixels, {number} scenes, {len(base.confidence)} objects\n")
    with tempfile.TemporaryDirectory() as folder:
        runs: dict[str, Run] = {}
        rows: dict[str, tuple[Judged, float]] = {}
        for tool in tools:
            work, began = Path(folder) / tool, time.monotonic()
            work.mkdir()
            try:
                # Some libraries print to the standard output.
                with redirect_stdout(sys.stderr):
                    made = _made(tool, name, subject, work, number)
                    runs[tool] = made.load()
            except Exception as error:  # noqa: BLE001 - whatever a tool raises is logged, and its row says failed
                print(f"{_title(tool)}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
                rows.pop(tool, None)
                continue
            seconds = time.monotonic() - began
            rows[tool] = subject.predict(runs[tool]), seconds
            print(_row(_title(tool), rows[tool][0], base, [], seconds), file=sys.stderr, flush=True)
        times = [_speed_ups(runs, subject.inputs(batch), rounds) for batch in (1, _BATCH)]
    shown = (
        "mAP50-95",
        "difference",
        "recall",
        "confidence",
        "speed-up, batch 1",
        f"batch {_BATCH}",
        "seconds to make",
    )
    print(f"| engine | {' | '.join(shown)} |")
    print("|---|---|---|---|---|---|---|---|")
    print(_row("torch, float32", base, base, ["", ""], 0))
    for tool in tools:
        if tool in rows:
            judged, seconds = rows[tool]
            print(_row(_title(tool), judged, base, [f"{part[tool]:.2f}" for part in times], seconds))
        else:
            print(f"| {_title(tool)} | failed | | | | | | |")
    sys.stdout.flush()


def _speed_ups(runs: dict[str, Run], batch: Batch, rounds: int) -> dict[str, float]:
    """Return the speed-up of each run over the fastest one in float, by the fastest call of each in interleaved rounds.

    A median of calls of a few milliseconds follows what else runs on the machine.
    """
    calls: dict[str, Callable[[], object]] = {name: partial(run, batch) for name, run in runs.items()}
    taken = interleaved_latency(calls, rounds=rounds, warmup=2)
    least = {name: min(seconds) for name, seconds in taken.items()}
    fastest = min((least[name] for name in _FLOAT if name in least), default=math.nan)
    return {name: fastest / value for name, value in least.items()}


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("names", nargs="*", help=" or ".join(DETECTORS))
    parser.add_argument("--tools", nargs="*", default=_TOOLS, help=", ".join(TOOLS))
    parser.add_argument("--scenes", type=int, default=_SCENES, help="the number of scenes that are scored")
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help="rounds of the latency")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(heading("Detectors: mAP, recall and confidence on synthetic scenes"))
    for name in arguments.names or DETECTORS:
        _table(name, arguments.tools, arguments.scenes, arguments.rounds)
