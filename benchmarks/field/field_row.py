"""One row of the table: a tool on a model, measured in a process of its own."""

from __future__ import annotations

import multiprocessing
import random
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from in_turns import in_turns
from subjects import BATCHES, SUBJECTS, Batch, Run, Subject
from tools import REFERENCE, TOOLS, Made, onnx_session

from quantizer.engines.measure import peak_rss_mib
from quantizer.report import collect_machine, collect_versions
from quantizer.tasks import Predictions
from quantizer.utils.child_process import safe_children

__all__ = ["about", "measured_row"]

_SEED = 0
_OTHERS = ("nvidia-modelopt", "torchao", "optimum-quanto")
"""Distributions of other tools, besides those that each report has."""
_SECONDS = 20
"""About how long the calls of one batch size are timed."""
_ROUNDS = (3, 30)
"""The fewest and the most of them."""


def measured_row(model: str, tool: str, work: Path) -> dict[str, Any]:
    """Return all figures of a tool on a model.

    Args:
        model: the name of the subject.
        tool: that of the tool.
        work: a folder for what is made once for a model.
    """
    torch.set_num_threads(1)
    torch.manual_seed(_SEED)
    random.seed(_SEED)
    np.random.seed(_SEED)
    subject = SUBJECTS[model](work)
    base = _base(subject, work / f"{model}-float32.npy")
    row = {"title": subject.title, "metric": subject.metric, "seed": _SEED}
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        made = TOOLS[tool].make(subject, Path(folder))
        row["quantize_s"] = time.perf_counter() - started
        row["quantize_peak_mib"] = peak_rss_mib()
        row["note"] = made.note
        if made.files:
            row["file_mib"] = sum(file.stat().st_size for file in made.files) / 2**20
            row |= _in_fresh_process(made, subject.inputs(8))
        run = made.load()
        row |= subject.figures(base, subject.predict(run))
        other = run if tool == REFERENCE else _reference(subject, work / f"{model}-reference")
        row["latency"] = {str(batch): _timed(subject, run, other, batch) for batch in BATCHES}
    return row


def about() -> dict[str, Any]:
    """Return where a row was measured, and with which versions."""
    return {
        "commit": _commit(),
        "machine": collect_machine(),
        "versions": collect_versions() | collect_versions(_OTHERS),
    }


def _reference(subject: Subject, folder: Path) -> Run:
    """What all are measured beside; its file is made once."""
    path = folder / "float.onnx"
    if not path.exists():
        made = Path(tempfile.mkdtemp(dir=folder.parent))
        TOOLS[REFERENCE].make(subject, made)
        if not folder.exists():
            made.rename(folder)
    return onnx_session(path)


def _commit() -> str:
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def _base(subject: Subject, path: Path) -> Predictions:
    """The float model's predictions in PyTorch, computed once."""

    def run(batch: Batch) -> Any:
        with torch.no_grad():
            return subject.model(**batch)

    if not path.exists():
        base = subject.predict(run)
        np.savez(path.with_suffix(".npz"), outputs=base.outputs, decisions=base.decisions)
        path.with_suffix(".npz").rename(path)
    with np.load(path) as kept:
        return Predictions(kept["outputs"], kept["decisions"])


def _in_fresh_process(made: Made, batch: Batch) -> dict[str, float]:
    """Return the seconds to load an engine, and the most memory in MiB of a process that runs it on a batch."""
    context = multiprocessing.get_context("spawn")
    with safe_children(), context.Pool(1) as pool:
        return pool.apply(_loaded_and_run, (made.load, batch))


def _loaded_and_run(load: Callable[[], Run], batch: Batch) -> dict[str, float]:
    torch.set_num_threads(1)
    before = peak_rss_mib()
    started = time.perf_counter()
    run = load()
    seconds = time.perf_counter() - started
    run(batch)
    return {"load_s": seconds, "run_peak_mib": peak_rss_mib() - before}


def _timed(subject: Subject, run: Run, reference: Run, batch: int) -> dict[str, float]:
    """The latencies of one batch size, in as many rounds as their time allows."""
    given = subject.inputs(batch)
    for call in (run, reference):
        call(given)
    started = time.perf_counter()
    for call in (run, reference):
        call(given)
    rounds = int(_SECONDS / (time.perf_counter() - started))
    return in_turns(run, reference, given, min(max(rounds, _ROUNDS[0]), _ROUNDS[1]))
