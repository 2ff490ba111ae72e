"""What a second process of ``torchrun`` wins in calibration, sensitivity and a search, with the same plan or not.

    python benchmarks/ranks.py [ROUNDS]

MiniLM fine-tuned on SST-2, a thread for each process. A round is the same work by one process and then by two; times
are of the slowest process, without the start of Python and the loading of the model. Where others use the machine, too,
look at the processor time of the process that needs most: a process that waits for another one uses none. The search is
by the distance of the logits from those of the float model, which any rounding changes. Batches of calibration have one
length: of others the process with the longer ones is waited for.
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
from common import heading, minilm_sst2, sst2
from torch import distributed, nn
from torch.nn import functional

from quantizer import Quantizer
from quantizer.tasks import Batch, Example, Task
from quantizer.utils.distributed import all_gather_bytes, alone, get_rank, get_world_size, is_mine

_STAGES = ("calibration", "sensitivity", "search")
_PROCESSES = (1, 2)
_CALIBRATION, _TUNING, _BATCH, _TOKENS = 128, 256, 32, 64
"""Samples of calibration, of a score, and of a batch, and the tokens of a row of calibration."""
_BUDGET, _TRIES = 0.5, 10
"""The share of the drop with everything quantized that the search allows, and its scores at most."""


class Distance:
    """A metric: how far logits are from those of the first model, which is the float one."""

    higher_is_better = True

    def __init__(self, task: Task, rows: list[Example]) -> None:
        self._task = task
        self._rows = rows
        self._first: np.ndarray | None = None

    def __call__(self, model: nn.Module) -> float:
        outputs = self._task.outputs(lambda batch: model(**batch), self._rows)
        self._first = outputs if self._first is None else self._first
        return -float(np.abs(outputs - self._first).mean())


@contextmanager
def timed(times: dict[str, list[float]], stage: str) -> Iterator[None]:
    """Time the block until the last process is done with it, and the processor time of the one that needs most."""
    all_gather_bytes(b"")
    start, used = time.perf_counter(), time.process_time()
    yield
    used = time.process_time() - used
    most = max(float(told) for told in all_gather_bytes(str(used).encode()))
    times[stage] = [time.perf_counter() - start, most]


def work(folder: Path) -> None:
    """Do the stages in this process, one of those that ``torchrun`` started; the first one writes what came of it."""
    torch.set_num_threads(1)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        distributed.init_process_group("gloo")
    model, task = minilm_sst2()
    task.split, task.batch_size = True, _BATCH
    batches = [_padded(batch) for batch in task.batches(sst2("train", _CALIBRATION))]
    quantizer = Quantizer(backend="openvino")
    times: dict[str, list[float]] = {}
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


def _padded(batch: Batch) -> Batch:
    longest = max(value.shape[1] for value in batch.values())
    if longest > _TOKENS:
        raise SystemExit(f"a row has {longest} tokens, and {_TOKENS} are measured")
    return {name: functional.pad(value, (0, _TOKENS - value.shape[1])) for name, value in batch.items()}


def by_processes(count: int, folder: Path) -> dict[str, object]:
    """Return what so many processes told of the same work."""
    launched = ["-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    launcher = [] if count == 1 else launched
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
        f"MiniLM on SST-2, {_CALIBRATION} rows, padded to {_TOKENS} tokens, to calibrate on, {_TUNING} to score, "
        f"{one['sites']} sites, {one['tries']} tries of a search; medians of {rounds} rounds interleaved.\n"
    )
    print("| stage | one process, s | two, s | times as fast | by processor time: one, s | two, s | times as fast |")
    print("|---|---|---|---|---|---|---|")
    for stage in (*_STAGES, "together"):
        cells = [stage]
        for place in (0, 1):
            pairs = [
                (_seconds(a, stage, place), _seconds(b, stage, place)) for a, b in zip(*found.values(), strict=True)
            ]
            ratios = sorted(one_s / two_s for one_s, two_s in pairs)
            cells += [f"{statistics.median(times):.1f}" for times in zip(*pairs, strict=True)]
            cells.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        print(f"| {' | '.join(cells)} |")
    digests = {told["digest"] for of_count in found.values() for told in of_count}
    print(f"\nPlan, statistics, ranking and tries of all {2 * rounds} are the same, bit for bit: {len(digests) == 1}")
    if len(digests) != 1:
        raise SystemExit("the plans differ")


def _seconds(told: dict[str, object], stage: str, place: int) -> float:
    """Return the seconds of a stage, or of all: those of the clock, or of the processor."""
    times = told["times"]
    assert isinstance(times, dict)
    return float(sum(pair[place] for name, pair in times.items() if stage in (name, "together")))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(Path(sys.argv[2]))
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 5)
