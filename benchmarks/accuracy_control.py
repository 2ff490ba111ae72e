"""A budget on the user's metric: ``fallback(max_drop=...)`` beside NNCF's accuracy control.

    python benchmarks/accuracy_control.py

One model (MiniLM, every kind of site), one budget, the same rows to calibrate on and to tune on; both results are
scored as OpenVINO engines on rows that neither has seen. NNCF calls its metric on the compiled model, ours on the
proxy: so a call is counted, and its time is part of the whole.
"""

from __future__ import annotations

import logging
import re
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import heading, minilm, stsb

from quantizer import Quantizer
from quantizer.engines import load_engine
from quantizer.export.exporter import export_onnx
from quantizer.tasks import Batch, Example, Run, Task

_MAX_DROP = 0.002
_CALIBRATION = slice(0, 128)
_TUNING = slice(1800, 2700)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a tool made of the model.

    Attributes:
        run: runs a batch through the engine.
        kept_in_float: what it kept in float, in the tool's own terms.
        calls: how often the metric was called.
        tuned: its last score on the tuning samples, of what is returned.
    """

    run: Run
    kept_in_float: str
    calls: int
    tuned: float


class _Scored:
    """The task's score of what runs a batch, on the tuning samples; counts its calls."""

    def __init__(self, task: Task, rows: list[Example]) -> None:
        self._task = task
        self._rows = rows
        self.scores: list[float] = []

    def __call__(self, run: Run) -> float:
        self.scores.append(self._task.score(self._task.predict(run, self._rows), self._rows))
        return self.scores[-1]


def ours(model: torch.nn.Module, task: Task, batches: list[Batch], score: _Scored, folder: Path) -> Outcome:
    """``fallback(max_drop=...)`` with the default measure."""
    quantizer = Quantizer(backend="openvino", sites={"residual_add": True})
    quantizer.calibrate(model, batches, progress=False)
    amp = quantizer.amp(model)
    with torch.no_grad():
        for batch in batches[:4]:
            amp(**batch)
    chosen = quantizer.fallback(
        amp, max_drop=_MAX_DROP, metric=lambda proxy: score(lambda batch: proxy(**batch)), max_evaluations=25
    )
    path = quantizer.export(quantizer.quantize(model), folder / "ours.onnx", task.example())
    rows = {row.group: row for row in quantizer.sensitivity}
    spent = sum(rows[name].activations for name in chosen.groups)
    total = sum(row.activations for row in rows.values())
    return Outcome(
        run=_engine(path),
        kept_in_float=f"{len(chosen.groups)} of {len(rows)} groups: {spent} of {total} quantizers",
        calls=len(score.scores),
        tuned=score(lambda batch: quantizer.quantize(model)(**batch)),
    )


def nncf(model: torch.nn.Module, task: Task, batches: list[Batch], score: _Scored, folder: Path) -> Outcome:
    """NNCF's ``quantize_with_accuracy_control``, transformer preset."""
    import nncf as tool
    import openvino

    told = _Told()
    logging.getLogger("nncf").addHandler(told)
    path = export_onnx(model, folder / "float.onnx", task.example(), opset=20, dtype=torch.float32)
    float_model = openvino.Core().read_model(path)

    def validate(compiled: Any, _: Iterable[Any]) -> tuple[float, None]:
        return score(_compiled(compiled)), None

    def arrays(batch: Batch) -> dict[str, Any]:
        return {name: tensor.numpy() for name, tensor in batch.items()}

    quantized = tool.quantize_with_accuracy_control(
        float_model,
        tool.Dataset(batches, arrays),
        # Rows are the task's; NNCF takes a subset of these for its ranking where no value for each row is returned.
        tool.Dataset(batches, arrays),
        validate,
        max_drop=_MAX_DROP,
        drop_type=tool.DropType.ABSOLUTE,
        model_type=tool.ModelType.TRANSFORMER,
        subset_size=len(batches),
    )
    calls = len(score.scores)
    openvino.save_model(quantized, folder / "nncf.xml", compress_to_fp16=False)
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    run = _compiled(openvino.Core().compile_model(quantized, "CPU", settings))
    return Outcome(run=run, kept_in_float=told.summary(), calls=calls, tuned=score(run))


class _Told(logging.Handler):
    """What NNCF logs about the operations that it kept in float."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def summary(self) -> str:
        wanted = re.compile(r"(\d+).*?(reverted|quantized operations)", re.IGNORECASE)
        return "; ".join(line for line in self.lines if wanted.search(line)) or "nothing"


def _compiled(compiled: Any) -> Run:
    names = [value.get_any_name() for value in compiled.inputs]
    return lambda batch: {"last_hidden_state": compiled({name: batch[name].numpy() for name in names})[0]}


def _engine(path: Path) -> Run:
    engine = load_engine("openvino", path, threads=1)
    return lambda batch: engine({name: batch[name].numpy() for name in engine.input_names})


def main() -> None:
    """Both, one after the other, on one thread."""
    torch.set_num_threads(1)
    model, task = minilm()
    train, dev = stsb("train"), stsb("dev")
    batches = task.batches(train[_CALIBRATION])
    tuning = train[_TUNING]
    reference = task.predict(lambda batch: model(**batch), dev)
    floats = {"tuning": _Scored(task, tuning)(lambda batch: model(**batch)), "dev": task.score(reference, dev)}
    print(heading(f"Accuracy control: MiniLM, at most {_MAX_DROP} of Spearman's correlation on the tuning samples"))
    print("| tool | kept in float | metric calls | seconds | tuning samples | dev, engine |\n|---|---|---|---|---|---|")
    print(f"| float | | | | {floats['tuning']:.4f} | {floats['dev']:.4f} |", flush=True)
    for tool in (ours, nncf):
        score = _Scored(task, tuning)
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            outcome = tool(model, task, batches, score, Path(folder))
            seconds = time.perf_counter() - start
            found = task.predict(outcome.run, dev)
        low, high = task.difference_interval(reference, found, dev, 1000)
        lost = task.score(found, dev) - floats["dev"]
        print(
            f"| {tool.__name__} | {outcome.kept_in_float} | {outcome.calls} | {seconds:.0f} "
            f"| {outcome.tuned - floats['tuning']:+.4f} | {lost:+.4f} [{low:+.4f}, {high:+.4f}] |",
            flush=True,
        )


if __name__ == "__main__":
    main()
