"""A saved plan of many sites in one group: the group's long name is written once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load, save
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.errors import QuantizerError
from quantizer.plan.saved_folder import state_bytes, state_of_bytes


class _Wide(nn.Module):
    """Many linears that read one tensor, which makes one group of them."""

    def __init__(self, linears: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(16, 16) for _ in range(linears))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([linear(x) for linear in self.linears]).sum(0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module, Quantizer]:
    torch.manual_seed(0)
    model = _Wide(100).eval()
    quantizer = Quantizer(preset="plain", backend="openvino")
    quantizer.calibrate(model, [torch.randn(4, 16)], progress=False)
    return quantizer.save(tmp_path_factory.mktemp("wide") / "saved"), model, quantizer


def test_a_long_name_is_written_once(saved: tuple[Path, nn.Module, Quantizer]) -> None:
    folder, model, quantizer = saved
    text = (folder / "quantizer.yaml").read_text()
    (name,) = {operand.group for site in quantizer.plan.values() for operand in site.operands}
    assert name is not None
    assert len(name) > 200
    assert "".join(text.split()).count(name) == 1
    loaded = Quantizer.load(folder)
    assert {key: site.operands[0].group for key, site in loaded.plan.items()} == dict.fromkeys(quantizer.plan, name)
    x = torch.randn(4, 16)
    assert torch.equal(loaded.quantize(model)(x), quantizer.quantize(model)(x))


def test_it_is_in_bytes_too(saved: tuple[Path, nn.Module, Quantizer]) -> None:
    _, _, quantizer = saved
    document = {"config": {}, "fallback": None, "regions": None, "fingerprint": None, "scales_replaced": False}
    plan, _, _ = state_of_bytes(state_bytes(quantizer.plan, (), document), "bytes")
    assert plan.keys() == quantizer.plan.keys()
    assert all(
        [one.group for one in plan[key].operands] == [one.group for one in site.operands]
        for key, site in quantizer.plan.items()
    )


def test_damaged_bytes_are_told(saved: tuple[Path, nn.Module, Quantizer]) -> None:
    document = {"config": {}, "fallback": None, "regions": None, "fingerprint": None, "scales_replaced": False}
    data = state_bytes(saved[2].plan, (), document)
    with pytest.raises(QuantizerError, match=r"^bytes: format 7, but this version reads format 1"):
        state_of_bytes(data.replace(b'"format": 1', b'"format": 7'), "bytes")
    tensors = load(data)
    name = next(name for name in tensors if name.endswith("scale"))
    with pytest.raises(QuantizerError, match=r"^bytes is damaged: the SHA-256 of its ranges differs"):
        state_of_bytes(save({**tensors, name: tensors[name] * 2}), "bytes")


def test_a_short_name_stands_where_it_belongs(tmp_path: Path) -> None:
    quantizer = Quantizer(preset="plain", backend="openvino")
    quantizer.calibrate(_Wide(2).eval(), [torch.randn(4, 16)], progress=False)
    document = yaml.safe_load((quantizer.save(tmp_path / "saved") / "quantizer.yaml").read_text())
    assert "long_groups" not in document
    groups = {operand["group"] for site in document["sites"] for operand in site["operands"]}
    assert groups == {operand.group for site in quantizer.plan.values() for operand in site.operands}


def test_a_place_that_is_none(saved: tuple[Path, nn.Module, Quantizer], tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(saved[0], folder)
    document = yaml.safe_load((folder / "quantizer.yaml").read_text())
    document["sites"][0]["operands"][0]["group"] = 7
    (folder / "quantizer.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(QuantizerError, match=r"is damaged: group 7 of 'linears\.0\..*' is beyond the 1 long_groups"):
        Quantizer.load(folder)


def test_operands_that_are_no_list(saved: tuple[Path, nn.Module, Quantizer], tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(saved[0], folder)
    document = yaml.safe_load((folder / "quantizer.yaml").read_text())
    document["sites"][0]["operands"] = 7
    (folder / "quantizer.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(QuantizerError, match=r"is damaged: .*operands"):
        Quantizer.load(folder)
