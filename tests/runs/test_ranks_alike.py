"""What several processes of a run have in common, and what the first one has done alone."""

from __future__ import annotations

import os
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from outside import run_ranks
from torch import distributed, nn

from quantizer.algorithms.qat.session import sum_gradients
from quantizer.errors import QuantizerError
from quantizer.pipeline import processes as process_group
from quantizer.pipeline.processes import require_same_work
from quantizer.pipeline.scores import Scoring
from quantizer.tasks import Predictions, Text
from quantizer.utils.distributed import all_gather_bytes, alone, get_rank


class _Task:
    """Outputs of which each process gives its own, in the order of ranks."""

    def predict(self, run: Any, rows: Any, progress: Any) -> Predictions:
        outputs = [float(told) for told in all_gather_bytes(str(run({"at": get_rank()})).encode())]
        return Predictions(torch.tensor(outputs).numpy(), torch.tensor(outputs).numpy())

    def score(self, predictions: Predictions, rows: Any) -> float:
        return float(predictions.outputs.sum())


class _Model(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value))

    def forward(self, at: int) -> float:
        return float(self.value) + at


def _in_group(rank: int, folder: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)


def _scored_and_compared(rank: int, folder: str) -> None:
    _in_group(rank, folder)
    base, other, rows = _Model(1.0), _Model(10.0), [Text("a", 0)]
    context: Any = SimpleNamespace(task=_Task(), model=base, timer=lambda _: nullcontext())
    scoring = Scoring(context, rows, 10)
    if rank == 0:
        with alone():
            scoring.difference("candidate", _engine(5.0))
    scoring.take({"float": base, "proxy": other})
    if rank == 0:
        assert scoring._predictions("float", base).outputs.tolist() == [1.0]
    assert scoring._predictions("proxy", other).outputs.tolist() == [10.0, 11.0]

    require_same_work("settings", base, {"tuning": rows})
    for settings, model, some, what in (
        (f"settings {rank}", base, rows, "configuration"),
        ("settings", _Model(float(rank)), rows, "weights of the model"),
        ("settings", base, rows * (rank + 1), "tuning samples"),
    ):
        with pytest.raises(QuantizerError, match=f"rank 1 differs from rank 0 in the {what}; all"):
            require_same_work(settings, model, {"tuning": some})

    half, full = (nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32))
    half.grad, full.grad = torch.ones(2, dtype=torch.bfloat16) * rank, torch.ones(2) * (rank + 1)
    sum_gradients([half, full], 0.5)
    assert half.grad.tolist() == [0.5, 0.5]
    assert half.grad.dtype is torch.bfloat16
    assert full.grad.tolist() == [1.5, 1.5]
    all_gather_bytes(b"")
    distributed.destroy_process_group()


def _engine(value: float) -> Any:
    return _Model(value)


def test_processes_do_one_work(tmp_path: Path) -> None:
    run_ranks(_scored_and_compared, tmp_path)


def test_a_process_does_not_wait_for_ever_for_one_that_never_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "_MEETING", timedelta(seconds=1))
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setitem(os.environ, name, value)
    with pytest.raises(QuantizerError, match="but the processes cannot connect"), process_group.process_group():
        pass
