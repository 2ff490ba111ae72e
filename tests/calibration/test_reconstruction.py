"""``weights.rounding: reconstruct``: what it gains, block by block, and what keeps the nearest codes."""

from __future__ import annotations

import logging
import math
from functools import cache
from typing import Any

import pytest
import torch
from calibrated import make_calibrated
from helpers import assert_same, tiny
from torch import Tensor, nn
from torch.nn import functional as F
from toy_nets import net

from quantizer import Quantizer
from quantizer.algorithms import reconstruction
from quantizer.algorithms.reconstruction import LearnedCodes, blocks_of
from quantizer.errors import CalibrationError
from quantizer.plan.site_plan import OperandPlan
from quantizer.proxy.build import build_proxy, sites_of

INT4: dict[str, Any] = {"backend": "onnxruntime", "formats": [{"weights": "int4", "activations": "float"}]}
CLIPPED: dict[str, Any] = {
    "backend": "tensorrt",
    "formats": [],
    "activations": {"calibrator": "percentile", "percentile": 99.0},
}
GAIN_DB = 2.0
"""What it adds at least to the SQNR of the output, on rows of the same kind; measured: 3 to 6."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """Two layers in a list, and a head: [rows, 32] to [rows, 8]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.ModuleList([Layer(), Layer()]), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def data(batches: int = 4, rows: int = 200, seed: int = 0) -> list[Tensor]:
    """Rows with strongly correlated columns, as those of trained networks are."""
    mix = torch.randn(32, 32, generator=torch.Generator().manual_seed(99)) * torch.logspace(0, -1.5, 32)[:, None]
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 32, generator=generator) @ mix for _ in range(batches)]


def reconstructed(model: nn.Module, batches: list[Any] | None = None, **config: Any) -> Quantizer:
    given = {"sites": {"residual_add": False}, "weights": {"rounding": "reconstruct"}, **INT4, **config}
    return make_calibrated(model.eval(), data() if batches is None else batches, **given)


def usual(model: nn.Module, batches: list[Any] | None = None, **config: Any) -> Quantizer:
    return reconstructed(model, batches, **{**config, "weights": {"rounding": "nearest"}})


KINDS: dict[str, dict[str, Any]] = {"int4": {}, "ranges": CLIPPED, "gptq": {"weights": {"rounding": "gptq"}}}


NET = Net().eval()


@cache
def known(kind: str) -> Quantizer:
    """Return a plan of ``NET``, made once for tests that leave both as they are."""
    q = reconstructed(NET, **KINDS[kind])
    _ = q.plan
    return q


def operand(q: Quantizer, site: str, name: str = "weight") -> OperandPlan:
    return next(entry for entry in q.plan[f"{site}.forward.linear_0"].operands if entry.name == name)


def codes(q: Quantizer, site: str) -> Tensor:
    found = operand(q, site).codes
    assert found is not None
    return found


@torch.no_grad()
def sqnr_db(model: nn.Module, q: Quantizer, x: Tensor) -> float:
    expected, found = model(x), q.quantize(model)(x)
    return 10 * math.log10(float(expected.square().sum() / (found - expected).square().sum()))


# -- what it gains -------------------------------------------------------------------------------------------------


def test_the_output_comes_nearer_to_the_float_one() -> None:
    x, q = data(1, seed=7)[0], known("ranges")
    by_product = reconstructed(NET, **CLIPPED, weights={"rounding": "gptq"})
    assert sqnr_db(NET, q, x) > sqnr_db(NET, by_product, x) + GAIN_DB
    text = operand(q, "layers.1.up").rounding
    assert text is not None
    assert text.startswith("reconstruct, block layers.1: 0.")


def test_it_is_never_far_behind_gptq_from_whose_codes_it_starts() -> None:
    """Where those are about the best ones already, no others are taken."""
    x = data(1, seed=7)[0]
    by_product = sqnr_db(NET, known("gptq"), x)
    assert by_product > sqnr_db(NET, usual(NET), x) + GAIN_DB
    assert sqnr_db(NET, known("int4"), x) > by_product - 0.1


@pytest.mark.nightly
def test_ranges_of_symmetric_formats_are_learned_too() -> None:
    """A range that clips one value of a hundred is too small for this model."""
    model, x = Net().eval(), data(1, seed=7)[0]
    q, former = reconstructed(model, **CLIPPED), usual(model, **CLIPPED)
    assert operand(q, "layers.0.up", "input").estimate == "reconstruct"
    learned, given = (operand(one, "layers.0.up", "input").amax for one in (q, former))
    assert learned is not None
    assert given is not None
    assert float(learned) > float(given)
    assert sqnr_db(model, q, x) > sqnr_db(model, former, x) + 0.5


