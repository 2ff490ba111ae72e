"""Several processes rank as one does, and decide alike."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from helpers import Mlp
from outside import run_ranks
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.algorithms.sensitivity.measurement import _mean


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Mlp(), Mlp()).eval()


def _data() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 32, generator=generator) * size for size in (1.0, 0.5, 2.0, 1.5)]


def _outcome(measured: list[Tensor], rank: int, folder: Path) -> dict[str, Any]:
    """The ranking and the answer of a search; both processes calibrate on all data, so that their plans are equal."""
    model, q = _model(), Quantizer(preset="plain", backend="openvino", sites={"residual_add": True})
    q.calibrate(model, _data()[rank:] if rank else _data())
    amp = q.amp(model)
    with torch.no_grad():
        for x in measured:
            amp(x)
        expected = model(_data()[0])

    def metric(candidate: nn.Module) -> float:
        # Only what the first process sees may decide.
        return -float((candidate(_data()[0]) - expected).square().mean()) if rank == 0 else 100.0 * rank

    chosen = q.fallback(amp, max_drop=1e-5, metric=metric, cache=folder / f"{rank}.json")
    return {"errors": {row.group: row.error for row in q.sensitivity}, "chosen": chosen.document()}


def _measure_half(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    outcome = _outcome(_data()[rank::2], rank, Path(folder))
    (Path(folder) / f"outcome-{rank}.json").write_text(json.dumps(outcome), encoding="utf-8")
    # Together: gloo may abort a process whose peer is gone while its threads end.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_two_ranks_give_the_ranking_of_one(tmp_path: Path) -> None:
    run_ranks(_measure_half, tmp_path)
    first, second = (json.loads((tmp_path / f"outcome-{rank}.json").read_text(encoding="utf-8")) for rank in range(2))
    assert first == second
    assert (tmp_path / "0.json").exists()
    assert not (tmp_path / "1.json").exists(), "one process writes"
    model, q = _model(), Quantizer(preset="plain", backend="openvino", sites={"residual_add": True})
    q.calibrate(model, [*_data(), *_data()[1:]])
    amp = q.amp(model)
    with torch.no_grad():
        for x in _data():
            amp(x)
    alone = {row.group: row.error for row in q.sensitivity}
    assert first["errors"] == alone
    assert 0 < len(first["chosen"]["groups"]) < len(alone)


def test_three_processes_took_one_score() -> None:
    scores = [count / 872 for count in range(1, 100)]
    assert [_mean([score] * 3, 3) for score in scores] == scores
    assert [math.fsum([score] * 3) / 3 for score in scores] != scores, "a sum divided again may be another number"
    assert _mean([1e16, 1.0, -1e16], 4) == 0.25
