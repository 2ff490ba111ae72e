"""Folders of quantized transformers models that are not what they should be: each refused, with the way to go."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same, batch, tiny
from safetensors.torch import load, save
from torch import nn

from quantizer import QuantizerConfig
from quantizer.errors import ConfigError, ProxyError, QuantizerError

tf = pytest.importorskip("transformers", reason="the plug-in is for transformers: install enginequant[hf]")
plugin = importlib.import_module("quantizer.integrations.transformers.plugin")

TEXT = batch("bert")
WEIGHTS = "model.safetensors"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``save_pretrained`` wrote for a quantized classifier; beside it, in ``float``, the float one."""
    place = tmp_path_factory.mktemp("folder")
    tiny("bert-classification").save_pretrained(place / "float")
    config = QuantizerConfig(backend="openvino")
    model = tf.AutoModelForSequenceClassification.from_pretrained(place / "float", quantization_config=config)
    q = plugin.quantizer_of(model)
    q.calibrate(model, [TEXT], progress=False)
    q.quantize(model).save_pretrained(place / "int8")
    return place / "int8"


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(folder, tmp_path / "copied"))


def loaded(path: Path, auto: str = "AutoModelForSequenceClassification", **keywords: Any) -> nn.Module:
    model: nn.Module = getattr(tf, auto).from_pretrained(path, **keywords)
    return model


def edit_config(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))


def edit_weights(path: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load((path / WEIGHTS).read_bytes())
    change(tensors)
    (path / WEIGHTS).write_bytes(save(tensors, {"format": "pt"}))


def _quantization(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda config: config["quantization_config"].update(changes)


CONFIGS: dict[str, tuple[Callable[[dict[str, Any]], object], type[Exception], str]] = {
    "unknown field": (_quantization(bakend="openvino"), ConfigError, "bakend: unknown key; .*did you mean 'backend'"),
    "two fields": (
        _quantization(quantized="yes", dtype="int7"),
        ConfigError,
        r"2 problems.*\n.*quantized: got 'yes'; expected true or false\n.*quantization_config: dtype: got.*'int7'",
    ),
    "another backend": (_quantization(backend="tensorrt"), QuantizerError, "differs from that of model.safetensors"),
    "not said": (
        lambda config: config["quantization_config"].pop("quantized"),
        QuantizerError,
        r"holds a quantized model, but the config\.json beside it has no quantization_config; restore",
    ),
    "fewer layers": (
        lambda config: config.update(num_hidden_layers=1),
        ProxyError,
        r"has other sites: \d+ differ, the first is 'bert\.encoder\.layer\.1\..*with the config\.json and the version",
    ),
}


@pytest.mark.parametrize("fault", CONFIGS)
def test_a_config_that_is_not_the_folders(copied, fault):
    change, error, message = CONFIGS[fault]
    edit_config(copied, change)
    with pytest.raises(error, match=message):
        loaded(copied)


def _missing(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(f"bert.encoder.layer.0.output.dense.{name}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(_missing("site_forward_linear_0._weight_quantizer.stored"), "1 tensors of quantized", id="weight"),
        pytest.param(_missing("site_forward_linear_0._input_quantizer.scale"), "1 tensors of quantized", id="scale"),
        pytest.param(_missing("bias"), "1 tensors of quantized operations are missing there; copy it again", id="bias"),
        pytest.param(lambda tensors: tensors.pop("quantizer_state"), r"is that of a quantized model", id="no-state"),
        pytest.param(
            lambda tensors: tensors.update(quantizer_state=tensors["quantizer_state"][:-9]),
            r"model\.safetensors is damaged: ",
            id="broken-state",
        ),
        pytest.param(
            lambda tensors: tensors.update(
                quantizer_state=torch.frombuffer(bytearray(save({"document": torch.zeros(0)})), dtype=torch.uint8)
            ),
            r"model\.safetensors is damaged: ",
            id="empty-state",
        ),
    ],
)
def test_weights_that_are_not_all_there(copied, change, message):
    edit_weights(copied, change)
    with pytest.raises(QuantizerError, match=message):
        loaded(copied)


@pytest.mark.parametrize("data", [b"", b"x" * 1000, None], ids=["empty", "other", "cut"])
def test_a_damaged_file(copied, data):
    whole = (copied / WEIGHTS).read_bytes()
    (copied / WEIGHTS).write_bytes(whole[:-100] if data is None else data)
    with pytest.raises(QuantizerError, match=r"model\.safetensors cannot be read: .*; copy it again"):
        loaded(copied)


def test_float_weights_under_a_quantized_config(copied, folder):
    shutil.copy(folder.parent / "float" / WEIGHTS, copied)
    with pytest.raises(QuantizerError, match=r"or remove quantization_config from config\.json to load a float model"):
        loaded(copied)


@pytest.mark.parametrize("auto", ["AutoModel", "AutoModelForTokenClassification"])
def test_another_class(folder, auto):
    with pytest.raises(ProxyError, match=r"has other sites: \d+ differ.*; load it as BertForSequenceClassification"):
        loaded(folder, auto)


def test_a_config_beside_that_of_the_folder(folder):
    with pytest.warns(UserWarning, match="The `quantization_config` from the model will be used"):
        model = loaded(folder, quantization_config=QuantizerConfig(backend="tensorrt"))
    assert plugin.quantizer_of(model).config.backend == "openvino"
    assert_same(model(**TEXT), loaded(folder)(**TEXT))
    with pytest.raises(ValueError, match="quantized with QuantizerConfig but you are passing a QuantoConfig"):
        loaded(folder, quantization_config=tf.QuantoConfig(weights="int8"))
