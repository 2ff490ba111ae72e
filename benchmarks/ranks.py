"""What a second process of ``torchrun`` wins in calibration, sensitivity and a search, with the same plan or not.

    python benchmarks/ranks.py [ROUNDS]

MiniLM fine-tuned on SST-2, a thread for each process. A round is the same work by one process and then by two; times
are of the slowest process, without the start of Python and the loading of the model. The search is by the distance of
the logits from those of the float model, which any rounding changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from common import heading
from common import minilm_sst2
from common import sst2
from torch import distributed
from torch import nn

from quantizer import Quantizer
from quantizer.common.distributed import all_gather_bytes
from quantizer.common.distributed import alone
from quantizer.common.distributed import get_rank
from quantizer.common.distributed import get_world_size
from quantizer.common.distributed import is_mine
from quantizer.tasks import Row
from quantizer.tasks import Task

_STAGES = ("calibration", "sensitivity", "search")
_PROCESSES = (1, 2)
_CALIBRATION, _TUNING = 128, 128
"""Rows, of which 32 are a batch."""
_BUDGET, _TRIES = 0.5, 12
"""The share of the drop with everything quantized that the search allows, and its scores at most."""


class Distance:
    """A metric: how far logits are from those of the first model, which is the float one."""

    higher_is_better = True

    def __init__(self, task: Task, rows: list[Row]) -> None:
        self._task = task
        self._rows = rows
        self._first: np.ndarray | None = None

    def __call__(self, model: nn.Module) -> float:
        outputs = self._task.outputs(lambda batch: model(**batch), self._rows)
        self._first = outputs if self._first is None else self._first
        return -float(np.abs(outputs - self._first).mean())


@contextmanager
def timed(times: dict[str, float], stage: str) -> Iterator[None]:
    """Time the block from the moment at which all processes are there until the last one is done."""
    all_gather_bytes(b"")
    start = time.perf_counter()
    yield
    all_gather_bytes(b"")
    times[stage] = time.perf_counter() - start


def work(folder: Path) -> None:
    """Do the stages in this process, one of those that ``torchrun`` started; the first one writes what came of it."""
    torch.set_num_threads(1)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        distributed.init_process_group("gloo")
    model, task = minilm_sst2()
    task.split = True
    batches = task.batches(sst2("train", _CALIBRATION))
    quantizer, times = Quantizer(backend="openvino"), dict.fromkeys(_STAGES, 0.0)
    with timed(times, "calibration"):
        quantizer.calibrate(model, batches, split=True, progress=False)
        plan = quantizer.plan
    with timed(times, "sensitivity"):
        proxy = quantizer.amp(model)
        with torch.no_grad():
            for number, batch in enumerate(batches):
                if is_mine(number):
                    proxy(**batch)
        ranking = [(row.group, row.error) for row in quantizer.sensitivity]
    metric = Distance(task, sst2("dev", _TUNING))
    metric(model)
    whole = -metric(quantizer.quantize(model))
    with timed(times, "search"):
        found = quantizer.fallback(proxy, max_drop=_BUDGET * whole, metric=metric, max_evaluations=_TRIES)
    if get_rank() == 0:
        with alone():
            saved = quantizer.save(folder / f"plan-{time.monotonic_ns()}")
        files = {path.name: path.read_bytes() for path in sorted(saved.iterdir())}
        decided = json.dumps([ranking, found.document()]).encode()
        digest = hashlib.sha256(b"".join([*files.values(), decided])).hexdigest()
        told = {"times": times, "digest": digest, "sites": len(plan), "tries": len(found.evaluations)}
        (folder / "told.json").write_text(json.dumps(told), encoding="utf-8")
    if get_world_size() > 1:
        distributed.barrier()
        distributed.destroy_process_group()


def by_processes(count: int, folder: Path) -> dict[str, object]:
    """Return what so many processes told of the same work."""
    launcher = [] if count == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *launcher, __file__, "--work", str(folder)], check=True, env=environment)
    told: dict[str, object] = json.loads((folder / "told.json").read_text(encoding="utf-8"))
    return told


def main(rounds: int) -> None:
    found: dict[int, list[dict[str, object]]] = {count: [] for count in _PROCESSES}
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(rounds):
            for count in _PROCESSES:
                found[count].append(by_processes(count, Path(scratch)))
    one = found[1][0]
    print(heading("Two processes of `torchrun` beside one (`ranks.py`)"))
    print(
        f"MiniLM on SST-2, {_CALIBRATION} rows of calibration, {_TUNING} to score, {one['sites']} sites, "
        f"{one['tries']} tries of a search; medians of {rounds} rounds in turns.\n"
    )
    print("| stage | one process, s | two, s | times as fast: median | lowest | highest |\n|---|---|---|---|---|---|")
    for stage in (*_STAGES, "together"):
        pairs = [(_seconds(a, stage), _seconds(b, stage)) for a, b in zip(found[1], found[2], strict=True)]
        ratios = [alone / both for alone, both in pairs]
        one_s, two_s = (statistics.median(times) for times in zip(*pairs, strict=True))
        print(
            f"| {stage} | {one_s:.1f} | {two_s:.1f} | {statistics.median(ratios):.2f} | {min(ratios):.2f} | "
            f"{max(ratios):.2f} |"
        )
    digests = {told["digest"] for of_count in found.values() for told in of_count}
    print(f"\nPlan, statistics, ranking and tries of all {2 * rounds} are the same, bit for bit: {len(digests) == 1}")
    if len(digests) != 1:
        raise SystemExit("the plans differ")


def _seconds(told: dict[str, object], stage: str) -> float:
    times = told["times"]
    assert isinstance(times, dict)
    return float(sum(times.values()) if stage == "together" else times[stage])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(Path(sys.argv[2]))
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 5)
