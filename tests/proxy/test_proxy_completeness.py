"""Proof of completeness: every product that torch executes is counted, and each that is not covered has a reason."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ConvNet, Mlp, batch, tiny
from torch import Tensor, nn
from torch.nn import functional as F
from toy_nets import linear, net

from quantizer import Quantizer, quantize_model
from quantizer.errors import ProxyError, QuantizerError
from quantizer.observe.completeness import Reason
from quantizer.rewrite.torch_products import PRODUCTS

LISTED = {reason.value for reason in Reason}


def _calibrated(model: nn.Module, *batches: Any, **options: Any) -> Quantizer:
    q = Quantizer(preset="plain", **{"backend": "openvino", **options})
    q.calibrate(model.eval(), batches)
    for row in q.coverage.not_quantized:
        assert row.reason in LISTED
    shares = [row.share for row in q.coverage.not_quantized]
    assert q.coverage.share is not None
    assert math.isclose(q.coverage.share + sum(shares), 1)
    return q


def _reasons(q: Quantizer) -> dict[str, int]:
    """Multiply-adds by reason."""
    found: Counter[str] = Counter()
    for row in q.coverage.not_quantized:
        found[row.reason] += row.multiply_adds
    return dict(found)


def _assert_counts_agree(q: Quantizer) -> None:
    """Sites count from their operands, the counter from what torch executes; both must come to one figure."""
    counted: Counter[str] = Counter()
    for product in q._session.products():
        assert product.site is not None, product
        counted[product.site] += product.multiply_adds
    of_sites = {path: entry.multiply_adds for path, entry in q.plan.items() if entry.kind != "residual_add"}
    assert {path: number for path, number in of_sites.items() if number} == dict(counted)


# -- what is covered -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_an_encoder_is_covered_whole(attention: str) -> None:
    pytest.importorskip("transformers", reason="makes a transformers model: install enginequant[hf]")
    q = _calibrated(tiny("bert", attention), batch("bert", padded=True), batch("bert", rows=2, length=6))
    assert q.coverage.share == 1
    assert len(q.coverage.not_quantized) == 0
    _assert_counts_agree(q)


def test_a_convolutional_net_is_covered_whole() -> None:
    q = _calibrated(ConvNet(), torch.randn(2, 3, 16, 16))
    assert q.coverage.share == 1
    assert q.coverage.multiply_adds == 2 * (16 * 16 * 16 * 27 + 16 * 16 * 16 * 144 + 16 * 16)
    _assert_counts_agree(q)


def test_counting_ends_with_the_pass() -> None:
    from torch.nn.modules import module as hooks

    model, x = Mlp().eval(), torch.randn(4, 32)
    q = _calibrated(model, x)
    before = q.coverage.multiply_adds
    model(x)
    q.proxy(model)(x)
    assert q.coverage.multiply_adds == before == 2 * 4 * 32 * 64
    assert not hooks._global_forward_hooks
    assert not hooks._global_forward_pre_hooks


def test_every_formula_names_an_operation_of_torch() -> None:
    for name in PRODUCTS:
        assert hasattr(torch.ops.aten, name.removeprefix("aten::").removesuffix("_")), name


# -- what escapes --------------------------------------------------------------------------------------------------


class Case(nn.Module):
    """A linear, whose result ``escape`` puts into a product that no site covers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.weight = nn.Parameter(torch.randn(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        return self.escape(self.linear(x))

    def escape(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class _Plain:
    """No module: nothing leads from ``forward`` to its code."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def apply_to(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Helped(Case):
    def escape(self, x: Tensor) -> Tensor:
        return _Plain(self.weight).apply_to(x)


ESCAPES = {
    "an overload": ("torch.ops.aten._addmm_activation(x.new_zeros(32), x, self.weight)", Reason.NOT_IN_CATALOGUE),
    "a chain": ("torch.linalg.multi_dot([x, self.weight])", Reason.NOT_IN_CATALOGUE),
    "an f-string": ("x * len(f'{x @ self.weight}')", Reason.NOT_REWRITABLE),
    "out": ("torch.matmul(x, self.weight, out=torch.empty(len(x), 32))", Reason.NOT_REWRITABLE),
    "a local name": ("(product := torch.matmul)(x, self.weight)", Reason.NOT_REWRITABLE),
    "integers": ("torch.matmul(x.long(), self.weight.long()).float()", Reason.NOT_FLOAT),
    "complex": ("torch.ops.aten.mm(x + 0j, self.weight + 0j).real", Reason.NOT_FLOAT),
    "of parameters": ("x + (self.weight @ self.weight.t())[:len(x)]", Reason.PARAMETERS),
    "of parameters below": ("x + torch.ops.aten.mm(self.weight, self.weight.t())[:len(x)]", Reason.PARAMETERS),
    "unregistered": ("self.layers[0](x)", Reason.OUTSIDE),
    "a class that is no module": ("", Reason.NOT_REACHED),
}


def _escaping(name: str) -> nn.Module:
    text, _ = ESCAPES[name]
    parts = {"linear": linear(), "weight": nn.Parameter(torch.randn(32, 32)), "layers": [linear(bias=False)]}
    return net(f"x = self.linear(x); return {text}", **parts) if text else Helped()


@pytest.mark.parametrize("name", ESCAPES)
def test_why_a_product_escapes(name: str) -> None:
    reason = ESCAPES[name][1]
    q = _calibrated(_escaping(name), torch.randn(8, 32))
    rows = 32 if "of parameters" in name else 8
    assert _reasons(q) == {reason.value: rows * 32 * 32}
    assert q.coverage.share == pytest.approx(8 / (8 + rows))
    (row,) = q.coverage.not_quantized
    assert row.path == ""
    assert row.detail or reason is Reason.PARAMETERS


def test_a_whole_function_without_source() -> None:
    namespace: dict[str, Any] = {"torch": torch, "nn": nn, "__name__": "without_source"}
    text = "class Hidden(nn.Linear):\n    def forward(self, x):\n        return torch.matmul(x, self.weight)\n"
    exec(compile(text, "<nowhere>", "exec"), namespace)
    q = _calibrated(nn.Sequential(nn.Linear(32, 32), namespace["Hidden"](32, 32)), torch.randn(8, 32))
    assert _reasons(q) == {Reason.UNREADABLE.value: 8 * 32 * 32}
    assert q.coverage.not_quantized[0].path == "1"


def test_a_forward_that_was_replaced() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    weight = torch.randn(32, 32)
    model[1].forward = lambda x: torch.matmul(x, weight)
    q = _calibrated(model, torch.randn(8, 32))
    assert _reasons(q) == {Reason.NOT_REWRITABLE.value: 8 * 32 * 32}


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_recurrences(make: type[nn.RNNBase], dtype: torch.dtype) -> None:
    layer = make(32, 16, num_layers=2, bidirectional=True, batch_first=True).to(dtype)
    q = _calibrated(layer, torch.randn(3, 5, 32, dtype=dtype), backend="tensorrt")
    weights = sum(parameter.numel() for parameter in layer.parameters() if parameter.dim() == 2)
    assert _reasons(q) == {}
    assert q.coverage.multiply_adds == 15 * weights
    assert q.coverage.share == 1


class Packed(nn.Module):
    """A recurrence over rows of different lengths, which torch's kernel alone takes. [3, 5, 32] to [3, 5, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(32, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, [5, 4, 2], batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]


def test_a_recurrence_over_a_packed_sequence_stays_in_torchs_kernel() -> None:
    q = _calibrated(Packed(), torch.randn(3, 5, 32))
    assert _reasons(q) == {Reason.RECURRENCE.value: 11 * 4 * 16 * (32 + 16)}
    assert q.coverage.not_quantized[0].path == "layer"


class Scripted(nn.Module):
    """A module beside one that TorchScript compiled. [8, 32] to [8, 32]."""

    def __init__(self, compiled: Any) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.compiled = compiled(nn.Sequential(nn.Linear(32, 32), nn.ReLU()).eval())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.compiled(self.first(x))
        return result


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("compiled", [torch.jit.script, lambda module: torch.jit.trace(module, torch.randn(8, 32))])
def test_a_module_that_torchscript_compiled(compiled: Any) -> None:
    q = _calibrated(Scripted(compiled), torch.randn(8, 32))
    assert _reasons(q) == {Reason.UNREADABLE.value: 8 * 32 * 32}
    (left,) = q.coverage.not_quantized
    assert (left.path, left.detail) == ("compiled", "Sequential, compiled by TorchScript")
    assert "TorchScript compiled it and its Python source is not available" in " ".join(q.coverage.text().split())


class Doubled(nn.Module):
    """It writes into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x.mul_(2))
        return result


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("compiled", [torch.jit.script, lambda module: torch.jit.trace(module, torch.randn(8, 32))])
def test_a_model_that_torchscript_compiled_as_a_whole_is_refused(compiled: Any, tmp_path: Path) -> None:
    """Before it is run: what it writes into would be the user's data."""
    model, x, q = compiled(Doubled().eval()), torch.ones(8, 32), Quantizer(preset="plain", backend="openvino")
    uses: list[Callable[[], Any]] = [
        lambda: q.calibrate(model, [x]),
        lambda: q.export(model, tmp_path / "m.onnx", x),
        lambda: quantize_model(model, [x], preset="plain", backend="openvino"),
    ]
    for use in uses:
        with pytest.raises(ProxyError, match=r"Doubled is compiled by torch.jit.*pass the module that was scripted"):
            use()
    assert torch.equal(x, torch.ones(8, 32))


def test_a_cell_of_a_recurrence() -> None:
    x, state = torch.randn(3, 32), (torch.randn(3, 16), torch.randn(3, 16))
    q = _calibrated(nn.LSTMCell(32, 16), (x, state))
    assert q.coverage.multiply_adds == 3 * 4 * 16 * (32 + 16)
    assert q.coverage.share == 1


def test_a_cell_of_a_recurrence_whose_state_is_always_zero() -> None:
    q = _calibrated(nn.LSTMCell(32, 16), torch.randn(3, 32))
    assert q.coverage.multiply_adds == 3 * 4 * 16 * (32 + 16)
    assert q.coverage.share == 0
    assert "all of its values in calibration were 0" in " ".join(q.coverage.text().split())


def test_an_encoder_layer_of_torch() -> None:
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    q = _calibrated(nn.Sequential(nn.Linear(32, 32), layer), torch.randn(3, 5, 32))
    whole = 15 * (4 * 32 * 32 + 2 * 32 * 64) + 2 * 3 * 5 * 5 * 32
    assert q.coverage.multiply_adds == whole + 15 * 32 * 32
    assert q.coverage.share == 1


def test_an_attention_of_torch() -> None:
    q = _calibrated(
        net("self.attention(x, y, y)[0]", "x, y", attention=nn.MultiheadAttention(32, 2, batch_first=True)),
        (torch.randn(3, 5, 32), torch.randn(3, 7, 32)),
    )
    assert q.coverage.multiply_adds == 2 * 15 * 32 * 32 + 2 * 21 * 32 * 32 + 2 * 3 * 5 * 7 * 32
    assert q.coverage.share == 1


# -- what becomes of sites -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"exclude": {"names": ["up"]}}, Reason.EXCLUDED),
        ({"include": {"names": ["down"]}}, Reason.EXCLUDED),
    ],
)
def test_excluded_modules(options: dict[str, Any], reason: Reason) -> None:
    q = _calibrated(Mlp(), torch.randn(4, 32), **options)
    assert _reasons(q) == {reason.value: 4 * 32 * 64}
    assert q.coverage.share == 0.5
    assert q.coverage.not_quantized[0].site == "up.forward.linear_0"


def test_a_kind_that_is_switched_off() -> None:
    q = _calibrated(ConvNet(), torch.randn(2, 3, 16, 16), sites={"conv": False})
    assert set(_reasons(q)) == {Reason.SWITCHED_OFF.value}
    assert {row.path for row in q.coverage.not_quantized} == {"stem", "body"}


def test_too_small_for_the_target() -> None:
    q = _calibrated(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 3)), torch.randn(4, 32), backend="tensorrt")
    assert _reasons(q) == {Reason.TARGET.value: 4 * 32 * 3}
    assert "below 16" in q.coverage.not_quantized[0].detail