def test_convolutions_are_learned() -> None:
    def images_net() -> nn.Module:
        torch.manual_seed(0)
        return net(
            "self.last(F.relu(self.second(F.relu(self.first(x)))))",
            first=nn.Conv2d(3, 16, 3, padding=1),
            second=nn.Conv2d(16, 16, 3, padding=1, groups=4),
            last=nn.ConvTranspose2d(16, 4, 2),
        )

    generator = torch.Generator().manual_seed(1)
    images = [F.interpolate(torch.randn(8, 3, 4, 4, generator=generator), 16, mode="bilinear") for _ in range(5)]
    model = images_net().eval()
    config: dict[str, Any] = {"formats": [{"weights": "int4", "activations": "int8"}]}
    gains = [sqnr_db(model, make(model, images[1:], **config), images[0]) for make in (reconstructed, usual)]
    assert gains[0] > gains[1] + GAIN_DB


def test_padding_is_left_out() -> None:
    """What stands at padding may be anything: the error there does not count."""

    def tokens() -> nn.Module:
        torch.manual_seed(0)
        return net("self.layers[0](x)", "x, attention_mask", layers=nn.ModuleList([Layer()]))

    mask = torch.ones(6, 40, dtype=torch.int64)
    mask[:3, 20:] = 0
    batches = [
        {"x": torch.cat([part.reshape(-1, 40, 32), torch.zeros(1, 40, 32)])[:6], "attention_mask": mask}
        for part in data(4, rows=240)
    ]
    loud = [{**one, "x": torch.where(mask.bool()[..., None], one["x"], 3 * one["x"].roll(7, 1))} for one in batches]
    model = tokens().eval()
    plans = [reconstructed(model, inputs) for inputs in (batches, loud)]
    share = (codes(plans[0], "layers.0.up") != codes(plans[1], "layers.0.up")).float().mean()
    shown = [{**one, "attention_mask": torch.ones_like(mask)} for one in loud]
    other = (codes(plans[0], "layers.0.up") != codes(reconstructed(model, shown), "layers.0.up")).float().mean()
    assert share < 0.5 * other


# -- blocks --------------------------------------------------------------------------------------------------------


def test_blocks_are_the_layers_that_a_model_lists() -> None:
    def paths(model: nn.Module) -> list[str]:
        proxy = build_proxy(model, eager_attention=True)
        return [path for path, _, _ in blocks_of(proxy, list(sites_of(proxy)))]

    bert = paths(tiny("bert"))
    assert [path for path in bert if "layer" in path] == ["encoder.layer.0", "encoder.layer.1"]
    assert paths(Net()) == ["layers.0", "layers.1", "head"]
    assert paths(Layer()) == [""]
    assert paths(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))) == [""]


def test_a_block_that_runs_twice_is_learned_for_both_calls() -> None:
    def twice() -> nn.Module:
        torch.manual_seed(0)
        return net("self.layers[0](self.layers[0](x))", layers=nn.ModuleList([Layer()]))

    model, x = twice().eval(), data(1, seed=7)[0]
    assert sqnr_db(model, reconstructed(model), x) > sqnr_db(model, usual(model), x) + GAIN_DB


# -- what keeps the nearest codes ----------------------------------------------------------------------------------


def test_one_batch_leaves_none_to_check_on(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        q = reconstructed(Net(), data(1))
        text = operand(q, "head").rounding
    assert text is not None
    assert text.startswith("gptq, ")
    assert "calibrate with two or more batches" in caplog.text


def test_a_block_that_diverges_keeps_the_nearest_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LearnedCodes, "_RATE", -1.0)
    model = Net()
    q = reconstructed(model)
    text = operand(q, "layers.0.up").rounding
    assert text is not None
    assert text.startswith("gptq, ")
    assert text.endswith("; not reconstructed: block layers.0: learned integers do not reduce the error of its output")
    assert torch.equal(codes(q, "layers.0.up"), codes(known("gptq"), "layers.0.up"))


