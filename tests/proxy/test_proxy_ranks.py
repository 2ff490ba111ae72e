"""Several processes calibrate as one does, and a calibration goes on after a load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from daily import some_daily
from helpers import assert_same, forget_checksums
from outside import run_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from toy_nets import net

from quantizer import QATCalibrate, Quantizer
from quantizer.errors import CalibrationError, QuantizerError
from quantizer.observe import snapshot
from quantizer.observe.calibrators import BINS, make_calibrator
from quantizer.plan.site_plan import Plan
from quantizer.utils.distributed import all_gather_bytes, all_reduce_sum
from tests.helpers import ConvNet, Mlp

CALIBRATORS: dict[str, dict[str, Any]] = {
    "max": {"calibrator": "max"},
    "corrected": {"calibrator": "percentile", "percentile": 90.0},
    "percentile": {"calibrator": "percentile", "percentile": 99.0},
    "mse": {"calibrator": "mse"},
    "entropy": {"calibrator": "entropy"},
    "percentiles": {"calibrator": "percentile", "percentile": [90.0, 99.0, 99.99]},
    "output": {"calibrator": "output", "smoothquant_alpha": "auto", "zero_point": True},
    "auto": {"calibrator": "auto"},
}

RUN_AGAIN = ("auto", "corrected", "output", "percentiles")
"""Those for which batches are run again, which a folder does not hold."""


class Branches(nn.Module):
    """Sites that run for some batches alone, twins that read one tensor, a product of activations, residual adds."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)
        self.large, self.small = Mlp(), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x) + self.two(x)
        y = y @ y.transpose(-1, -2) @ y * 0.01
        return self.large(y) if x.abs().max() > 5 else self.small(y)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Branches().eval()


def _data(calibrator: str = "") -> list[Tensor]:
    """Batches of many sizes; the second half is larger, so that it runs another branch.

    With ``corrected`` they are of like sizes: no shift of a bias suits very different ones.
    """
    generator = torch.Generator().manual_seed(1)
    sizes = (1.0, 1.0, 1.0, 3.0, 3.0, 3.0) if calibrator == "corrected" else (0.1, 0.5, 1.0, 4.0, 3.0, 100.0)
    return [torch.randn(2, 8, 32, generator=generator) * size for size in sizes]


def _tensors(plan: Plan) -> dict[str, Tensor]:
    """All numbers of a plan; the texts as one tensor of bytes."""
    found: dict[str, Tensor] = {}
    texts = []
    for path, entry in plan.items():
        texts.append([path, entry.kind, entry.quantized, entry.reason, entry.multiply_adds, list(entry.reads)])
        if entry.bias_shift is not None:
            found[f"{path}.bias_shift"] = entry.bias_shift.clone()
        for operand in entry.operands:
            name = f"{path}.{operand.name}"
            texts.append(
                [name, operand.quantized, operand.reason, operand.range_group, operand.estimate, operand.group]
            )
            numbers = (operand.minimum, operand.maximum, operand.sqnr_db, operand.clipped)
            texts.append([name, *map(repr, numbers), operand.axis, operand.parameter, operand.estimate])
            for field in ("amax", "scale"):
                if getattr(operand, field) is not None:
                    found[f"{name}.{field}"] = getattr(operand, field).clone()
    found["texts"] = torch.tensor(list(json.dumps(texts).encode()), dtype=torch.uint8)
    return found


def _texts(tensors: dict[str, Tensor]) -> Any:
    return json.loads(bytes(tensors["texts"].tolist()))


def _assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert _texts(found) == _texts(expected)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def _quantizer(calibrator: str) -> Quantizer:
    corrected = calibrator == "corrected"
    return Quantizer(preset="plain", backend="openvino", activations=CALIBRATORS[calibrator], bias_correction=corrected)


# -- two processes -----------------------------------------------------------------------------------------------------


def _start(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)


