"""A training step with rounded operands beside the float one and Model Optimizer's: time and memory.

    python benchmarks/training_speed.py [ROUNDS]

MiniLM with a mean of its output as the loss, 32 x 64, AdamW, one thread; the models take turns. Memory is what autograd
keeps from the forward to the backward pass, each storage once, with gradients and the optimizer's state beside it.
"""

from __future__ import annotations

import copy
import statistics
import sys
from collections.abc import Callable

import torch
from common import heading, minilm, stsb
from peers import model_optimizer
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.engines import interleaved_latency

BATCH, SEQUENCE = 32, 64


def stepper(model: nn.Module, batch: dict[str, Tensor]) -> Callable[[], None]:
    """One step on ``batch``."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6)

    def step() -> None:
        model(**batch)["last_hidden_state"].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def kept(model: nn.Module, batch: dict[str, Tensor]) -> int:
    """Bytes that a step holds: what the backward pass needs, and four times the parameters."""
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(**batch)["last_hidden_state"].square().mean()
    del loss
    parameters = sum(p.nbytes for p in model.parameters())
    return 4 * parameters + sum(size for place, size in storages.items() if place not in own)


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    model, task = minilm()
    batches = task.batches(stsb("train", 64))
    batch = task.random_batch(BATCH, SEQUENCE)
    placements = {
        "linears": {"matmul": False, "residual_add": False},
        "linears and matmuls": {"residual_add": False},
        "every kind of site": {"residual_add": True},
    }
    models = {"float": copy.deepcopy(model).train()}
    for scales in ("fixed", "learned"):
        for name, sites in placements.items():
            quantizer = Quantizer(preset="plain", backend="tensorrt", sites=sites)
            quantizer.calibrate(model, batches, progress=False)
            models[f"ours, {name}, {scales} scales"] = quantizer.qat(model, scales=scales, copy=True).train()
    for name, matmuls in (("linears", False), ("linears and matmuls", True)):
        models[f"Model Optimizer, {name}"] = model_optimizer(model, batches, matmuls=matmuls).train()
    print(heading(f"A training step: MiniLM-L6, {BATCH} x {SEQUENCE}, one thread"))
    steps = {name: stepper(one, batch) for name, one in models.items()}
    samples = interleaved_latency(steps, rounds=rounds, warmup=1)
    print("| model | ms | to float | MB | to float |\n|---|---|---|---|---|")
    base = kept(models["float"], batch)
    for name, seconds in samples.items():
        ratio = statistics.median(one / other for one, other in zip(seconds, samples["float"], strict=True))
        size = kept(models[name], batch)
        print(
            f"| {name} | {statistics.median(seconds) * 1000:.0f} | {ratio:.2f} | {size / 1e6:.0f} | {size / base:.2f} |"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 7)