def test_a_weight_that_two_sites_store_is_rounded_to_nearest() -> None:
    model = Net()
    model.layers[1].up.weight = model.layers[0].up.weight  # type: ignore[union-attr,assignment]
    q = reconstructed(model)
    assert operand(q, "layers.0.up").rounding == (
        "rounded to nearest: other sites use the same weight, which a file stores once"
    )
    assert operand(q, "layers.0.down").codes is not None


def test_a_block_that_no_kept_batch_takes_is_rounded_to_nearest() -> None:
    class Routed(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            return self.head(self.layers[1](x) if len(x) == 1 else x)

    q = reconstructed(Routed(), [*data(), *data(1, rows=1)])
    for site in ("layers.1.up", "layers.1.down"):
        text = operand(q, site).rounding
        assert text is not None
        assert text.endswith("; not reconstructed: block layers.1: fewer than two batches reach it")


def test_a_block_without_gradients_keeps_the_codes_of_gptq() -> None:
    class Hidden(Layer):
        @torch.no_grad()
        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(F.gelu(self.up(x)))

    model = Net()
    model.layers[1] = Hidden()
    text = operand(reconstructed(model), "layers.1.up").rounding
    assert text is not None
    assert text.endswith("; not reconstructed: block layers.1: it computes without gradients")


def test_the_largest_code_of_a_target_is_kept_to() -> None:
    model, x = Net().eval(), data(1, seed=7)[0]
    q = reconstructed(model, backend="openvino-avx2", formats=[])
    assert int(codes(q, "layers.0.up").abs().max()) <= 64
    # The scale is that of the largest code, too.
    plain = usual(model, backend="openvino-avx2", formats=[])
    assert_same(operand(q, "layers.0.up").scale, operand(plain, "layers.0.up").scale)
    assert sqnr_db(model, q, x) > sqnr_db(model, plain, x) - 1


@pytest.mark.parametrize("first", [True, False])
def test_a_block_that_routes_its_data_is_learned_from_the_calls_of_its_weights(first: bool) -> None:
    class Routed(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x[0, 0] > 0 else x * 2

    model, batches = Net(), data(12)
    model.layers[0] = Routed()
    for place, rows in enumerate(batches):
        rows[0, 0] = rows[0, 0].abs() if (place % 3 == 0) == first else -rows[0, 0].abs()
    text = operand(reconstructed(model, batches, **CLIPPED), "layers.0.up").rounding
    assert text is not None
    assert "without gradients" not in text


def test_parameters_that_can_have_no_gradient_are_refused() -> None:
    with torch.inference_mode():
        model = Net()
    with pytest.raises(CalibrationError, match=r"parameters made under torch.inference_mode\(\) lack; build"):
        reconstructed(model).plan  # noqa: B018


@pytest.mark.parametrize("mask", [-1e4, torch.finfo(torch.float32).min, float("-inf")])
def test_outputs_that_are_masked_say_nothing(mask: float) -> None:
    class Masked(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).masked_fill(torch.arange(32) > 20, mask)

    torch.manual_seed(0)
    text = operand(reconstructed(Masked(), **CLIPPED), "down").rounding
    assert text is not None
    assert text.startswith("reconstruct, the model as one block: ")


# -- the work ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "left"), [("int4", ["layers.1", "head"]), ("ranges", ["layers.1"])])
def test_an_interrupt_leaves_nothing_half_and_the_next_call_goes_on(
    kind: str, left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, done, whole = reconstruction._reconstruct, list[str](), known(kind)
    q = reconstructed(NET, **KINDS[kind])

    def interrupted(path: str, *rest: Any) -> None:
        if path == "layers.1":
            raise KeyboardInterrupt
        original(path, *rest)

    def noted(path: str, *rest: Any) -> None:
        done.append(path)
        original(path, *rest)

    monkeypatch.setattr(reconstruction, "_reconstruct", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _ = q.plan
    monkeypatch.setattr(reconstruction, "_reconstruct", noted)
    assert all(
        torch.equal(codes(q, site), codes(whole, site)) for site in ("layers.0.up", "layers.1.up", "layers.1.down")
    )
    assert done[: len(left)] == left
    assert_same(q.quantize(NET)(data()[0]), whole.quantize(NET)(data()[0]))


@pytest.mark.nightly
def test_calibration_in_inference_mode_learns_the_same() -> None:
    model = Net().eval()
    with torch.inference_mode():
        q = reconstructed(model)
        _ = q.plan
    assert torch.equal(codes(q, "head"), codes(reconstructed(model), "head"))
