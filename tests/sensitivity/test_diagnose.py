"""The groups that cost most: a known fault is named, its fix is YAML that loads, and its gain shows on other
samples."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import yaml
from calibrated import make_calibrated
from torch import Tensor, nn
from torch.nn import functional
from toy_nets import net

from quantizer import Quantizer, diagnose
from quantizer.diagnose import with_setting
from quantizer.errors import CalibrationError
from quantizer.plan.site_plan import Plan
from quantizer.report.terminal import diagnosis_lines
from quantizer.utils.records import Diagnosis, Fix

_WIDTH = 64


def _plain(x: Tensor) -> Tensor:
    return x


def _channel(x: Tensor) -> Tensor:
    x[..., 3] *= 100
    return x


def _branches(x: Tensor) -> Tensor:
    x[..., _WIDTH // 2 :] *= 100
    return x


def _token(x: Tensor) -> Tensor:
    x[0, 0] *= 60
    return x


def _tail(x: Tensor) -> Tensor:
    # Large where no one channel and no one token is: more values than the percentile leaves out, and rarely.
    return torch.where(torch.rand(x.shape) < 0.01, 8 * x, x)


def _rows(spoil: Callable[[Tensor], Tensor], seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    return [spoil(torch.randn(8, 32, _WIDTH)) for _ in range(4)]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 16)).eval()


def _sqnr(quantizer: Quantizer, model: nn.Module, rows: list[Tensor]) -> float:
    quantized = quantizer.quantize(model)
    with torch.no_grad():
        errors = [float((quantized(x) - model(x)).square().sum() / model(x).square().sum()) for x in rows]
    return -10 * math.log10(sum(errors) / len(errors))


def _worst(model: nn.Module, rows: list[Tensor], **config: object) -> tuple[Quantizer, Diagnosis]:
    quantizer = make_calibrated(model, rows, backend="openvino", **config)
    return quantizer, quantizer.diagnose(model, rows)[0]


@pytest.mark.parametrize(
    ("spoil", "config", "words"),
    [
        (_channel, {"calibrator": "max"}, "input: channel 3 is up to"),
        (
            _branches,
            {"calibrator": "max"},
            "input: one range for two branches, the channels before 32 and from 32 on",
        ),
        (_token, {"calibrator": "max"}, "input: 4 of 1024 tokens are"),
        (_tail, {"calibrator": "percentile", "percentile": 99.0}, "of the values are clipped"),
    ],
    ids=["channel", "branches", "token", "tail"],
)
def test_a_fault_is_named_and_its_cure_is_true_on_other_rows(
    spoil: Callable[[Tensor], Tensor], config: dict[str, object], words: str
) -> None:
    model, rows, others = _model(), _rows(spoil, 1), _rows(spoil, 2)
    quantizer, worst = _worst(model, rows, activations=config)
    assert words in "; ".join(worst.findings)
    assert worst.fix is not None
    setting = yaml.safe_load(worst.fix.setting)
    cured = Quantizer(with_setting(quantizer.config, setting))
    cured.calibrate(model, rows, progress=False)
    gain = _sqnr(cured, model, others) - _sqnr(quantizer, model, others)
    assert gain > 0.5
    assert gain == pytest.approx(worst.fix.gain_db, abs=2)


def test_a_healthy_model_has_costs_and_float_alone_mends_them() -> None:
    rows = _rows(_plain, 1)
    model = _model()
    diagnoses = make_calibrated(model, rows, backend="openvino", activations={"calibrator": "max"}).diagnose(
        model, rows
    )
    assert len(diagnoses) == 2
    assert all(not cause.findings for cause in diagnoses)
    assert diagnoses[0].sqnr_db <= diagnoses[1].sqnr_db
    # Of two groups each has about a half of the error.
    worst = diagnoses[0].fix
    assert worst is not None
    assert worst.setting.startswith("exclude: {sites: [")
    assert math.isinf(worst.gain_alone_db)
    assert 0.5 <= worst.gain_db < 20
    assert "no cause found; fix: keep it in float, exclude={" in " ".join(diagnoses.text().split())


def test_to_leave_all_groups_in_float_is_no_cure() -> None:
    torch.manual_seed(0)
    model, rows = nn.Sequential(nn.Linear(_WIDTH, _WIDTH)).eval(), _rows(_plain, 1)
    (only,) = make_calibrated(model, rows, backend="openvino", activations={"calibrator": "max"}).diagnose(model, rows)
    assert only.fix is None
    assert diagnosis_lines([only])[0].endswith("dB if only it is quantized; no cause found")


def _unfoldable() -> nn.Module:
    """A tensor that a linear and a product of two activations read: its outliers cannot move."""
    return net("torch.matmul(x, self.linear(x).transpose(-1, -2))", linear=nn.Linear(_WIDTH, _WIDTH))


def test_what_cannot_be_folded_says_why() -> None:
    torch.manual_seed(0)
    model, rows = _unfoldable().eval(), _rows(_channel, 1)
    quantizer = make_calibrated(model, rows, backend="openvino", activations={"calibrator": "max"})
    found = [cause for cause in quantizer.diagnose(model, rows) if cause.notes]
    assert any("reads the same tensor in low precision" in note for cause in found for note in cause.notes)
    assert any("not smoothed" in line for line in diagnosis_lines(found))


def test_a_model_with_nothing_quantized_has_no_causes_and_no_data_is_refused() -> None:
    model, rows = _model(), _rows(_plain, 1)
    quantizer = make_calibrated(model, rows, backend="openvino", exclude={"names": ["**"]})
    assert len(quantizer.diagnose(model, rows)) == 0
    with pytest.raises(CalibrationError, match="a few calibration batches"):
        quantizer.diagnose(model, [])


def test_asking_changes_no_plan() -> None:
    model, rows = _model(), _rows(_channel, 1)
    quantizer = make_calibrated(model, rows, backend="openvino", activations={"calibrator": "max"})
    before = quantizer.scales()
    first = quantizer.diagnose(model, rows)
    assert first.rows == quantizer.diagnose(model, rows).rows
    assert all(torch.equal(scale, before[name]) for name, scale in quantizer.scales().items())


def test_causes_of_convolutions_whose_inputs_are_divided_by_factors() -> None:
    # Channels that differ are made alike by factors, which lie along the third axis from the end.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)).eval()
    with torch.no_grad():
        model[0].weight.mul_(torch.logspace(-2, 1, 16)[:, None, None, None])
    images = [torch.randn(4, 3, 12, 12) for _ in range(2)]
    quantizer = Quantizer(backend="openvino")
    quantizer.calibrate(model, images)
    factors = [operand.factor for site in quantizer.plan.values() for operand in site.operands]
    assert any(factor is not None for factor in factors)
    assert {cause.group for cause in quantizer.diagnose(model, images).rows} == {
        "0._conv_forward.conv2d_1",
        "2._conv_forward.conv2d_1",
    }


@pytest.fixture
def ranked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many batches groups were ranked on, each time."""
    asked: list[int] = []
    measure = diagnose._ranked

    def counted(model: nn.Module, plan: Plan, batches: list[Tensor]) -> list[str]:
        asked.append(len(batches))
        return measure(model, plan, batches)

    monkeypatch.setattr(diagnose, "_ranked", counted)
    return asked


