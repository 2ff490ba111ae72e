"""Torch's own layers that leave Python for fused kernels and nested tensors: the proxies compute what they compute."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import needs_exact_byte_products
from torch import Tensor, nn

from quantizer import QATCalibrate, Quantizer

# torch says so of its own doings.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:`torch.jit"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


class Encoder(nn.Module):
    """Mean of an encoder's output over all positions, padded ones included."""

    def __init__(self, last: nn.Module | None = None, *, nested: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, last, enable_nested_tensor=nested)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=pad).mean(1)


X = torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(1))
PLACES = torch.arange(8)
BEHIND = torch.tensor([[5], [8], [3]]) <= PLACES  # padding behind the tokens: torch uses nested tensors
BEFORE = BEHIND.flip(1)  # and before them: it does not
WHOLE = torch.tensor([[5], [0], [3]]) <= PLACES  # a row of padding alone
LOWERED = torch.zeros(3, 8).masked_fill(BEHIND, float("-inf"))


def sqnr_db(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    error = (found - expected).square().mean()
    return float(10 * torch.log10(expected.square().mean() / error.clamp(min=1e-30)))


@pytest.mark.parametrize("pad", [BEHIND, BEFORE, WHOLE, LOWERED], ids=["behind", "before", "a whole row", "additive"])
@pytest.mark.parametrize("gradients", [False, True], ids=["no_grad", "grad"])
def test_padding_of_an_encoder(pad: Tensor, gradients: bool) -> None:
    model = Encoder(nn.LayerNorm(32)).eval()
    q = Quantizer(preset="plain", backend="openvino")
    with torch.set_grad_enabled(gradients):
        expected = model(X, pad)
        assert torch.equal(q.proxy(model)(X, pad), expected)
        assert sqnr_db(q.calib(model)(X, pad), expected) > 100
        assert sqnr_db(q.amp(model)(X, pad), expected) > 100
        assert sqnr_db(q.qat(model)(X, pad), expected) > 25
        assert sqnr_db(q.quantize(model)(X, pad), expected) > 25


def test_padding_in_train_mode_is_left_as_it_is() -> None:
    model = Encoder().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for layer in model.encoder.layers:
        layer.self_attn.dropout = 0.0
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [(X, BEHIND)], progress=False)
    with torch.no_grad():
        assert sqnr_db(q.qat(model)(X, BEHIND), model(X, BEHIND)) > 25


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "padded"])
def test_padding_where_nested_tensors_are_switched_off(nested: bool) -> None:
    model = Encoder(nested=nested).eval()
    q = Quantizer(preset="plain", backend="openvino")
    with torch.no_grad():
        assert sqnr_db(q.calib(model)(X, BEHIND), model(X, BEHIND)) > 100
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            assert sqnr_db(q.quantize(model)(X, BEHIND), model(X, BEHIND)) > 25
        finally:
            torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.parametrize("measure", ["gradient", "output"])
@pytest.mark.parametrize("gradients", [False, True], ids=["no_grad", "grad"])
def test_what_padding_costs_is_measured_on_the_function_that_gave_the_result(measure: str, gradients: bool) -> None:
    model = Encoder().eval()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [(X, BEHIND)], progress=False)
    amp = q.amp(model, measure=measure)
    passes: list[Tensor] = []
    amp.encoder.register_forward_hook(lambda module, args, result: passes.append((result == 0)[BEHIND].all()))
    with torch.set_grad_enabled(gradients):
        amp(X, BEHIND)
    assert len(q.sensitivity.rows) > 5
    assert len(passes) > 1
    assert all(bool(zeros) != gradients for zeros in passes)


def test_padding_in_place() -> None:
    expected = Encoder().eval()
    with QATCalibrate(Encoder, method="max", backend="openvino") as qat:
        model = Encoder()
        qat.setup_model_qat(model)
        with torch.no_grad():
            assert sqnr_db(model(X, BEHIND), expected(X, BEHIND)) > 100
    with torch.no_grad():
        assert sqnr_db(model(X, BEHIND), expected(X, BEHIND)) > 25


def test_padding_is_compiled_and_traced() -> None:
    model = Encoder().eval()
    q = Quantizer(preset="plain", backend="openvino")
    with torch.no_grad():
        q.calib(model)(X, BEHIND)
        frozen = q.quantize(model)
        expected = frozen(X, BEHIND)
        compiled = torch.compile(frozen, backend="eager")
        traced = torch.jit.trace(frozen, (X, BEFORE), check_trace=False)
        for pad in (BEHIND, BEFORE):
            assert sqnr_db(compiled(X, pad), frozen(X, pad)) > 100
            assert sqnr_db(traced(X, pad), frozen(X, pad)) > 100
    assert sqnr_db(expected, model(X, BEFORE)) < 20


@needs_exact_byte_products
@pytest.mark.parametrize("engine", ["openvino", pytest.param("onnxruntime", marks=pytest.mark.nightly)])
def test_padding_is_exported(engine: str, tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="exporting needs enginequant[onnx]")
    pytest.importorskip(engine, reason=f"needs enginequant[{engine}]")
    from quantizer.engines import load_engine

    model = Encoder(nn.LayerNorm(32)).eval()
    q = Quantizer(preset="plain", backend=engine)
    axes = {name: {0: "batch", 1: "sequence"} for name in ("x", "pad")}
    with torch.no_grad():
        q.calib(model)(X, BEHIND)
        path = q.export(q.quantize(model), tmp_path / "encoder.onnx", (X, BEFORE), dynamic_axes=axes)
        runner = load_engine(engine, path)
        for pad in (BEHIND, BEFORE, torch.zeros(3, 1, dtype=torch.bool)):
            x = X[:, : pad.shape[1]]
            (got,) = runner({"x": x.numpy(), "pad": np.asarray(pad)}).values()
            assert sqnr_db(torch.from_numpy(got), q.quantize(model)(x, pad)) > 30


@pytest.mark.parametrize("kind", ["layer", "attention"])
def test_padding_of_parts_of_an_encoder(kind: str) -> None:
    """Their fused kernels write no zeros, so neither do the proxies."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.part = (
                nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
                if kind == "layer"
                else nn.MultiheadAttention(32, 4, batch_first=True)
            )

        def forward(self, x: Tensor, pad: Tensor) -> Tensor:
            if kind == "layer":
                return self.part(x, src_key_padding_mask=pad)
            return self.part(x, x, x, key_padding_mask=pad, need_weights=False)[0]

    model = Part().eval()
    with torch.no_grad():
        for pad in (BEHIND, BEFORE):
            assert sqnr_db(Quantizer(preset="plain", backend="openvino").calib(model)(X, pad), model(X, pad)) > 100
