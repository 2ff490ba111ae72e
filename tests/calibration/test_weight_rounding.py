"""``weights.rounding: gptq``: whose inputs a weight is rounded for, what it gains, and what ends its codes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from calibrated import make_calibrated
from helpers import assert_same, batch, tiny
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from toy_nets import linear, net

from quantizer import QATCalibrate, Quantizer
from quantizer.algorithms import algorithm as progress
from quantizer.algorithms import gptq
from quantizer.errors import CalibrationError, ConfigError, QuantizerError
from quantizer.numerics.weight_codes import gptq_codes
from quantizer.observe.replay_batches import ReplayBatches
from quantizer.plan.site_plan import OperandPlan
from quantizer.plan.weight_scales import without_codes

INT4 = {"weights": "int4", "activations": "float"}
WEIGHTS: dict[str, Any] = {"backend": "onnxruntime", "formats": [INT4], "sites": {"residual_add": False}}
BLOCKS = {**WEIGHTS, "formats": [{**INT4, "block_size": 8}]}
INT8 = {"backend": "onnxruntime", "sites": {"residual_add": False}, "activations": {"calibrator": "max"}}
GAIN_DB = 2.0
"""What it adds at least to the SQNR of the output, on rows of the same kind; measured: 3 to 6."""


class Net(nn.Module):
    """Three linears that read one tensor, and two more behind them: [rows, 32] to [rows, 24]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 24)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.query(x)) * torch.tanh(self.key(x)) + self.value(x)
        return self.down(F.gelu(self.up(y)))


def data(batches: int = 2, rows: int = 400, seed: int = 0) -> list[Tensor]:
    """Rows with strongly correlated columns, as those of trained networks are."""
    mix = torch.randn(32, 32, generator=torch.Generator().manual_seed(99)) * torch.logspace(0, -1.5, 32)[:, None]
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 32, generator=generator) @ mix for _ in range(batches)]


def rounded(model: nn.Module, batches: list[Any] | None = None, **config: Any) -> Quantizer:
    weights = {"rounding": "gptq", **config.pop("weights", {})}
    return make_calibrated(
        model.eval(), data() if batches is None else batches, weights=weights, **{**WEIGHTS, **config}
    )


def operand(q: Quantizer, site: str, name: str = "weight") -> OperandPlan:
    return next(entry for entry in q.plan[f"{site}.forward.linear_0"].operands if entry.name == name)


def codes(q: Quantizer, site: str) -> Tensor:
    found = operand(q, site).codes
    assert found is not None
    return found


def same_codes(first: Quantizer, second: Quantizer, *sites: str) -> bool:
    return all(torch.equal(codes(first, site), codes(second, site)) for site in sites)


def nearest(q: Quantizer, model: nn.Module, site: str) -> Tensor:
    """The codes of rounding to nearest, per channel."""
    planned = operand(q, site)
    assert planned.scale is not None
    return (model.get_submodule(site).weight.detach() / planned.scale[:, None]).round().clamp(-8, 7)


@torch.no_grad()
def sqnr_db(model: nn.Module, q: Quantizer, x: Tensor) -> float:
    expected, found = model(x), q.quantize(model)(x)
    return 10 * math.log10(float(expected.square().sum() / (found - expected).square().sum()))


# -- what it gains, and for whose inputs ---------------------------------------------------------------------------


@pytest.mark.parametrize("config", [WEIGHTS, BLOCKS])
@pytest.mark.parametrize("order", [False, True])
def test_the_output_comes_nearer_to_the_float_one(config: dict[str, Any], order: bool) -> None:
    model, x = Net().eval(), data(1, seed=7)[0]
    usual = sqnr_db(model, make_calibrated(model, data(), **config), x)
    assert sqnr_db(model, rounded(model, weights={"act_order": order}, **config), x) > usual + GAIN_DB


@torch.no_grad()
def test_a_weight_is_rounded_for_the_inputs_that_it_will_have() -> None:
    """Those of the model with everything before it quantized, and rounded themselves."""
    model = nn.Sequential(nn.Linear(32, 40), nn.GELU(), nn.Linear(40, 16)).eval()
    q = rounded(model, **{**INT8, "backend": "tensorrt", "formats": [], "fallback_dtype": "float32"})
    x = torch.cat(data())
    for site in ("0", "2"):
        scale = operand(q, site, "input").scale
        weight = operand(q, site)
        assert scale is not None
        assert weight.scale is not None
        x = (x / scale).round().clamp(-128, 127) * scale
        values, steps = model.get_submodule(site).weight, weight.scale[:, None]
        expected = gptq_codes(values, (x.T @ x).double(), steps, -128, 127, rows=len(x))
        assert expected is not None
        assert (codes(q, site) != expected).float().mean() < 0.01  # sums in another order
        assert (codes(q, site) != (values / steps).round()).float().mean() > 0.1
        x = F.gelu(F.linear(x, codes(q, site) * weight.scale[:, None], model.get_submodule(site).bias))


