"""Recurrent layers in engines compute what the proxy does, for lengths and batches that the file was not made with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from calibrated import make_calibrated
from torch import Tensor, nn

from quantizer.engines.backends import backends

AXES = {"x": {0: "batch", 1: "time"}}


class Tagger(nn.Module):
    """A recurrence and a head. [N, T, 24] to [N, T, 8]."""

    def __init__(self, layer: nn.RNNBase, features: int) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(features, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.layer(x)[0])
        return result


def _deep() -> Tagger:
    return Tagger(nn.LSTM(24, 192, num_layers=2, bidirectional=True, batch_first=True), 384)


def _exported(model: nn.Module, backend: str, folder: Path) -> tuple[nn.Module, Path]:
    data = [torch.randn(3, 6, 24) for _ in range(2)]
    q = make_calibrated(model.eval(), data, backend=backend)
    assert q.coverage.share >= 0.95
    frozen = q.quantize(model)
    file = q.export(frozen, folder / "model.onnx", (data[0],), dynamic_axes=AXES)
    q.build(file, folder / "engine")
    return frozen, folder / "engine"


@pytest.mark.usefixtures("exact_byte_products")
@pytest.mark.parametrize(
    ("backend", "make"),
    [
        ("openvino", _deep),
        ("openvino", lambda: Tagger(nn.GRU(24, 256, batch_first=True, bidirectional=True, bias=False), 512)),
        ("openvino", lambda: Tagger(nn.RNN(24, 400, nonlinearity="relu", batch_first=True), 400)),
        ("openvino", lambda: Tagger(nn.LSTM(24, 32, proj_size=16, batch_first=True), 16)),
        ("onnxruntime", _deep),
        ("onnxruntime", lambda: Tagger(nn.LSTM(24, 96, batch_first=True, bias=False), 96)),
    ],
    ids=["openvino-lstm", "openvino-gru", "openvino-rnn", "openvino-projected", "ort-lstm", "ort-lstm-without-bias"],
)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_an_engine_computes_what_the_proxy_does(backend: str, make: type[Tagger], tmp_path: Path) -> None:
    torch.manual_seed(0)
    frozen, engine = _exported(make(), backend, tmp_path)
    loaded = backends[backend].load(engine)
    for rows, steps in ((1, 1), (4, 11)):
        x = torch.randn(rows, steps, 24)
        wanted = frozen(x)
        got = torch.as_tensor(next(iter(loaded({"x": x.numpy()}).values())))
        noise = (wanted - got).square().sum()
        # One value that falls on the other side of a step is followed by others.
        assert float(10 * torch.log10(wanted.square().sum() / noise).detach()) > 40


def test_tensorrt_rtx_builds_loops_for_a_gpu(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tagger(nn.LSTM(24, 32, num_layers=2, bidirectional=True, batch_first=True), 64).eval()
    data = [torch.randn(3, 6, 24)]
    q = make_calibrated(model, data, backend="tensorrt-rtx")
    assert q.coverage.share >= 0.95
    file = q.export(q.quantize(model), tmp_path / "model.onnx", (data[0],))
    assert q.build(file, tmp_path / "engine", compute_capability="sm89").path.stat().st_size > 0
