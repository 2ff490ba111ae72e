"""Folders of ``Quantizer.save``: the plan, the ranges, and what calibration saw."""

from __future__ import annotations

from pathlib import Path

import torch
import yaml
from torch import nn

from quantizer import Quantizer
from quantizer.plan.replace_scales import scales_of
from quantizer.plan.saved_folder import state_bytes, state_of_bytes
from torture import mutations
from torture.kinds import Kind, kind

SAVED = "saved"


class Small(nn.Module):
    """A linear, a convolution, a product of activations and a residual add."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)
        self.conv = nn.Conv1d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.relu(self.up(x)))
        y = self.conv(y + x)
        return torch.matmul(y, y.transpose(1, 2))


def model() -> nn.Module:
    torch.manual_seed(0)
    return Small().eval()


def data() -> torch.Tensor:
    return torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(1))


def _make(folder: Path) -> None:
    small = model()
    q = Quantizer(
        preset="plain", backend="openvino", sites={"residual_add": True}, activations={"calibrator": "percentile"}
    )
    q.calibrate(small, [data()], progress=False)
    q.fallback(_measured(q, small), num=1)
    q.save(folder / SAVED)


def _make_unsigned(folder: Path) -> None:
    """As an earlier version wrote it, without checksums: all is read that is there."""
    _make(folder)
    file = folder / SAVED / "quantizer.yaml"
    document = yaml.safe_load(file.read_text())
    del document["sha256"]
    file.write_text(yaml.safe_dump(document, sort_keys=False))


def _measured(q: Quantizer, small: nn.Module) -> nn.Module:
    amp = q.amp(small)
    amp(data())
    return amp


def _read(folder: Path) -> tuple[str, str, list[float]]:
    q, small = Quantizer.load(folder / SAVED), model()
    frozen = q.quantize(small)
    with torch.no_grad():
        outputs = frozen(data()).flatten().tolist()
    text = q.coverage.text() + str(q.ranges)
    return text.encode().decode(), str(q.scales()), outputs


def _resume(folder: Path) -> tuple[str, str, list[float]]:
    q, small = Quantizer.load(folder / SAVED), model()
    proxy = q.calib(small, resume=True)
    with torch.no_grad():
        proxy(data())
    frozen = q.quantize(small)
    with torch.no_grad():
        outputs = frozen(data()).flatten().tolist()
    return q.coverage.text().encode().decode(), str(q.scales()), outputs


_TENSORS = (mutations.raw, mutations.safetensors_header)

for _name, _file, _how, _reader, _maker, _exact in (
    ("plan", "quantizer.yaml", (mutations.raw, mutations.text, *[mutations.yaml_text] * 3), _read, _make, False),
    ("ranges", "ranges.safetensors", _TENSORS, _read, _make, True),
    ("observed", "observed.safetensors", _TENSORS, _resume, _make, True),
    ("old-ranges", "ranges.safetensors", _TENSORS, _read, _make_unsigned, False),
    ("old-observed", "observed.safetensors", _TENSORS, _resume, _make_unsigned, False),
):
    kind(Kind(name=_name, make=_maker, files=(f"{SAVED}/{_file}",), how=_how, read=_reader, exact=_exact))


def _make_state(folder: Path) -> None:
    small = model()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(small, [data()], progress=False)
    session = q._session
    (folder / "state").write_bytes(state_bytes(q.plan, session.products(), session.document()))


def _read_state(folder: Path) -> str:
    plan, _, _ = state_of_bytes((folder / "state").read_bytes(), folder / "state")
    return str(scales_of(plan))


kind(Kind(name="state", make=_make_state, files=("state",), how=_TENSORS, read=_read_state))
