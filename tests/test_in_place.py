"""Quantizing in place: what is built inside the block, what stays outside, and what is restored."""

from __future__ import annotations

import copy
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantizer import QATCalibrate, Quantizer
from quantizer.errors import CalibrationError, ConfigError, ProxyError, SourceError
from quantizer.proxy.build import sites_of
from quantizer.rewrite import patched

transformers = pytest.importorskip("transformers", reason="needs enginequant[hf]")

IDS = torch.arange(2 * 12).reshape(2, 12) % 90
BATCH = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}

LONG = {name: torch.cat([value, value], dim=1) for name, value in BATCH.items()}


def bert(**keywords: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=90,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        attn_implementation="eager",
    )
    return transformers.BertForSequenceClassification(config, **keywords).eval()


class Net(nn.Module):
    """A model of the user's own that holds two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.second = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


class Inherits(Net):
    """Has no constructor of its own."""


class Holds(nn.Module):
    """Built of two patched models."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Net(), Inherits())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) @ x.mT


def constructors() -> dict[type, Any]:
    modules = [sys.modules[__name__], sys.modules["transformers.models.bert.modeling_bert"]]
    classes = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    return {cls: cls.__dict__.get("__init__") for cls in [*classes, nn.Linear, nn.Module, nn.Sequential]}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    bert()
    before = constructors()
    yield
    assert constructors() == before


def site_count(model: nn.Module) -> int:
    return sum(1 for _ in sites_of(model))


# -- patched -----------------------------------------------------------------------------------------------------------


def test_the_outermost_model_is_reported_once() -> None:
    seen: list[nn.Module] = []
    with patched(__name__, built=seen.append):
        model = Holds()
        alone = nn.Linear(2, 2)
    assert seen == [model]
    assert type(alone) is nn.Linear
    Net()
    assert seen == [model]


@pytest.mark.parametrize("source", [__name__, sys.modules[__name__], Net], ids=["name", "module", "class"])
def test_sources(source: Any) -> None:
    seen: list[nn.Module] = []
    with patched(source, built=seen.append):
        Inherits()
    assert [type(model) for model in seen] == [Inherits]


def test_every_imported_module_where_none_is_named() -> None:
    seen: list[nn.Module] = []
    with patched(built=seen.append):
        Net()
        bert()
    assert [type(model).__name__ for model in seen] == ["Net", "BertForSequenceClassification"]


def test_nested_and_entered_twice() -> None:
    outer: list[nn.Module] = []
    inner: list[nn.Module] = []
    block = patched(Net, built=outer.append)
    with block:
        with patched(Net, built=inner.append):
            first = Net()
        with block:
            second = Net()
        third = Net()
    Net()
    assert inner == [first]
    assert outer == [second, third]


def test_an_exception_in_the_block_and_one_in_a_constructor() -> None:
    seen: list[nn.Module] = []

    class Fails(Net):
        def __init__(self) -> None:
            super().__init__()
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"), patched(Net, built=seen.append):
        Fails()
    with patched(Net, built=seen.append):
        model = Net()
    # Fails is no class of the module, so Net's own constructor was the outermost that is patched.
    assert seen[-1] is model