@torch.no_grad()
def test_smoothed_weights_are_rounded_as_they_are_stored() -> None:
    model = nn.Sequential(nn.Linear(32, 40)).eval()
    q = rounded(model, **{**INT8, "formats": [], "activations": {"calibrator": "max", "smoothquant_alpha": 0.5}})
    activation, weight = operand(q, "0", "input"), operand(q, "0")
    assert activation.smooth is not None
    assert activation.scale is not None
    assert weight.scale is not None
    x = torch.cat(data()) * activation.smooth.reciprocal()
    x = (x / activation.scale).round().clamp(-128, 127) * activation.scale
    expected = gptq_codes(
        model[0].weight * activation.smooth, (x.T @ x).double(), weight.scale[:, None], -128, 127, rows=len(x)
    )
    assert expected is not None
    assert (codes(q, "0") != expected).float().mean() < 0.01


def test_what_reads_one_tensor_shares_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    units: list[list[str]] = []
    original = gptq._rounded

    def noted(unit: Any, *rest: Any) -> Any:
        units.append([one.site.host_path for one in unit])
        return original(unit, *rest)

    monkeypatch.setattr(gptq, "_rounded", noted)
    _ = rounded(Net()).plan
    assert units == [["query", "key", "value"], ["up"], ["down"]]


def tokens() -> nn.Module:
    torch.manual_seed(0)
    return net(
        "self.layer(self.table(input_ids))", "input_ids, attention_mask", table=nn.Embedding(50, 32), layer=linear()
    )


def test_padding_is_left_out() -> None:
    ids, mask = torch.randint(1, 50, (6, 40)), torch.ones(6, 40, dtype=torch.int64)
    short = {"input_ids": ids, "attention_mask": mask}
    long = {"input_ids": F.pad(ids, (0, 24), value=49), "attention_mask": F.pad(mask, (0, 24))}
    uneven = {name: torch.cat([short[name], values[:, :40]]) for name, values in long.items()}
    uneven["attention_mask"][6:, 20:] = 0
    plain, padded = (rounded(tokens(), [batches]) for batches in (short, long))
    assert same_codes(plain, padded, "layer")
    shown = {**long, "attention_mask": torch.ones_like(long["attention_mask"])}
    assert not same_codes(plain, rounded(tokens(), [shown]), "layer")


def images_net() -> nn.Module:
    torch.manual_seed(0)
    return net(
        "self.last(F.relu(self.third(F.relu(self.second(F.relu(self.first(x)))))))",
        first=nn.Conv2d(3, 16, 3, padding=1),
        second=nn.Conv2d(16, 32, 3, stride=2, groups=4),
        third=nn.Conv2d(32, 32, 3, padding=1, groups=32, padding_mode="circular"),
        last=nn.ConvTranspose2d(32, 8, 2),
    )


def test_convolutions_and_their_groups() -> None:
    def images(seed: int) -> Tensor:
        smooth = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
        return F.interpolate(smooth, scale_factor=4, mode="bilinear")

    model = images_net().eval()
    q = rounded(model, [images(0), images(1)])
    reasons = {path.partition(".")[0]: entry.reason for path, entry in q.plan.items() if entry.quantized}
    assert all("weight: gptq, 0." in reasons[name] for name in ("first", "second", "third"))
    assert "weight: rounded to nearest: its operation is conv_transpose2d" in reasons["last"]
    rest = {**WEIGHTS, "exclude": {"names": ["last"]}}
    usual = make_calibrated(model, [images(0), images(1)], **rest)
    q = rounded(model, [images(0), images(1)], **rest)
    assert sqnr_db(model, q, images(5)) > sqnr_db(model, usual, images(5)) + GAIN_DB


# -- where the nearest codes stay ----------------------------------------------------------------------------------


def test_a_weight_that_two_sites_store_is_rounded_to_nearest() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.tanh(self.one(x)))

    q = rounded(Tied())
    for site in ("one", "two"):
        assert operand(q, site).codes is None
        assert (
            "weight: rounded to nearest: other sites use the same weight" in q.plan[f"{site}.forward.linear_0"].reason
        )