def _measured(model: nn.Module, rows: list[Tensor]) -> Quantizer:
    quantizer = make_calibrated(model, rows, backend="openvino", activations={"calibrator": "max"})
    amp = quantizer.amp(model)
    for batch in rows:
        amp(batch)
    return quantizer


def test_the_ranking_of_amp_is_not_measured_again(ranked: list[int]) -> None:
    model, rows = _model(), _rows(_channel, 1)
    quantizer = _measured(model, rows)
    found = quantizer.diagnose(model, rows).rows
    assert not ranked
    quantizer.amp(model)
    assert quantizer.diagnose(model, rows).rows == found
    assert ranked == [len(rows)], "nothing went through the new proxy yet"


def test_a_ranking_of_another_plan_is_not_taken(ranked: list[int]) -> None:
    model, rows = _model(), _rows(_plain, 1)
    quantizer = _measured(model, rows)
    quantizer.calibrate(model, [10 * row for row in rows], resume=True)
    quantizer.diagnose(model, rows)
    assert ranked == [len(rows)]


def test_a_ranking_of_other_weights_is_not_taken(ranked: list[int]) -> None:
    model, rows = _model(), _rows(_plain, 1)
    quantizer = _measured(model, rows)
    with torch.no_grad():
        model[0].weight.mul_(3)
    with pytest.warns(UserWarning, match="weights"):
        quantizer.diagnose(model, rows)
    assert ranked == [len(rows)]


class _Attention(nn.Module):
    """Fused attention, of which OpenVINO's plan has the probabilities, an operand that is no argument."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(32, 4, batch_first=True) if own else None
        self.project = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        if self.own is not None:
            attended: Tensor = self.own(x, x, x, need_weights=False)[0]
            return attended
        query, key, value = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


@pytest.mark.parametrize("own", [True, False], ids=["MultiheadAttention", "scaled_dot_product_attention"])
def test_an_operand_that_fused_attention_computes_itself(own: bool) -> None:
    torch.manual_seed(0)
    model, rows = _Attention(own).eval(), [torch.randn(8, 8, 32) for _ in range(4)]
    found = make_calibrated(model, rows, backend="openvino").diagnose(model, rows[:2], num=10)
    assert any("scaled_dot_product_attention" in cause.group for cause in found)


class _Block(nn.Module):
    """Attention of four heads of 16 channels, fused or as two matrix multiplications, and an MLP."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 128), nn.Linear(128, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.fused:
            attended = functional.scaled_dot_product_attention(q, k, v)
        else:
            attended = torch.matmul(torch.matmul(q, k.transpose(-1, -2) / 4).softmax(-1), v)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(x)))


