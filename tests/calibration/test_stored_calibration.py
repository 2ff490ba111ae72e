"""A calibration and its plans in a folder: read again, they give the same bits, and no batch runs again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from quantizer import Quantizer
from quantizer.errors import CalibrationError
from quantizer.plan.site_plan import plan_digest
from quantizer.utils.fingerprint import tensors_digest

CALLS: Counter[str] = Counter()


class Net(nn.Module):
    """A convolution, an attention and a residual add; ``CALLS`` counts its passes, apart from its own state."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.query, self.key, self.out = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        _counted()
        hidden = self.norm(torch.relu(self.conv(x.transpose(1, 2))).transpose(1, 2))
        scores = torch.matmul(self.query(hidden), self.key(hidden).transpose(1, 2)).softmax(-1)
        result: Tensor = x + self.out(torch.matmul(scores, hidden))
        return result


def _counted() -> None:
    CALLS["passes"] += 1


def _count_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the count to what it was, because a global value that the code reads is a part of the key."""
    monkeypatch.setattr(f"{__name__}.CALLS", Counter())


def _net() -> Net:
    torch.manual_seed(0)
    net = Net().eval()
    with torch.no_grad():
        net.norm.weight[1] *= 20
    return net


def _batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 6, 8, generator=generator) for _ in range(6)]


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "max": {"activations": {"calibrator": "max"}},
    "no batches": {"preset": "plain"},
    "percentiles": {"activations": {"calibrator": "percentile", "percentile": [99.0, 99.99]}},
    "auto": {"activations": {"calibrator": "auto"}},
    "gptq": {"weights": {"rounding": "gptq"}},
    "reconstruct": {"weights": {"rounding": "reconstruct"}},
    "awq": {"formats": [{"weights": "int4", "activations": "float"}], "weights": {"rounding": "awq"}},
    "equalized": {"weights": {"granularity": "per_tensor"}},
    "outputs": {"backend": "tensorrt"},
}


def _quantizer(net: nn.Module, cache: Path | None, settings: dict[str, Any], told: list[str]) -> Quantizer:
    q = Quantizer(**{"backend": "openvino", **settings})
    q.calibrate(net, _batches(), cache=cache, tell=told.append)
    return q


def _results(q: Quantizer, net: nn.Module) -> list[str]:
    """What a later call returns: plans, frozen proxies, statistics, for this backend, another one and a fallback."""
    other = q.for_backend("onnxruntime")
    found = [tensors_digest(one.quantize(net).state_dict()) for one in (q, other)]
    proxy = q.amp(net)
    for batch in _batches()[:2]:
        proxy(batch)
    q.fallback(proxy, num=1)
    found += [tensors_digest(q.quantize(net).state_dict()), plan_digest(q.plan), plan_digest(other.plan)]
    return [*found, str(q.coverage), str(q.sensitivity)]


DAILY = ("default", "no batches", "gptq", "outputs")
"""Plans by batches that run again and without, with chosen integers, and with quantized outputs."""


@pytest.mark.parametrize(
    "name", [name if name in DAILY else pytest.param(name, marks=pytest.mark.nightly) for name in SETTINGS]
)
def test_what_is_read_again_gives_the_same_bits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    net, told, settings = _net(), [], SETTINGS[name]
    expected = _results(_quantizer(net, None, settings, told), net)
    _count_nothing(monkeypatch)
    first = _quantizer(net, tmp_path / "kept", settings, told)
    statistics = first._session.seen()
    assert _results(first, net) == expected
    passes = CALLS["passes"]
    assert not told
    _count_nothing(monkeypatch)
    again = _quantizer(net, tmp_path / "kept", settings, told)
    assert CALLS["passes"] == 0
    assert again._session.seen() == statistics
    assert _results(again, net) == expected
    assert CALLS["passes"] <= passes - len(_batches())
    assert len(told) == 1


def test_a_generator_is_read_once_and_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, told = _net(), list[str]()
    shuffled = DataLoader(torch.cat(_batches()), batch_size=4, shuffle=True)
    _count_nothing(monkeypatch)
    for data in (iter(_batches()), iter(_batches()), shuffled, shuffled):
        _count_nothing(monkeypatch)
        Quantizer(backend="openvino").calibrate(net, data, cache=tmp_path / "kept", tell=told.append)
    # A shuffled loader yields other batches.
    assert told == ["calibration, 0 plans"]


def test_opaque_inputs_are_never_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch with an object of unknown content equals no other."""

    class Taking(Net):
        def forward(self, x: Tensor, cache: object = None) -> Tensor:
            return super().forward(x)

    net, told = Taking().eval(), list[str]()
    for _ in range(2):
        _count_nothing(monkeypatch)
        data = [{"x": batch, "cache": object()} for batch in _batches()]
        Quantizer(backend="openvino").calibrate(net, data, cache=tmp_path / "kept", tell=told.append)
    assert not told


def test_a_cache_is_for_a_new_calibration(tmp_path: Path) -> None:
    q = Quantizer(backend="openvino")
    q.calibrate(_net(), _batches())
    with pytest.raises(CalibrationError, match="takes no cache"):
        q.calibrate(_net(), _batches(), resume=True, cache=tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(CalibrationError, match="file is not a folder"):
        q.calibrate(_net(), _batches(), cache=tmp_path / "file")


def test_no_data_stores_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(CalibrationError, match="the calibration data is empty"):
            Quantizer(backend="openvino").calibrate(_net(), [], cache=tmp_path / "kept")
    assert not (tmp_path / "kept").exists()