def test_inputs_that_are_independent_keep_the_nearest_codes() -> None:
    model = nn.Sequential(nn.Linear(32, 8)).eval()
    weights = {"calibrator": "mse"}
    q = rounded(model, [torch.eye(32)], weights=weights)
    assert operand(q, "0").rounding == "rounded to nearest: gptq does not reduce the error"
    assert_same(
        q.quantize(model)(torch.eye(32)),
        make_calibrated(model, [torch.eye(32)], weights=weights, **WEIGHTS).quantize(model)(torch.eye(32)),
    )


@pytest.mark.parametrize("config", [WEIGHTS, BLOCKS])
def test_the_range_of_int4_is_a_share_of_the_maximum(config: dict[str, Any]) -> None:
    model = Net().eval()
    with torch.no_grad():
        # One value of each row decides for all others if the range is the largest of them.
        model.query.weight[:, 3] = 5 * model.query.weight.abs().amax(1)
    largest = operand(make_calibrated(model, data(), **config), "query").amax
    chosen = operand(rounded(model, **config), "query")
    assert largest is not None
    assert chosen.amax is not None
    assert chosen.scale is not None
    assert float((chosen.amax / largest).min()) < 0.9
    assert float((chosen.amax / largest).max()) < 1.1
    assert_same(chosen.scale, chosen.amax / 7)


def test_a_calibrator_of_weights_keeps_its_range_of_int4() -> None:
    model = Net().eval()
    for weights in ({"calibrator": "mse"}, {"calibrator": "percentile", "percentile": 97}):
        wanted = operand(make_calibrated(model, data(), **WEIGHTS, weights=weights), "query").amax
        found = operand(rounded(model, **{**WEIGHTS, "weights": weights}), "query").amax
        assert wanted is not None
        assert found is not None
        assert float((found / wanted - 1).abs().max()) < 0.1


@torch.no_grad()
def test_outputs_of_int4_are_as_large_as_in_float() -> None:
    """What the float output predicts of the rounded one is the float output, channel by channel."""
    model, x = nn.Sequential(nn.Linear(32, 24)).eval(), torch.cat(data())
    for weights in ({}, {"calibrator": "mse"}):
        y = model(x)
        z = rounded(model, **{**WEIGHTS, "weights": weights, "bias_correction": False}).quantize(model)(x)
        y, z = y - y.mean(0), z - z.mean(0)
        torch.testing.assert_close((y * z).sum(0) / (y * y).sum(0), torch.ones(24), atol=1e-3, rtol=0)


def test_fp8_has_no_whole_numbers() -> None:
    q = rounded(nn.Sequential(nn.Linear(32, 32)), backend="tensorrt", dtype="fp8", formats=[])
    assert operand(q, "0").rounding == "rounded to nearest: gptq applies to integer formats, not to fp8"


def test_a_branch_that_no_kept_batch_takes_is_rounded_to_nearest() -> None:
    found = None
    for seed in range(30):
        q = rounded(
            net("self.always(x) + (self.rarely(x * 2) if len(x) == 7 else 0)", always=linear(), rarely=linear()),
            [*data(8, 200, seed), torch.randn(7, 32)],
        )
        found = operand(q, "rarely").rounding
        if found == "rounded to nearest: no stored batch reaches it":
            break
    assert found == "rounded to nearest: no stored batch reaches it"
    assert operand(q, "always").codes is not None


def test_the_largest_code_of_a_target_is_kept_to() -> None:
    q = rounded(Net(), **{**INT8, "backend": "onnxruntime-avx2", "formats": []})
    bound = q.config.target.weight_qmax
    assert bound is not None
    for site in ("query", "up", "down"):
        assert int(codes(q, site).abs().max()) <= bound


# -- passes --------------------------------------------------------------------------------------------------------


class Deep(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(layers))
        self.computed = 0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_a_module_that_ended_is_not_computed_again() -> None:
    model, calls = Deep(8), 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    model.layers[0][1].register_forward_hook(count)
    q = rounded(model, data(2))
    before = calls
    _ = q.plan
    # By batch: once to find the order, once for the second layer, and no more for the six that follow.
    assert calls - before == 2 * 2


def test_a_model_that_changes_tensors_in_place_is_rounded_alike() -> None:
    class InPlace(Deep):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            for layer in self.layers:
                x += layer(x)
            return x

    plain, in_place = rounded(Deep(4)), rounded(InPlace(4))
    assert same_codes(plain, in_place, *(f"layers.{place}.0" for place in range(4)))


def test_a_layer_that_runs_several_times_is_rounded_for_all_its_inputs() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = F.gelu(self.layer(x)) + x
            return x

    model, x = Loop().eval(), data(1, seed=7)[0]
    assert sqnr_db(model, rounded(model), x) > sqnr_db(model, make_calibrated(model, data(), **WEIGHTS), x)