def test_other_threads_stay_float() -> None:
    seen: list[nn.Module] = []
    made: list[nn.Module] = []
    with patched(Net, built=seen.append):
        thread = threading.Thread(target=lambda: made.append(Net()))
        thread.start()
        thread.join()
    assert not seen
    assert type(made[0]) is Net


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("torch.nn", "torch.nn is shared by the whole process and is never patched"),
        (nn.Linear, "torch.nn.modules.linear is shared by the whole process"),
        ("no_such_module_here", "'no_such_module_here' cannot be imported"),
        (3, "expected a module, its name, or a class derived from torch.nn.Module; got 3"),
        (types.ModuleType, "expected a module, its name, or a class"),
    ],
)
def test_sources_that_cannot_be(source: Any, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        patched(source, built=print)


# -- QATCalibrate ------------------------------------------------------------------------------------------------------


def test_a_model_built_inside_is_float_until_it_is_set_up_and_quantized_after() -> None:
    float_model = bert()
    with QATCalibrate(method="histogram", percentile=99.9) as qat:
        model = bert()
        assert site_count(model) > 10
        assert any(name.endswith("_input_quantizer") for name, _ in model.named_modules())
        reference = float_model(**BATCH).logits
        assert torch.equal(model(**BATCH).logits, reference)
        qat.setup_model_qat(model)
        assert torch.equal(model(**BATCH).logits, reference)
        model(**LONG)
    rounded = model(**BATCH).logits
    assert not torch.equal(rounded, reference)
    assert torch.allclose(rounded, reference, atol=0.1)
    assert {row.kind for row in qat.coverage(model).rows if row.quantized} >= {"linear", "matmul"}
    assert model.state_dict().keys() >= float_model.state_dict().keys()


def test_it_rounds_as_the_proxy_of_a_quantizer_does() -> None:
    with QATCalibrate(method="max", backend="openvino") as qat:
        model = bert()
        qat.setup_model_qat(model)
        model(**BATCH)
    quantizer = Quantizer(preset="plain", backend="openvino", activations={"calibrator": "max"})
    float_model = bert()
    quantizer.calibrate(float_model, [BATCH], progress=False)
    assert torch.equal(model(**BATCH).logits, quantizer.quantize(float_model)(**BATCH).logits)


def test_it_trains() -> None:
    with QATCalibrate() as qat:
        model = bert()
        qat.setup_model_qat(model)
        with torch.no_grad():
            model(**BATCH)
    model.train()
    model(**BATCH, labels=torch.tensor([0, 1])).loss.backward()
    weight = model.bert.encoder.layer[0].output.dense.weight
    assert weight.grad.abs().sum() > 0


@pytest.mark.usefixtures("exact_byte_products")
@pytest.mark.parametrize("backend", ["openvino", pytest.param("onnxruntime", marks=pytest.mark.nightly)])
def test_it_exports_with_the_same_export(tmp_path: Path, backend: Any) -> None:
    onnx = pytest.importorskip("onnx", reason="exporting needs enginequant[onnx]")
    pytest.importorskip(backend, reason=f"needs enginequant[{backend}]")
    from quantizer.engines import load_engine

    with QATCalibrate(backend=backend) as qat:
        model = bert()
        qat.setup_model_qat(model)
        model(**BATCH)
    path = Quantizer(preset="plain", backend=backend).export(model, tmp_path / "model.onnx", BATCH)
    graph = onnx.load(path).graph
    constants = {entry.name for entry in graph.initializer}
    assert not [node for node in graph.node if node.op_type == "QuantizeLinear" and node.input[0] in constants]
    got = load_engine(backend, path)({name: value.numpy() for name, value in BATCH.items()})["logits"]
    assert torch.allclose(torch.from_numpy(got), model(**BATCH).logits, atol=0.02)


def test_a_class_imported_by_name_before_and_a_model_loaded_from_a_folder(tmp_path: Path) -> None:
    from transformers import BertForSequenceClassification

    bert().save_pretrained(tmp_path)
    with QATCalibrate("transformers.models.bert.modeling_bert") as qat:
        model = BertForSequenceClassification.from_pretrained(tmp_path)
        qat.setup_model_qat(model)
        model(**BATCH)
    assert sum(site.active for site in sites_of(model)) > 10
    assert type(BertForSequenceClassification.from_pretrained(tmp_path)) is BertForSequenceClassification


def test_models_outside_stay_float() -> None:
    before = bert()
    reference = before(**BATCH).logits
    with QATCalibrate() as qat:
        model = bert()
        assert torch.equal(before(**BATCH).logits, reference)
        qat.setup_model_qat(model)
        model(**BATCH)
    assert site_count(before) == site_count(bert()) == 0
    assert torch.equal(before(**BATCH).logits, reference)


def test_a_model_built_before_can_be_set_up_too() -> None:
    model = Holds()
    x = torch.randn(2, 32, 32)
    with QATCalibrate() as qat:
        qat.setup_model_qat(model)
        model(x)
    names = [site.path for site in sites_of(model) if site.active]
    assert "inner.0.first.forward.linear_0" in names
    assert "forward.matmul_0" in names


def test_parts_built_inside_get_the_names_of_the_whole() -> None:
    with QATCalibrate(Net) as qat:
        model = nn.Sequential(Net(), Inherits())
        qat.setup_model_qat(model)
        model(torch.randn(2, 32))
    assert sorted(site.path for site in sites_of(model) if site.active) == [
        f"{part}.{linear}.forward.linear_0" for part in (0, 1) for linear in ("first", "second")
    ]


def test_an_exception_leaves_the_model_float() -> None:
    models = []

    def interrupted() -> None:
        with QATCalibrate() as qat:
            models.append(bert())
            qat.setup_model_qat(models[0])
            models[0](**BATCH)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        interrupted()
    model = models[0]
    assert torch.equal(model(**BATCH).logits, bert()(**BATCH).logits)
    assert not any(site.active or site.observer for site in sites_of(model))


def test_a_copy_rounds_as_well() -> None:
    with QATCalibrate() as qat:
        model = bert()
        qat.setup_model_qat(model)
        model(**BATCH)
    assert torch.equal(copy.deepcopy(model)(**BATCH).logits, model(**BATCH).logits)


def test_excluded_sites_stay_float() -> None:
    with QATCalibrate(exclude={"names": ["classifier"]}) as qat:
        model = bert()
        qat.setup_model_qat(model)
        model(**BATCH)
    assert not any(site.active for site in sites_of(model.classifier))


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match="calibrator: got the text 'histogramm'"):
        QATCalibrate(method="histogramm")  # type: ignore[arg-type]
    qat = QATCalibrate()
    with pytest.raises(ProxyError, match="must be called inside the with block"):
        qat.setup_model_qat(bert())
    with qat:
        model = bert()
        with pytest.raises(ProxyError, match=r"expected a torch\.nn\.Module, got int"):
            qat.setup_model_qat(3)  # type: ignore[arg-type]
        qat.setup_model_qat(model)
        with pytest.raises(ProxyError, match="is already being calibrated"):
            qat.setup_model_qat(model)
        with pytest.raises(CalibrationError, match="this model has no ranges: call setup_model_qat"):
            qat.coverage(model)
        model(**BATCH)
    with pytest.raises(CalibrationError, match="no data went through the BertForSequenceClassification"), qat:
        qat.setup_model_qat(bert())


def test_where_one_model_fails_none_rounds() -> None:
    class Odd(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.linear = nn.Linear(size, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    blocks = [{"activations": "float", "weights": "int4", "block_size": 16}]
    first, second = Odd(32), Odd(24)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = first(x)
        qat = QATCalibrate(method="max", backend="tensorrt", formats=blocks)
        qat.__enter__()
        qat.setup_model_qat(first)
        qat.setup_model_qat(second)
        first(x)
        second(x[:, :24])
        with pytest.raises(ConfigError, match=r"block_size 16 does not divide the 24"):
            qat.__exit__(None, None, None)
        assert torch.equal(first(x), expected)
    assert not any(site.active for site in sites_of(first))
    with pytest.raises(CalibrationError, match="this model has no ranges"):
        qat.coverage(first)
