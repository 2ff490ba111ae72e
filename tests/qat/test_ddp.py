"""Two processes train as one does with the joint batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Mlp
from outside import run_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from quantizer import Quantizer
from quantizer.algorithms.qat import Schedule

KINDS = ("fixed", "learned", "average", "first batches")


class Attends(nn.Module):
    """Linears that read one tensor, products of activations, residual adds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.last = nn.Linear(32, 32), nn.Linear(32, 32), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2) / 32**0.5
        return self.last(scores.softmax(-1) @ x)


def _batches() -> list[Tensor]:
    """Of one row for each of two processes; the second row is the larger."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 16, 32, generator=generator) * torch.tensor([1.0, 1.5])[:, None, None] for _ in range(3)]


def _trained(kind: str, rank: int | None) -> dict[str, Tensor]:
    """Gradients of the first step, all that three steps made of the proxy, and what ``quantize`` gives.

    Args:
        kind: of scales; ``first batches``: fixed, and nothing is calibrated before.
        rank: whose row of each batch is taken; None: both, in one process.
    """
    model, q = Attends().train(), Quantizer(preset="plain", backend="openvino", sites={"residual_add": True})
    rows = slice(None) if rank is None else slice(rank, rank + 1)
    scales: Any = "fixed"
    if kind != "first batches":
        scales = kind
        q.calibrate(model, [batch[rows] for batch in _batches()], progress=False)
    proxy = q.qat(model, scales=scales)
    schedule = Schedule(proxy, 3, freeze_scales=0.6)
    trained = proxy if rank is None else DistributedDataParallel(proxy)
    optimizer = torch.optim.SGD(proxy.parameters(), lr=0.1)
    found = {}
    for step, batch in enumerate(_batches()):
        optimizer.zero_grad()
        trained(batch[rows]).square().mean().backward()
        if step == 0:
            found |= {f"gradient {name}": p.grad.clone() for name, p in proxy.named_parameters() if p.grad is not None}
        optimizer.step()
        schedule.at(step + 1)
    found |= {f"state {name}": value.clone() for name, value in proxy.state_dict().items()}
    frozen = q.quantize(model)
    return {**found, "output": frozen(_batches()[0]).detach(), **q.scales()}


def _work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for kind in KINDS:
        save_file(_trained(kind, rank), f"{folder}/{kind}-{rank}.safetensors")
    # Together: gloo may abort a process whose peer is gone while its threads end.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each of two processes made of it, with its row of each batch."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(_work, folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_what_one_process_does(ranks: Path, kind: str) -> None:
    first, second = (load_file(ranks / f"{kind}-{rank}.safetensors") for rank in range(2))
    assert first.keys() == second.keys()
    assert all(torch.equal(second[name], value) for name, value in first.items())
    expected = _trained(kind, None)
    assert expected.keys() == first.keys()
    largest = max(value.abs().max() for name, value in expected.items() if name.startswith("gradient"))
    for name, value in expected.items():
        if not value.is_floating_point():
            assert torch.equal(first[name], value), name
            continue
        gap, size = (first[name] - value).abs().max(), value.abs().max()
        if name.startswith("gradient"):
            # The key's bias has none, but for what rounding leaves.
            assert gap <= 1e-6 * torch.maximum(size, largest / 10), name
        else:
            # After a step, a value at the border between two steps of a format goes either way.
            assert gap <= 1e-3 * size.clamp_min(1e-3), name
