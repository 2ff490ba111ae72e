"""The whole way with the model on a GPU: proxies, calibration, sensitivity, training in bfloat16, several GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrated import make_calibrated
from helpers import batch
from helpers import tiny
from torch import Tensor
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from quantizer import Quantizer
from quantizer.tasks.metrics import sqnr_db

pytestmark = pytest.mark.gpu

Inputs = dict[str, Tensor]


@pytest.fixture
def device() -> str:
    """The GPU."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU is here")
    return "cuda"


def _batches(device: str) -> list[Inputs]:
    return [{name: value.to(device) for name, value in batch("bert", seed=seed).items()} for seed in range(4)]


def _model(device: str) -> nn.Module:
    return tiny("bert").to(device)


def _hidden(model: nn.Module, inputs: Inputs) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**inputs).last_hidden_state
    return found


def test_a_proxy_that_is_off_is_the_model_bit_for_bit(device: str) -> None:
    model = _model(device)
    inputs = _batches(device)[0]
    proxy = Quantizer(backend="openvino").calib(model)
    assert torch.equal(_hidden(proxy, inputs), _hidden(model, inputs))


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_calibration_and_the_frozen_model_are_those_of_a_cpu(device: str, dtype: str) -> None:
    backend = "openvino" if dtype == "int8" else "tensorrt"
    here = make_calibrated(_model("cpu"), _batches("cpu"), backend=backend, dtype=dtype)
    there = make_calibrated(_model(device), _batches(device), backend=backend, dtype=dtype)
    scales = there.scales()
    assert scales.keys() == here.scales().keys()
    for name, value in here.scales().items():
        # Products of a GPU add in another order, with TF32 switched off by default.
        torch.testing.assert_close(scales[name].cpu(), value, rtol=1e-3, atol=1e-6, msg=name)
    frozen, expected = there.quantize(_model(device)), here.quantize(_model("cpu"))
    found = _hidden(frozen, _batches(device)[0])
    assert found.device.type == device
    assert sqnr_db(_hidden(expected, _batches("cpu")[0]).numpy(), found.cpu().numpy()) > 25


def test_sensitivity_ranks_as_on_a_cpu(device: str) -> None:
    ranked = {}
    for place in ("cpu", device):
        model = _model(place)
        q = make_calibrated(model, _batches(place), backend="openvino", sites={"residual_add": True})
        amp = q.amp(model)
        for inputs in _batches(place)[:2]:
            _hidden(amp, inputs)
        q.fallback(amp, num=2)
        ranked[place] = [row.group for row in q.sensitivity]
        assert len(q.fallback(amp, num=2).groups) == 2
    assert set(ranked[device]) == set(ranked["cpu"])
    assert set(ranked[device][:2]) & set(ranked["cpu"][:3])


def test_training_in_bfloat16_lowers_the_loss(device: str) -> None:
    model = _model(device).train()
    q = make_calibrated(tiny("bert").to(device), _batches(device), backend="openvino")
    proxy = q.qat(model, scales="learned")
    target = torch.randn_like(_hidden(model, _batches(device)[0]))
    optimizer = torch.optim.AdamW(proxy.parameters(), lr=5e-3)
    losses = []
    for _ in range(20):
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = (proxy(**_batches(device)[0]).last_hidden_state - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    frozen = q.quantize(model)
    assert torch.isfinite(_hidden(frozen, _batches(device)[0])).all()


def _in_ranks(rank: int, world: int, device: str, folder: str) -> None:
    """Calibrate on a share of the batches, train a step, and write the plan and the checksum of the parameters."""
    kind = "nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(kind, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    place = f"cuda:{rank}" if device == "cuda" else device
    if device == "cuda":
        torch.cuda.set_device(rank)
    model = tiny("bert").to(place)
    q = make_calibrated(model, _batches(place)[rank::world], backend="openvino")
    scales = {name: value.flatten().tolist() for name, value in q.scales().items()}
    # The pooler gets no gradient here.
    proxy = DistributedDataParallel(q.qat(model), find_unused_parameters=True)
    optimizer = torch.optim.SGD(proxy.parameters(), lr=0.01)
    proxy(**_batches(place)[rank]).last_hidden_state.square().mean().backward()
    optimizer.step()
    total = float(sum(parameter.double().sum() for parameter in proxy.parameters()))
    told: dict[str, Any] = {"scales": scales, "parameters": total}
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(told), encoding="utf-8")
    torch.distributed.destroy_process_group()


def test_ranks_have_one_plan_and_one_model(device: str, tmp_path: Path) -> None:
    world = max(torch.cuda.device_count(), 1)
    work: Callable[..., None] = _in_ranks
    torch.multiprocessing.spawn(work, (world, device, str(tmp_path)), nprocs=world)
    told = [json.loads((tmp_path / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(world)]
    assert all(one == told[0] for one in told)
    alone = make_calibrated(tiny("bert").to(device), _batches(device), backend="openvino").scales()
    for name, values in told[0]["scales"].items():
        torch.testing.assert_close(torch.tensor(values), alone[name].flatten().cpu(), rtol=1e-3, atol=1e-6)
