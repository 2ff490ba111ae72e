"""Processes that are given the same batches and run a part of them each: the plan of one process, or an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Mlp
from outside import run_ranks
from quick_start import few_steps
from safetensors.torch import load_file
from torch import Tensor, distributed, nn

from quantizer import Quantizer
from quantizer.errors import CalibrationError, LostRankError
from quantizer.utils.distributed import all_gather_bytes, alone, exact_sums, get_rank, get_world_size, of_first_rank

pytestmark = pytest.mark.usefixtures("learned_in_few_steps")

SETTINGS: dict[str, dict[str, Any]] = {
    "output": {"activations": {"calibrator": "output", "smoothquant_alpha": "auto"}, "bias_correction": True},
    "gptq": {"weights": {"rounding": "gptq"}},
    "reconstruct": {"weights": {"rounding": "reconstruct"}},
    "awq": {"weights": {"rounding": "awq"}},
}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Mlp(), Mlp()).eval()


def _data(count: int = 7) -> list[Tensor]:
    """Batches of two lengths, the last one of its own."""
    generator = torch.Generator().manual_seed(1)
    sizes = [8] * (count - 1) + [5]
    return [torch.randn(size, 32, generator=generator) * (1 + at) for at, size in enumerate(sizes)]


def _saved(name: str, batches: list[Tensor], folder: Path) -> None:
    q = Quantizer(preset="plain", backend="openvino", **SETTINGS[name])
    model = _model()
    q.calibrate(model, batches, split=True)
    if q.config.bias_correction:
        # The biases are corrected again, for what stays quantized, and amp() measures with those of single groups.
        q.fallback(q.amp(model), names=[next(path for path, entry in q.plan.items() if entry.bias_shift is not None)])
    _ = q.plan
    # What all have decided, each of them has: it goes on alone as one process does.
    if get_rank() == 0:
        with alone():
            q.save(folder / name)
            other = q.for_backend("onnxruntime")
            _ = other.plan
            other.save(folder / f"{name}-other")
    all_gather_bytes(b"")


def _start(rank: int, folder: str) -> None:
    few_steps().__enter__()
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)


def _leave() -> None:
    # Together: gloo may abort a process whose peer is gone while its threads end.
    distributed.barrier()
    distributed.destroy_process_group()


def _split(rank: int, folder: str) -> None:
    _start(rank, folder)
    for name in SETTINGS:
        _saved(name, _data(), Path(folder))
    # One batch for two processes: the second one runs none.
    _saved("output", _data(1), Path(folder) / "one batch")
    terms = [[1e16, 1.0], []] if rank == 0 else [[-1e16], [0.25]]
    assert exact_sums(terms) == [1.0, 0.25]
    assert of_first_rank(lambda: str(get_world_size()).encode()) == b"1"
    _leave()


def _same_files(one: Path, other: Path) -> None:
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    assert [name for name in names if (one / name).read_bytes() != (other / name).read_bytes()] == []


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes saved, each of which had run a part of the batches."""
    folder = tmp_path_factory.mktemp("split")
    run_ranks(_split, folder)
    return folder


@pytest.mark.parametrize("name", SETTINGS)
def test_each_runs_its_part(split: Path, name: str, tmp_path: Path) -> None:
    _saved(name, _data(), tmp_path)
    _same_files(tmp_path / name, split / name)
    _same_files(tmp_path / f"{name}-other", split / f"{name}-other")
    assert load_file(split / name / "ranges.safetensors").keys()


def test_fewer_batches_than_processes(split: Path, tmp_path: Path) -> None:
    _saved("output", _data(1), tmp_path)
    _same_files(tmp_path / "output", split / "one batch" / "output")


# -- what does not fit ------------------------------------------------------------------------------------------------


def _raises(batches: list[Any], expected: str, error: type[Exception] = CalibrationError) -> None:
    q = Quantizer(preset="plain", backend="openvino")
    with pytest.raises(error, match=expected):
        q.calibrate(_model(), batches, split=True)


def _misfits(rank: int, folder: str) -> None:
    _start(rank, folder)
    _raises(_data()[rank:], r"rank 1 received other batches than rank 0 \(6 and 7 batches\)")
    _raises([x * (1 + rank) for x in _data()], r"rank 1 received other batches than rank 0 \(7 and 7 batches\)")
    _raises([{"x": x, "cache": object()} for x in _data()], "batch 0 contains a object, which ranks cannot compare")
    _leave()


def _none(rank: int, folder: str) -> None:
    _start(rank, folder)
    _raises([], "the calibration data is empty")
    q = Quantizer(preset="plain", backend="openvino", weights={"rounding": "gptq"})
    q.calibrate(_model(), _data()[rank::2])
    with pytest.raises(CalibrationError, match=r"each process has its own batches; .* calibrate\(split=True\)"):
        _ = q.plan
    _leave()


def _other_shapes(rank: int, folder: str) -> None:
    _start(rank, folder)
    q = Quantizer(preset="plain", backend="openvino")
    if rank == 1:
        with pytest.raises(CalibrationError, match=r"batch 0 of the calibration data .* does not run"):
            q.calibrate(_model(), [torch.randn(4, 31)])
        # This process ends, as it would with the error.
        return
    q.calibrate(_model(), _data())
    with pytest.raises(LostRankError, match="another process ended early, so rank 0 of 2"):
        _ = q.plan
    Path(folder, "told").touch()


@pytest.mark.parametrize("work", [_none, _misfits])
def test_data_that_does_not_fit(work: Any, tmp_path: Path) -> None:
    run_ranks(work, tmp_path)


def test_one_process_fails_by_itself(tmp_path: Path) -> None:
    run_ranks(_other_shapes, tmp_path)
    assert (tmp_path / "told").exists()
