"""A training that is interrupted and goes on from its checkpoint, in a loop of the user's own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from daily import some_daily
from helpers import ConvNet, assert_same
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.algorithms.qat import Schedule

STEPS = 6


def images(seed: int) -> Tensor:
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def start() -> tuple[Quantizer, nn.Module]:
    torch.manual_seed(0)
    model, q = ConvNet().train(), Quantizer(preset="plain", backend="openvino", sites={"residual_add": True})
    q.calibrate(model, [images(100)], progress=False)
    return q, model


class Loop:
    """A proxy, its optimizer and its schedule: scales move until step 4, statistics of batch norms until step 3."""

    def __init__(self, q: Quantizer, model: nn.Module, scales: Any) -> None:
        self.proxy = q.qat(model, scales=scales)
        self.optimizer = torch.optim.AdamW(self.proxy.parameters(), lr=0.01)
        self.schedule = Schedule(self.proxy, STEPS, freeze_scales=4 / STEPS, freeze_batch_norm=3 / STEPS)

    def run(self, first: int, last: int) -> None:
        self.schedule.at(first)
        for step in range(first, last):
            torch.manual_seed(step)
            self.proxy.train()
            self.optimizer.zero_grad()
            self.proxy(images(step)).square().mean().backward()
            self.optimizer.step()
            self.schedule.at(step + 1)

    def save(self, path: Path) -> None:
        torch.save({"proxy": self.proxy.state_dict(), "optimizer": self.optimizer.state_dict()}, path)

    def load(self, path: Path) -> None:
        kept = torch.load(path, weights_only=True)
        self.proxy.load_state_dict(kept["proxy"])
        self.optimizer.load_state_dict(kept["optimizer"])


@pytest.mark.parametrize("interrupted", [2, 5], ids=["before-freezing", "after-freezing"])
@pytest.mark.parametrize("scales", some_daily(["learned", "fixed", "average"], 1))
def test_a_loop_goes_on_where_it_was(scales: Any, interrupted: int, tmp_path: Path) -> None:
    q, model = start()
    whole = Loop(q, model, scales)
    whole.run(0, STEPS)

    other, stopped = start()
    other.save(tmp_path / "quantizer")
    loop = Loop(other, stopped, scales)
    loop.run(0, interrupted)
    loop.save(tmp_path / "checkpoint.pt")
    kept = copy.deepcopy(loop.proxy.state_dict())

    # All that a new process would have: the files, and the model as it was before the training.
    _, fresh = start()
    loaded = Quantizer.load(tmp_path / "quantizer")
    resumed = Loop(loaded, fresh, scales)
    resumed.load(tmp_path / "checkpoint.pt")
    assert_same(resumed.proxy.state_dict(), kept)
    resumed.run(interrupted, STEPS)
    assert_same(resumed.proxy.state_dict(), whole.proxy.state_dict())
    assert_same(loaded.quantize(fresh)(images(50)), q.quantize(model)(images(50)))
    assert not torch.equal(kept["head.weight"], fresh.state_dict()["head.weight"])


def test_ranges_of_a_checkpoint_count(tmp_path: Path) -> None:
    """Without the saved quantizer: another calibration of the same configuration takes the checkpoint's ranges."""
    q, model = start()
    loop = Loop(q, model, "fixed")
    loop.run(0, 2)
    loop.save(tmp_path / "checkpoint.pt")
    _, fresh = start()
    other = Quantizer(preset="plain", backend="openvino", sites={"residual_add": True})
    other.calibrate(fresh, [images(7) * 2], progress=False)
    before = other.scales()
    assert not torch.equal(before["head.forward.linear_0.input"], q.scales()["head.forward.linear_0.input"])
    resumed = Loop(other, fresh, "fixed")
    resumed.load(tmp_path / "checkpoint.pt")
    assert_same(other.scales(), q.scales())
    assert_same(other.quantize(fresh)(images(50)), q.quantize(model)(images(50)))