def _leave() -> None:
    # Together: gloo may abort a process whose peer is gone while its threads end.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _calibrate_half(rank: int, folder: str) -> None:
    _start(rank, folder)
    for name in CALIBRATORS:
        model, q = _model(), _quantizer(name)
        q.calibrate(model, _data(name)[:3] if rank == 0 else _data(name)[3:])
        save_file(_tensors(q.plan), f"{folder}/{name}-{rank}.safetensors")
    assert q.coverage.multiply_adds > 0
    q.save(f"{folder}/saved-{rank}")
    # More data for one of them alone, after a load that must count once.
    loaded = Quantizer.load(f"{folder}/saved-{rank}")
    loaded.calibrate(model, [_data()[0] * 7] if rank == 1 else [], resume=True)
    save_file(_tensors(loaded.plan), f"{folder}/resumed-{rank}.safetensors")
    _leave()


def _calibrate_in_place(rank: int, folder: str) -> None:
    _start(rank, folder)
    with QATCalibrate(method="mse", backend="openvino") as qat:
        model = _model()
        qat.setup_model_qat(model)
        with torch.no_grad():
            for x in _data()[rank::2]:
                model(x)
    sites = {name: value for name, value in model.state_dict().items() if name.endswith("scale")}
    save_file({name: value.clone() for name, value in sites.items()}, f"{folder}/{rank}.safetensors")
    _leave()


