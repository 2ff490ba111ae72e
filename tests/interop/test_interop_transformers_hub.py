"""``push_to_hub`` of a quantized model, against a hub that is a folder."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import assert_same, batch, tiny

from quantizer import QuantizerConfig
from quantizer.errors import ProxyError

tf = pytest.importorskip("transformers", reason="the plug-in is for transformers: install enginequant[hf]")
pytest.importorskip("jinja2", reason="transformers makes its card with it: install enginequant[report]")
hub = importlib.import_module("transformers.utils.hub")
plugin = importlib.import_module("quantizer.integrations.transformers.plugin")

TEXT = batch("bert")
AUTO = tf.AutoModelForSequenceClassification


class _Hub:
    """Stands in for the hub: a repository is a folder."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def create_repo(self, repo_id: str, **_: Any) -> SimpleNamespace:
        (self.place / repo_id).mkdir(parents=True, exist_ok=True)
        return SimpleNamespace(repo_id=repo_id)

    def create_commit(self, *, repo_id: str, operations: list[Any], **_: Any) -> str:
        for operation in operations:
            (self.place / repo_id / operation.path_in_repo).write_bytes(Path(operation.path_or_fileobj).read_bytes())
        return "done"


@pytest.fixture
def pushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the hub keeps repositories in."""
    here = _Hub(tmp_path / "hub")
    monkeypatch.setattr(hub, "hf_api", lambda: here)

    def no_card(*_: Any, **__: Any) -> None:
        raise hub.EntryNotFoundError("no card yet")

    monkeypatch.setattr(hub.ModelCard, "load", no_card)
    monkeypatch.setattr(hub.ModelCard, "validate", lambda *_, **__: None)
    return here.place


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """A calibrated float classifier with a ``Quantizer``."""
    tiny("bert-classification").save_pretrained(tmp_path / "float")
    found = AUTO.from_pretrained(tmp_path / "float", quantization_config=QuantizerConfig(backend="openvino"))
    plugin.quantizer_of(found).calibrate(found, [TEXT], progress=False)
    return found


def test_what_is_pushed_loads_bit_for_bit_and_has_tags(model: Any, pushed: Path, tmp_path: Path) -> None:
    frozen = plugin.quantizer_of(model).quantize(model)
    frozen.push_to_hub("me/mine")
    frozen.save_pretrained(tmp_path / "saved")
    files = {path.name for path in (pushed / "me/mine").iterdir()}
    assert files == {path.name for path in (tmp_path / "saved").iterdir()} | {"README.md"}
    card = (pushed / "me/mine/README.md").read_text(encoding="utf-8")
    assert "- quantizer\n- int8\n" in card
    again = AUTO.from_pretrained(pushed / "me/mine")
    assert again.hf_quantizer.frozen
    assert_same(again(**TEXT), frozen(**TEXT))
    # A model that was loaded quantized is pushed as it is, too.
    again.push_to_hub("me/again")
    once_more = AUTO.from_pretrained(pushed / "me/again")
    assert torch.equal(once_more(**TEXT).logits, again(**TEXT).logits)
    assert "- quantizer\n" in (pushed / "me/again/README.md").read_text(encoding="utf-8")


def _unfrozen(model: Any) -> Any:
    return plugin.quantizer_of(model).amp(model)


def _out_of_date(model: Any) -> Any:
    q = plugin.quantizer_of(model)
    old = q.quantize(model)
    amp = q.amp(model)
    amp(**TEXT)
    q.fallback(amp, num=1)
    return old


@pytest.mark.parametrize("make", [_unfrozen, _out_of_date])
def test_nothing_is_uploaded_of_a_proxy_that_is_not_what_quantize_gave(
    make: Callable[[Any], Any], model: Any, pushed: Path
) -> None:
    with pytest.raises(ProxyError, match="needs the latest result of quantize"):
        make(model).push_to_hub("me/wrong")
    assert not list((pushed / "me/wrong").iterdir())