def test_a_weight_that_no_module_has_registered() -> None:
    q = _calibrated(
        net("self.linear(x) @ self.kept[0]", linear=linear(), kept=[nn.Parameter(torch.randn(32, 32))]),
        torch.randn(4, 32),
    )
    assert _reasons(q) == {Reason.UNFIT.value: 4 * 32 * 32}


def test_what_is_kept_in_float_survives_saving(tmp_path: Path) -> None:
    model, x = Mlp().eval(), torch.randn(4, 32)
    q = _calibrated(model, x)
    amp = q.amp(model)
    amp(x)
    q.fallback(amp, num=len(q.sensitivity))
    assert _reasons(q) == {Reason.FALLBACK.value: 2 * 4 * 32 * 64}
    assert q.coverage.share == 0
    loaded = Quantizer.load(q.save(tmp_path / "saved"))
    assert loaded.coverage.not_quantized.rows == q.coverage.not_quantized.rows
    assert loaded.coverage.share == 0
    loaded.clear_fallback()
    assert loaded.coverage.share == 1
    assert loaded.coverage.multiply_adds == 2 * 4 * 32 * 64


def test_damaged_products_are_an_error(tmp_path: Path) -> None:
    folder = _calibrated(_escaping("an overload"), torch.randn(4, 32)).save(tmp_path / "saved")
    file = folder / "quantizer.yaml"
    text = file.read_text()
    file.write_text(text.replace(Reason.NOT_IN_CATALOGUE.value, "other"))
    with pytest.raises(QuantizerError, match=r"products\[1\]\.reason: expected one of .*, got 'other'"):
        Quantizer.load(folder)
    file.write_text(text.replace("site: linear.forward.linear_0", "site: elsewhere"))
    with pytest.raises(QuantizerError, match="damaged: products of 'elsewhere', which is not a site"):
        Quantizer.load(folder)


