"""A proxy in training under what loops are made of: accelerate, torch.compile, checkpointing, autocast, clipping."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrated import make_calibrated
from helpers import assert_same, batch, tiny
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.errors import TrainingError

pytest.importorskip("transformers")

KINDS = ("fixed", "average", "learned")
INPUTS = {**batch("bert-classification"), "labels": torch.tensor([0, 1, 2])}


def classifier(layers: int = 2) -> nn.Module:
    """In train mode, without dropout, so that two runs are the same."""
    model: Any = tiny("bert-classification", train=True)
    model.bert.encoder.layer = model.bert.encoder.layer[:layers]
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def calibrated(model: nn.Module, **config: Any) -> Quantizer:
    return make_calibrated(
        model, [batch("bert-classification")], backend="openvino", sites={"residual_add": True}, **config
    )


def gradients(proxy: nn.Module, runs: Any = None) -> dict[str, Tensor]:
    """Those of the loss, and the loss, of a proxy or of what was made of it."""
    proxy.zero_grad()
    loss = (proxy if runs is None else runs)(**INPUTS).loss
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in proxy.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    """They differ by no more than a share of the largest of each tensor, or of a hundredth of the largest of all."""
    assert found.keys() == expected.keys()
    largest = max(value.abs().max() for value in expected.values()) / 100
    for name, value in expected.items():
        gap = (found[name] - value).abs().max()
        assert gap <= bound * torch.maximum(value.abs().max(), largest), (name, gap)


# -- torch -------------------------------------------------------------------------------------------------------------


# Dynamo instantiates the functions that it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.nightly
def test_compiled() -> None:
    model = classifier(layers=1)
    proxy = calibrated(model).qat(model, scales="learned")
    expected = gradients(proxy)
    torch._dynamo.reset()
    compiled = torch.compile(proxy, backend="aot_eager", fullgraph=True)
    assert_close(gradients(proxy, compiled), expected, bound=1e-5)


def compute_again(model: Any, reentrant: bool) -> None:
    # The name that later releases of transformers know.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})


@pytest.mark.parametrize(("reentrant", "before"), [(False, False), (False, True), (True, False), (True, True)])
def test_layers_computed_again(reentrant: bool, before: bool) -> None:
    model = classifier()
    q = calibrated(model)
    expected = gradients(q.qat(model, scales="learned", copy=True))
    if before:
        compute_again(model, reentrant)
    proxy = q.qat(model, scales="learned")
    if not before:
        compute_again(proxy, reentrant)
    # Each layer runs once more in the backward pass.
    runs = 0

    def count(*_: Any) -> None:
        nonlocal runs
        runs += 1

    layer = proxy.get_submodule("bert.encoder.layer.1")
    layer.get_submodule("output.dense").register_forward_hook(count)
    assert_same(gradients(proxy), expected)
    assert runs == 2


def test_gradients_that_add_up_and_are_clipped() -> None:
    model = classifier()
    proxy = calibrated(model).qat(model, scales="learned")
    once = gradients(proxy)
    del once["loss"]
    for _ in range(2):
        (proxy(**INPUTS).loss / 2).backward()
    twice = {name: p.grad - once[name] for name, p in proxy.named_parameters() if p.grad is not None}
    assert_close(twice, once, bound=1e-5)
    total = torch.nn.utils.clip_grad_norm_(proxy.parameters(), 1e-3)
    assert total > 1e-3
    clipped = torch.nn.utils.get_total_norm([p.grad for p in proxy.parameters() if p.grad is not None])
    assert clipped == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("how", ["foreach", "fused"])
def test_optimizers_for_many_tensors(how: str) -> None:
    results = []
    for options in ({how: True}, {"foreach": False}):
        model = classifier()
        proxy = calibrated(model).qat(model, scales="learned")
        optimizer = torch.optim.AdamW(proxy.parameters(), lr=1e-3, **options)
        gradients(proxy)
        optimizer.step()
        results.append({name: parameter.detach() for name, parameter in proxy.named_parameters()})
    assert_close(*results, bound=1e-5)


def test_bfloat16_by_autocast() -> None:
    model = classifier()
    proxy = calibrated(model).qat(model, scales="learned")
    expected = gradients(proxy)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = proxy(**INPUTS).loss
    proxy.zero_grad()
    loss.backward()
    found = {name: p.grad for name, p in proxy.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys() - {"loss"}
    names = [name for name in found if name.endswith("weight")]
    one, two = (torch.cat([of[name].flatten() for name in names]) for of in (found, expected))
    assert torch.nn.functional.cosine_similarity(one, two, dim=0) > 0.95


# -- accelerate --------------------------------------------------------------------------------------------------------


def step(proxy: nn.Module, optimizer: Any, accelerator: Any) -> None:
    accelerator.backward(proxy(**INPUTS).loss)
    accelerator.clip_grad_norm_(proxy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("scales", KINDS)
def test_accelerate(scales: Any, tmp_path: Path) -> None:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    model = classifier()
    q = calibrated(model)
    weight = model.get_parameter("classifier.weight").detach().clone()
    proxy = q.qat(model, scales=scales)
    prepared, optimizer = accelerator.prepare(proxy, torch.optim.AdamW(proxy.parameters(), lr=1e-3))
    step(prepared, optimizer, accelerator)
    assert not torch.equal(weight, model.get_parameter("classifier.weight"))
    accelerator.save_state(tmp_path)
    kept = copy.deepcopy(proxy.state_dict())
    step(prepared, optimizer, accelerator)
    then = copy.deepcopy(proxy.state_dict())
    accelerator.load_state(tmp_path)
    assert_same(proxy.state_dict(), kept)
    step(prepared, optimizer, accelerator)
    assert_same(proxy.state_dict(), then)
    assert_same(q.quantize(model)(**INPUTS), proxy.eval()(**INPUTS))

    other = classifier()
    proxy = calibrated(other, weights={"granularity": "per_tensor"}).qat(other)
    accelerator = type(accelerator)(cpu=True)
    accelerator.prepare(proxy, torch.optim.AdamW(proxy.parameters()))
    with pytest.raises(TrainingError, match="the checkpoint belongs to another configuration"):
        accelerator.load_state(tmp_path)
