"""Low-rank adapters (peft) over rounded weights: trained, resumed, merged and quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from calibrated import make_calibrated
from helpers import assert_same, batch, tiny
from torch import nn

from quantizer import Quantizer
from quantizer.errors import TrainingError

peft = pytest.importorskip("peft")
trainers = pytest.importorskip("trainers")

# peft asks transformers by a name that the next release drops.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

INPUTS = batch("bert-classification")


def adapted() -> nn.Module:
    """A classifier whose queries and values have adapters; those and the head are trained."""
    config = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
    model: nn.Module = peft.get_peft_model(tiny("bert-classification", train=True), config)
    return model.train()


def calibrated(model: nn.Module) -> Quantizer:
    # What is merged later is not rounded by itself.
    return make_calibrated(model, [INPUTS], backend="openvino", exclude={"names": ["**.lora_*.**"]})


@pytest.fixture
def trained(tmp_path: Path) -> tuple[nn.Module, nn.Module, Any]:
    """The adapted model, its proxy after 8 steps of the Trainer, and the Trainer."""
    model = adapted()
    q = calibrated(model)
    q.save(tmp_path / "quantizer")
    proxy = q.qat(model)
    trainer = trainers.trainer(proxy, tmp_path / "run")
    trainer.train()
    return model, proxy.eval(), trainer


def test_adapters_are_trained_over_rounded_weights(trained: tuple[nn.Module, nn.Module, Any]) -> None:
    model, proxy, _ = trained
    fresh, moved = adapted().state_dict(), set()
    for name, value in model.state_dict().items():
        if not torch.equal(value, fresh[name]):
            moved.add(name)
    assert moved
    assert all("lora_" in name or "classifier" in name for name in moved)
    with torch.no_grad():
        merged = model.eval().merge_and_unload()
        expected = merged(**INPUTS).logits
        q = Quantizer(preset="plain", backend="openvino")
        q.calibrate(merged, [INPUTS], progress=False)
        found = q.quantize(merged)(**INPUTS).logits
    assert not torch.equal(found, expected)
    assert nn.functional.cosine_similarity(found.flatten(), expected.flatten(), dim=0) > 0.99
    assert nn.functional.cosine_similarity(found.flatten(), proxy(**INPUTS).logits.flatten(), dim=0) > 0.99


@pytest.mark.nightly
def test_a_resumed_training_of_adapters(trained: tuple[nn.Module, nn.Module, Any], tmp_path: Path) -> None:
    _, proxy, trainer = trained
    q, model = Quantizer.load(tmp_path / "quantizer"), adapted()
    resumed = trainers.trainer(q.qat(model), tmp_path / "run")
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-6"))
    assert_same(resumed.model.state_dict(), proxy.state_dict())
    history = [[entry["loss"] for entry in of.state.log_history if "loss" in entry] for of in (resumed, trainer)]
    assert history[0] == history[1]


@pytest.mark.parametrize("scales", [pytest.param("average", marks=pytest.mark.nightly), "learned"])
def test_scales_that_move_are_in_no_checkpoint_of_adapters(scales: Any, tmp_path: Path) -> None:
    model = adapted()
    proxy = calibrated(model).qat(model, scales=scales)
    with pytest.raises(TrainingError, match=r"would lack the trained scales.*scales='fixed'.*save_strategy='no'"):
        trainers.trainer(proxy, tmp_path).train()
    trainers.trainer(proxy, tmp_path, save_strategy="no", max_steps=1).train()