def test_an_interrupt_leaves_nothing_half_and_the_next_call_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model, original, done = Net().eval(), gptq._best, []
    whole, q = rounded(model), rounded(model)

    def interrupted(one: Any, *rest: Any) -> Any:
        if one.site.host_path == "up":
            raise KeyboardInterrupt
        return original(one, *rest)

    def noted(one: Any, *rest: Any) -> Any:
        done.append(one.site.host_path)
        return original(one, *rest)

    monkeypatch.setattr(gptq, "_best", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _ = q.plan
    monkeypatch.setattr(gptq, "_best", noted)
    assert same_codes(q, whole, "query", "key", "value", "up", "down")
    assert done[:2] == ["up", "down"]
    assert_same(q.quantize(model)(data()[0]), whole.quantize(model)(data()[0]))


def test_an_interrupted_choice_is_made_anew_after_more_data(monkeypatch: pytest.MonkeyPatch) -> None:
    model, original = Net().eval(), gptq._best
    q = rounded(model)

    def interrupted(one: Any, *rest: Any) -> Any:
        if one.site.host_path == "up":
            raise KeyboardInterrupt
        return original(one, *rest)

    monkeypatch.setattr(gptq, "_best", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _ = q.plan
    monkeypatch.setattr(gptq, "_best", original)
    more = data(1, seed=3)
    q.calibrate(model, more, resume=True, progress=False)
    assert same_codes(q, rounded(model, data() + more), "query", "up", "down")


# -- the plan ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [WEIGHTS, BLOCKS, INT8])
def test_a_folder_holds_the_codes(config: dict[str, Any], tmp_path: Path) -> None:
    rounded(Net(), **{"formats": [], **config}).save(tmp_path / "saved")
    held = load_file(tmp_path / "saved" / "ranges.safetensors")["up.forward.linear_0/weight/codes"]
    packed = config is not INT8
    assert (held.dtype, tuple(held.shape)) == ((torch.uint8, (48, 16)) if packed else (torch.int8, (48, 32)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda codes: codes[:-1], r"codes: the shape \[47, 32\] does not fit scales \[48\] along axis 0"),
        (lambda codes: codes.float(), "codes: expected a tensor of torch.int8, got torch.float32"),
        (lambda codes: codes + 9, "codes: expected -8 to 7, got "),
        (lambda codes: codes.sum().to(torch.int8), r"codes: the shape \[\] does not fit"),
    ],
)
def test_damaged_codes_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    folder = rounded(Net()).save(tmp_path / "saved")
    tensors = load_file(folder / "ranges.safetensors")
    name = "up.forward.linear_0/weight/codes"
    low, high = (tensors[name] & 15).to(torch.int8), (tensors[name] >> 4).to(torch.int8)
    tensors[name] = change(torch.stack([low, high], -1).flatten(1).sub(8))
    save_file(tensors, folder / "ranges.safetensors")
    document = yaml.safe_load((folder / "quantizer.yaml").read_text())
    del document["sha256"]
    (folder / "quantizer.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    with pytest.raises(QuantizerError, match=message):
        Quantizer.load(folder)


def test_a_folder_from_before_there_were_codes_is_read(tmp_path: Path) -> None:
    model, x = Net().eval(), data(1, seed=7)[0]
    q = make_calibrated(model, data(), **WEIGHTS)
    folder = q.save(tmp_path / "saved")
    document = yaml.safe_load((folder / "quantizer.yaml").read_text())
    for site in document["sites"]:
        for entry in site["operands"]:
            del entry["rounding"]
    for key in ("rounding", "act_order"):
        del document["config"]["weights"][key]
    (folder / "quantizer.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    with torch.no_grad():
        assert_same(Quantizer.load(folder).quantize(model)(x), q.quantize(model)(x))


def test_another_parameter_object_of_the_same_values_has_the_same_codes() -> None:
    model = Net().eval()
    q = rounded(model, bias_correction=True)
    before = q.plan
    model.up.weight = nn.Parameter(model.up.weight.detach().clone())
    q.calib(model, resume=True)
    for path, entry in before.items():
        again = q.plan[path]
        assert again.reason == entry.reason
        for one, other in zip(entry.operands, again.operands, strict=True):
            assert (one.codes is None) == (other.codes is None)
            assert one.codes is None or other.codes is None or torch.equal(one.codes, other.codes)


def test_a_weight_that_is_tied_no_more_is_seen() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.tanh(self.one(x)))

    model, x = Tied().eval(), data(1)[0]
    q = rounded(model)
    model.two.weight = nn.Parameter(-model.one.weight.detach())
    proxy = q.calib(model, resume=True)
    assert torch.equal(proxy(x), model(x))


def test_weights_that_changed_are_rounded_to_nearest() -> None:
    model = Net().eval()
    q = rounded(model)
    assert same_codes(q, rounded(model), "up")
    with torch.no_grad():
        model.up.weight[0, 0] += 0.01
    usual = make_calibrated(model, data(), **WEIGHTS)
    with (
        pytest.warns(UserWarning, match="1 of 10 parameters changed since the calibration"),
        pytest.warns(
            UserWarning, match="1 weights changed since their integers were chosen and are rounded to nearest"
        ),
    ):
        frozen: Any = q.quantize(model)
    expected: Any = usual.quantize(model)
    assert torch.equal(frozen.up.weight, expected.up.weight)
    assert not torch.equal(frozen.down.weight, expected.down.weight)


def test_training_starts_from_the_nearest_codes() -> None:
    model, x = Net().eval(), data(1, seed=7)[0]
    q = rounded(model)
    trained = q.qat(model)
    usual = make_calibrated(model, data(), **WEIGHTS).qat(model)
    assert_same(trained(x), usual(x))
    trained(x).square().sum().backward()
    assert model.up.weight.grad is not None
    assert bool(model.up.weight.grad.any())
    assert operand(q, "up").codes is None
    assert_same(q.quantize(model)(x), usual.eval()(x))


def test_codes_that_end_leave_the_note_on_the_bias() -> None:
    q = Quantizer(preset="accurate", backend="openvino", sites={"residual_add": False})
    q.calibrate(Net().eval(), data(), progress=False)
    before = [entry for entry in q.plan.values() if any(o.codes is not None for o in entry.operands)]
    assert before
    for entry in without_codes(q.plan, "for a test").values():
        assert entry.bias_note is None or entry.bias_note in entry.reason
        assert all(operand.codes is None for operand in entry.operands)


def test_training_without_a_calibration_rounds_float_weights() -> None:
    model, x = Net(), data(1, seed=7)[0]
    proxy = Quantizer(weights={"rounding": "gptq"}, **WEIGHTS).qat(model)
    for _ in range(2):
        proxy(x).square().sum().backward()
    assert bool(model.up.weight.grad.any())


def test_a_scale_that_is_loaded_ends_the_codes_of_its_weight() -> None:
    model = Net().eval()
    q = rounded(model)
    name = "up.forward.linear_0.weight"
    q.load_scales({name: q.scales()[name] * 1.1})
    assert operand(q, "up").codes is None
    assert operand(q, "up").rounding is None
    assert operand(q, "down").codes is not None
    frozen: Any = q.quantize(model)
    scale = operand(q, "up").scale
    assert scale is not None
    assert torch.equal(frozen.up.weight, (model.up.weight / scale[:, None]).round().clamp(-8, 7) * scale[:, None])


def test_a_folder_keeps_no_batches_for_another_backend(tmp_path: Path) -> None:
    model = Net().eval()
    loaded = Quantizer.load(rounded(model).save(tmp_path / "saved"))
    other = loaded.for_backend("openvino")
    with pytest.raises(CalibrationError, match=r"rounding by data.* a saved folder has none"):
        other.quantize(model)


def test_several_processes_do_not_share_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    q = rounded(Net())
    monkeypatch.setattr(progress, "get_world_size", lambda: 2)
    monkeypatch.setattr(ReplayBatches, "on_every_rank", False)
    with pytest.raises(CalibrationError, match=r"weights\.rounding: gptq needs all inputs of a weight"):
        _ = q.plan


def test_a_model_in_place_keeps_float_weights() -> None:
    with pytest.raises(ConfigError, match=r"weights.rounding: got 'gptq'; expected 'nearest'"):
        QATCalibrate(weights={"rounding": "gptq"})


@pytest.mark.parametrize("value", ["adaround", True, None])
def test_other_roundings_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"weights.rounding: .*'nearest'.*'gptq'"):
        Quantizer(weights={"rounding": value})


# -- files ---------------------------------------------------------------------------------------------------------


def test_a_transformer_is_rounded_and_its_attention_is_left() -> None:
    model = tiny("bert")
    batches = [batch("bert", seed=seed, rows=12, length=16) for seed in range(2)]
    q = rounded(model, batches, backend="onnxruntime", formats=[])
    texts = [entry.reason for entry in q.plan.values() if entry.kind == "linear" and entry.quantized]
    assert texts
    assert all("weight: gptq" in text for text in texts)
    assert not [path for path, entry in q.plan.items() if entry.kind == "matmul" and "gptq" in entry.reason]