# -- how it is shown -----------------------------------------------------------------------------------------------


def test_text_and_html_state_the_share_and_the_products() -> None:
    coverage = _calibrated(_escaping("an overload"), torch.randn(8, 32)).coverage
    for shown in (coverage.text(), coverage._repr_html_()):
        plain = " ".join(shown.split())
        assert "50.0% of 16.4 k multiply-adds in low precision" in plain
        assert Reason.NOT_IN_CATALOGUE.value in plain or "not in the" in plain
        assert "torch.ops.aten._addmm_activation" in plain


def test_before_calibration_there_is_no_share() -> None:
    coverage = Quantizer(preset="plain").inspect(Mlp())
    assert coverage.share is None
    assert len(coverage.not_quantized) == 0
    assert "low precision" not in coverage.text()


def test_a_failed_pass_leaves_a_counter_that_works() -> None:
    class Fails(Case):
        def escape(self, x: Tensor) -> Tensor:
            if x.shape[0] == 5:
                raise ZeroDivisionError("five")
            return x

    model = Fails().eval()
    q = Quantizer(preset="plain", backend="openvino")
    calib = q.calib(model)
    with torch.no_grad():
        with pytest.raises(ZeroDivisionError, match="five"):
            calib(torch.randn(5, 32))
        calib(torch.randn(8, 32))
    assert q.coverage.share == 1