def _disagree(rank: int, folder: str) -> None:
    _start(rank, folder)
    q = _quantizer("max" if rank == 0 else "mse")
    q.calibrate(_model(), _data()[rank::2])
    with pytest.raises(CalibrationError, match="rank 1 calibrates with another configuration than rank 0"):
        _ = q.plan
    nothing = _quantizer("max")
    nothing.calibrate(_model(), [])
    with pytest.raises(CalibrationError, match="nothing was calibrated yet"):
        _ = nothing.plan
    # What is told may be of any length, or empty.
    assert all_gather_bytes(b"ab" * rank) == [b"", b"ab"]
    assert all_gather_bytes(b"") == [b"", b""]
    assert all_reduce_sum([0.25, rank]) == [0.5, 1.0]
    assert all_reduce_sum([]) == []
    _leave()


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each of two processes decided, each from its half of the data."""
    folder = tmp_path_factory.mktemp("halves")
    run_ranks(_calibrate_half, folder)
    return folder


@pytest.mark.parametrize("calibrator", some_daily(tuple(CALIBRATORS), 4))
def test_two_ranks_decide_what_one_process_does(halves: Path, calibrator: str) -> None:
    first, second = (load_file(halves / f"{calibrator}-{rank}.safetensors") for rank in range(2))
    _assert_same(first, second)
    q = _quantizer(calibrator)
    q.calibrate(_model(), _data(calibrator))
    _assert_same(first, _tensors(q.plan))
    assert any(name.endswith("bias_shift") for name in first) == (calibrator == "corrected")
    # The halves have not the same ranges, nor the same sites.
    half = _quantizer(calibrator)
    half.calibrate(_model(), _data(calibrator)[:3])
    assert not torch.equal(
        first["one.forward.linear_0.input.amax"], _tensors(half.plan)["one.forward.linear_0.input.amax"]
    )
    assert half.plan["large.up.forward.linear_0"].reason == "never ran in calibration"
    assert q.plan["large.up.forward.linear_0"].quantized
    assert q.plan["small.forward.linear_0"].quantized


def test_a_load_counts_once(halves: Path) -> None:
    first, second = (load_file(halves / f"resumed-{rank}.safetensors") for rank in range(2))
    _assert_same(first, second)
    whole = {row[0]: row for row in _texts(load_file(halves / "auto-0.safetensors")) if len(row) == 6}
    more = {row[0]: row for row in _texts(first) if len(row) == 6}
    # Seven batches of equal size instead of six.
    assert more["one.forward.linear_0"][4] * 6 == whole["one.forward.linear_0"][4] * 7


def test_both_ranks_save_the_same(halves: Path) -> None:
    assert {
        path.name: path.read_bytes() == (halves / "saved-1" / path.name).read_bytes()
        for path in (halves / "saved-0").iterdir()
    } == dict.fromkeys((".quantizer.json", "quantizer.yaml", "ranges.safetensors", "observed.safetensors"), True)


def test_in_place(tmp_path: Path) -> None:
    run_ranks(_calibrate_in_place, tmp_path)
    first, second = (load_file(tmp_path / f"{rank}.safetensors") for rank in range(2))
    q = Quantizer(preset="plain", backend="openvino", activations={"calibrator": "mse"})
    q.calibrate(_model(), _data())
    scales = {f"{path}.{o.name}": o.scale for path, entry in q.plan.items() for o in entry.operands if o.quantized}
    assert len(first) == len(scales) > 8
    assert first.keys() == second.keys()
    assert all(torch.equal(second[name], value) for name, value in first.items())
    found = sorted(float(value.max()) for value in first.values())
    assert found == sorted(float(scale.max()) for scale in scales.values() if scale is not None)


def test_ranks_that_do_not_agree(tmp_path: Path) -> None:
    run_ranks(_disagree, tmp_path)


def test_what_ranks_saw_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    data = [torch.randn(64) * size for size in (1.0, 9.0, 3.0)]
    mine, theirs, expected = (make_calibrator("percentile", histogram=True) for _ in range(3))
    for calibrator, batches in ((mine, data[:1]), (theirs, data[1:]), (expected, data)):
        for values in batches:
            calibrator.observe(values)
    sent: list[bytes] = []
    monkeypatch.setattr(snapshot, "get_world_size", lambda: 2)
    monkeypatch.setattr(snapshot, "all_gather_bytes", lambda data: [sent.append(data) or data])
    snapshot.add_over_ranks([theirs])
    monkeypatch.setattr(snapshot, "all_gather_bytes", lambda data: [data, *sent])
    snapshot.add_over_ranks([mine])
    assert (mine.minimum, mine.maximum, mine.count) == (expected.minimum, expected.maximum, expected.count)
    assert mine.estimate() == expected.estimate()


# -- going on after a load ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calibrator", [name for name in CALIBRATORS if name not in RUN_AGAIN])
def test_a_calibration_goes_on_after_a_load(calibrator: str, tmp_path: Path) -> None:
    model, data = _model(), _data()
    q = _quantizer(calibrator)
    q.calibrate(model, data[:3])
    loaded = Quantizer.load(q.save(tmp_path / "state"))
    again = Quantizer.load(loaded.save(tmp_path / "again"))  # saved as it was loaded
    again.calibrate(model, data[3:], resume=True)
    whole = _quantizer(calibrator)
    whole.calibrate(model, data)
    _assert_same(_tensors(again.plan), _tensors(whole.plan))
    assert str(again.coverage) == str(whole.coverage)
    assert torch.equal(again.quantize(model)(data[4]), whole.quantize(model)(data[4]))


@pytest.mark.parametrize("calibrator", ["auto", "percentiles"])
def test_chosen_ranges_stay_until_more_data_comes(calibrator: str, tmp_path: Path) -> None:
    model, data = _model(), _data()
    q = _quantizer(calibrator)
    q.calibrate(model, data[:5])
    loaded = Quantizer.load(q.save(tmp_path / "state"))
    proxy = loaded.calib(model, resume=True)
    _assert_same(_tensors(loaded.plan), _tensors(q.plan))
    proxy(data[5])
    row = next(row for row in loaded.ranges if row.name == "one.forward.linear_0.input")
    assert row.maximum == max(float(x.max()) for x in data)


def _convolutions() -> nn.Module:
    return net("y = self.first(x); return self.last(y.relu()) + y", first=nn.Conv2d(3, 8, 3), last=nn.Conv2d(8, 8, 1))


def _in_a_row() -> nn.Module:
    model = net("self.last(self.first(x).relu())", first=nn.Conv2d(3, 8, 3), last=nn.Conv2d(8, 8, 1))
    with torch.no_grad():
        model.first.weight.mul_(torch.logspace(0, 3, 8).reshape(-1, 1, 1, 1))
    return model


def _experts() -> nn.Module:
    ends = torch.tensor([2, 4], dtype=torch.int32)
    return net("F.grouped_mm(x[0, 0], self.up, offs=self.ends)", up=nn.Parameter(torch.randn(2, 16, 16)), ends=ends)


SEEN: dict[str, tuple[Any, tuple[int, ...], dict[str, Any]]] = {
    "calls": (lambda: net("self.layer(x), self.layer(x * 20)", layer=nn.Linear(16, 16)), (2, 3, 4, 16), {}),
    "a computed weight": (
        lambda: net(
            "F.linear(x, self.weight * self.mask)", weight=nn.Parameter(torch.randn(16, 16)), mask=torch.rand(16, 16)
        ),
        (2, 3, 4, 16),
        {},
    ),
    "more calls in some batches": (
        lambda: net("y = self.layer(x); return self.layer(y * 20) if len(x) > 2 else y", layer=nn.Linear(16, 16)),
        (2, 3, 4, 16),
        {},
    ),
    "results of convolutions": (_convolutions, (2, 3, 16, 16), {"backend": "onnxruntime"}),
    "layers in a row": (
        _in_a_row,
        (2, 3, 16, 16),
        {"backend": "onnxruntime", "weights": {"granularity": "per_tensor"}, "activations": {"smoothquant_alpha": 0.5}},
    ),
    "experts": (_experts, (1, 1, 4, 16), {}),
    "smoothed": (
        lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)),
        (2, 3, 4, 16),
        {"activations": {"calibrator": "max", "smoothquant_alpha": 0.5}},
    ),
}


def _moved(plan: Plan) -> list[Any]:
    """What of a plan comes from sites beside its own: which it follows, and what they move into each other."""
    operands = [operand for entry in plan.values() for operand in entry.operands]
    return [[list(entry.follows) for entry in plan.values()], [(o.smooth, o.smooth_axis, o.spread) for o in operands]]


@pytest.mark.parametrize("name", SEEN)
def test_all_that_was_seen_goes_on(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, shape, settings = SEEN[name]
    model, data = make().eval(), [torch.randn(rows, *shape[1:]) for rows in (shape[0], 3, shape[0])]
    q, whole = (Quantizer(**{"preset": "plain", "backend": "openvino", **settings}) for _ in range(2))
    q.calibrate(model, data[:2])
    folder = q.save(tmp_path / "state")
    loaded = Quantizer.load(folder)
    loaded.calib(model, resume=True)
    _assert_same(_tensors(loaded.plan), _tensors(q.plan))
    assert_same(_moved(loaded.plan), _moved(q.plan))
    seen, again = (load_file(one / "observed.safetensors") for one in (folder, loaded.save(tmp_path / "again")))
    assert_same(again["counts"], seen["counts"])
    sizes = snapshot.seen_inputs((folder / "observed.safetensors").read_bytes())
    assert [size[0] for ((_, _, size),) in sizes] == [shape[0], 3]
    assert json.loads(bytes(again["document"].tolist())) == json.loads(bytes(seen["document"].tolist()))
    if name == "layers in a row":
        # What they move is measured on batches that are run again, which a folder does not hold.
        return
    loaded.calibrate(model, data[2:], resume=True)
    whole.calibrate(model, data)
    _assert_same(_tensors(loaded.plan), _tensors(whole.plan))
    assert str(loaded.coverage) == str(whole.coverage)
    assert_same(_moved(loaded.plan), _moved(whole.plan))


def test_results_that_another_target_does_not_quantize_are_forgotten(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = _convolutions().eval(), [torch.randn(4, 3, 16, 16)]
    q = Quantizer(preset="plain", backend="onnxruntime")
    q.calibrate(model, data)
    assert any(entry.kind == "output" for entry in q.plan.values())
    again = Quantizer.load(q.save(tmp_path / "state")).for_backend("openvino")
    again.calib(model, resume=True)
    assert not any(entry.kind == "output" for entry in again.plan.values())
    seen = load_file(again.save(tmp_path / "again") / "observed.safetensors")
    groups = json.loads(bytes(seen["document"].tolist()))["groups"]
    assert not [name for group in groups for name in group["operands"] if ".output." in name]


def test_without_resume_it_starts_afresh(tmp_path: Path) -> None:
    model, data = _model(), _data()
    q = _quantizer("mse")
    q.calibrate(model, data)
    loaded = Quantizer.load(q.save(tmp_path / "state"))
    loaded.calibrate(model, data[:2])
    fresh = _quantizer("mse")
    fresh.calibrate(model, data[:2])
    _assert_same(_tensors(loaded.plan), _tensors(fresh.plan))


def test_views_of_weights_and_convolutions_go_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = (
        net(
            "y = self.net(x)[:, :10]; return torch.cat([y @ part.t() for part in self.packed.chunk(2)], 1)",
            packed=nn.Parameter(torch.randn(64, 10)),
            net=ConvNet(),
        ).eval(),
        [torch.randn(2, 3, 16, 16) for _ in range(2)],
    )
    q, whole = _quantizer("entropy"), _quantizer("entropy")
    q.calibrate(model, data[:1])
    loaded = Quantizer.load(q.save(tmp_path / "state"))
    loaded.calibrate(model, data[1:], resume=True)
    whole.calibrate(model, data)
    _assert_same(_tensors(loaded.plan), _tensors(whole.plan))


def test_scales_that_were_loaded_end_when_calibration_goes_on(tmp_path: Path) -> None:
    model, data = _model(), _data()
    q, whole = _quantizer("max"), _quantizer("max")
    q.calibrate(model, data[:3])
    q.load_scales({"one.forward.linear_0.input": torch.tensor(9.0)})
    loaded = Quantizer.load(q.save(tmp_path / "state"))
    assert loaded.scales()["one.forward.linear_0.input"] == 9
    whole.calibrate(model, data)
    for each in (q, loaded):
        each.calibrate(model, data[3:], resume=True)
        _assert_same(_tensors(each.plan), _tensors(whole.plan))


def test_the_histograms_are_small(tmp_path: Path) -> None:
    q = _quantizer("mse")
    q.calibrate(_model(), _data())
    size = (q.save(tmp_path / "state") / "observed.safetensors").stat().st_size
    groups = {o.range_group for entry in q.plan.values() for o in entry.operands if o.range_group is not None}
    assert size < len(groups) * BINS * 8 + 40_000


def test_another_model_cannot_go_on(tmp_path: Path) -> None:
    q = _quantizer("max")
    q.calibrate(_model(), _data())
    loaded = Quantizer.load(q.save(tmp_path / "state"))
    with pytest.raises(CalibrationError, match=r"belong to another model: \d+ sites differ, the first is"):
        loaded.calib(Mlp().eval(), resume=True)


def test_a_folder_without_histograms(tmp_path: Path) -> None:
    q = _quantizer("max")
    q.calibrate(_model(), _data())
    folder = q.save(tmp_path / "state")
    (folder / "observed.safetensors").unlink()
    loaded = Quantizer.load(folder)
    assert loaded.scales()
    with pytest.raises(CalibrationError, match=r"calib\(resume=True\) needs an earlier .* or a loaded folder"):
        loaded.calib(_model(), resume=True)


DAMAGE: dict[str, dict[str, Tensor] | bytes] = {
    "no file": b"none of it",
    "no document": {"counts": torch.zeros(1, BINS, dtype=torch.int64)},
    "no json": {"counts": torch.zeros(1, BINS, dtype=torch.int64), "document": torch.zeros(3, dtype=torch.uint8)},
    "other bins": {"counts": torch.zeros(1, 7, dtype=torch.int64), "document": torch.tensor([123, 125]).byte()},
    "empty": {"counts": torch.zeros(1, BINS, dtype=torch.int64), "document": torch.tensor([123, 125]).byte()},
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_histograms(damage: dict[str, Tensor] | bytes, tmp_path: Path) -> None:
    q = _quantizer("max")
    q.calibrate(_model(), _data())
    folder = q.save(tmp_path / "state")
    forget_checksums(folder)
    if isinstance(damage, bytes):
        (folder / "observed.safetensors").write_bytes(damage)
    else:
        save_file(damage, folder / "observed.safetensors")
    loaded = Quantizer.load(folder)  # what is decided is whole
    assert loaded.scales()
    with pytest.raises(QuantizerError, match="the saved statistics are damaged"):
        loaded.calib(_model(), resume=True)