def _large_values(block: _Block) -> None:
    for channel in (5, 40):
        _scale(block.qkv, 2 * _WIDTH + channel, 3000)
        block.out.weight[:, channel] /= 3000


def _large_queries(block: _Block) -> None:
    for channel in (5, 40):
        _scale(block.qkv, channel, 1000)
        _scale(block.qkv, _WIDTH + channel, 1 / 1000)


def _large_keys(block: _Block) -> None:
    for channel in range(3, 8):
        _scale(block.qkv, channel, 1 / 1000)
        _scale(block.qkv, _WIDTH + channel, 1000)


def _large_hidden(block: _Block) -> None:
    for channel in (7, 99):
        _scale(block.up, channel, 2000)
        block.down.weight[:, channel] /= 2000


def _scale(linear: nn.Linear, channel: int, factor: float) -> None:
    linear.weight[channel] *= factor
    linear.bias[channel] *= factor


@pytest.mark.parametrize(
    ("spoil", "fused", "site", "words"),
    [
        (_large_values, True, "scaled_dot_product_attention_0", "value: channels 5, 40 are up to"),
        (_large_queries, True, "scaled_dot_product_attention_0", "query: channels 5, 40 are up to"),
        (_large_keys, True, "scaled_dot_product_attention_0", "key: 5 channels (3, 4, 5, ...) are up to"),
        (_large_values, False, "matmul_1", "rhs: channels 5, 40 are up to"),
        (_large_queries, False, "matmul_0", "lhs: channels 5, 40 are up to"),
        (_large_keys, False, "matmul_0", "rhs: 5 channels (3, 4, 5, ...) are up to"),
        (_large_hidden, True, "down.forward.linear_0", "input: channels 7, 99 are up to"),
    ],
)
def test_the_operand_and_its_channels_are_named(
    spoil: Callable[[_Block], None], fused: bool, site: str, words: str
) -> None:
    torch.manual_seed(0)
    model, rows = _Block(fused).eval(), [torch.randn(4, length, _WIDTH) for length in (12, 20)]
    with torch.no_grad():
        spoil(model)
    quantizer = make_calibrated(model, rows, backend="openvino")
    found = {cause.group: cause.findings for cause in quantizer.diagnose(model, rows, num=4).rows}
    texts = [text for group, findings in found.items() if site in group for text in findings]
    assert any(text.startswith(words) for text in texts), found


def test_a_setting_that_keeps_the_group_in_float_is_a_fix_of_it() -> None:
    torch.manual_seed(0)
    model, rows = _Block(fused=True).eval(), [torch.randn(4, 12, _WIDTH) for _ in range(2)]
    with torch.no_grad():
        _large_values(model)
    found = make_calibrated(model, rows, backend="openvino").diagnose(model, rows, num=2).rows
    assert {cause.group for cause in found} == {"out.forward.linear_0", "forward.scaled_dot_product_attention_0"}
    # With SmoothQuant, the plan does not quantize the attention.
    assert all(cause.fix is not None and "smoothquant_alpha" in cause.fix.setting for cause in found)
    assert diagnosis_lines(found)[1].endswith("; fix: as in line 1")


def test_the_channels_of_a_convolution_are_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)).eval()
    with torch.no_grad():
        model[0].weight[4] *= 500
        model[0].bias[4] *= 500
    images = [torch.randn(4, 3, size, size) for size in (12, 16)]
    quantizer = make_calibrated(model, images, backend="openvino", activations={"calibrator": "max"})
    found = {cause.group: cause.findings for cause in quantizer.diagnose(model, images).rows}
    (text,) = found["1._conv_forward.conv2d_1"]
    assert text.startswith("input: channel 4 is up to")
    assert text.endswith("as large as the median of 16 channels")


def test_a_fix_of_several_groups_is_given_once() -> None:
    fix = Fix(setting="activations: {smoothquant_alpha: 0.7}", gain_db=9.6, gain_alone_db=12.0)
    other = Fix(setting="exclude: {sites: [c]}", gain_db=0.7, gain_alone_db=math.inf)
    causes = [
        Diagnosis(group="a", sqnr_db=7.0, findings=("input: channel 3 is",), fix=fix),
        Diagnosis(group="b", sqnr_db=8.0, findings=("value: channel 3 is",), fix=fix),
        Diagnosis(group="c", sqnr_db=9.0, fix=other),
    ]
    first, second, third = diagnosis_lines(causes, form="python")
    assert first.endswith('; fix: activations={"smoothquant_alpha": 0.7}, output SQNR +9.6 dB, no latency cost')
    assert second.endswith("; value: channel 3 is; fix: as in line 1")
    assert third.endswith('; no cause found; fix: keep it in float, exclude={"sites": ["c"]}, output SQNR +0.7 dB')
