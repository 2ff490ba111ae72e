"""Counts of the operations of calibration that keep a GPU waiting, counted on a CPU.

    python benchmarks/synchronisations.py [--layers N]

A read of a value, a boolean index and a copy to the CPU wait until the GPU has computed all operations before them.
The script marks the parameters, the inputs and all results of operations on them as values of a GPU, and counts these
waits. It also counts the kernels that would be launched. Both do not depend on the width of the model, which is small.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import BertConfig, BertModel

from quantizer import Quantizer
from quantizer.utils import devices

Batch = Mapping[str, Tensor]

_WAITS = {
    # bincount reads the smallest and the largest value.
    "aten::_local_scalar_dense": 1,
    "aten::nonzero": 1,
    "aten::equal": 1,
    "aten::masked_select": 1,
    "aten::is_nonzero": 1,
    "aten::bincount": 2,
}
"""The waits in an operator on a GPU."""

_WITHOUT_KERNEL = ("aten::detach", "aten::_local_scalar_dense", "aten::empty_like")


class Counts(TorchDispatchMode):
    """The operations on values that a GPU would hold.

    Attributes:
        waits: the waits, by operator.
        kernels: the operators that launch kernels.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        result = func(*args, **keywords)
        if any(isinstance(value, Tensor) and _is_marked(value) for value in tree_leaves((args, keywords))):
            name = func._schema.name
            self.kernels += not func.is_view and name not in _WITHOUT_KERNEL
            waits = _WAITS.get(name, 0)
            if name in ("aten::index", "aten::index_put_"):
                waits = sum(isinstance(index, Tensor) and index.dtype is torch.bool for index in args[1])
            if waits:
                self.waits[name] += waits
            mark(result)
        return result


def _is_marked(value: Tensor) -> bool:
    return bool(getattr(value, "on_gpu", False))


def mark(values: Any) -> None:
    """Treat tensors as values of a GPU."""
    for value in tree_leaves(values):
        if isinstance(value, Tensor):
            value.on_gpu = True  # type: ignore[attr-defined]


@contextmanager
def counted() -> Iterator[Counts]:
    """Count the operations in the block on tensors that ``mark`` marked, and on all results of them."""
    counts, methods = Counts(), {name: getattr(Tensor, name) for name in ("cpu", "tolist", "numpy")}

    def waiting(name: str) -> Any:
        def method(self: Tensor, *args: Any, **keywords: Any) -> Any:
            if not _is_marked(self):
                return methods[name](self, *args, **keywords)
            counts.waits[f"Tensor.{name}"] += 1
            copied = self.detach().clone()
            copied.on_gpu = False  # type: ignore[attr-defined]
            return copied if name == "cpu" else methods[name](copied, *args, **keywords)

        return method

    is_apart = devices.is_apart
    try:
        for name in methods:
            setattr(Tensor, name, waiting(name))
        devices.is_apart = lambda device: True
        with counts:
            yield counts
    finally:
        devices.is_apart = is_apart
        for name, method in methods.items():
            setattr(Tensor, name, method)


def of_calibration(model: nn.Module, batches: list[Batch], **settings: Any) -> Counts:
    """Return the counts of a calibration with the plan and the frozen model."""
    mark([*model.parameters(), *model.buffers(), batches])
    quantizer = Quantizer(**settings)
    with counted() as counts:
        quantizer.calibrate(model, batches, progress=False)
        quantizer.quantize(model)
    return counts


def _batch(seed: int) -> Batch:
    ids = torch.randint(0, 500, (8, 16), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[:, -1] = 0
    return {"input_ids": ids, "attention_mask": mask}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    layers = parser.parse_args().layers
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256, "vocab_size": 500}
    print("| preset | waits for the GPU | kernels |\n|---|---|---|")
    for preset in ("plain", "balanced", "accurate"):
        torch.manual_seed(0)
        model = BertModel(BertConfig(num_hidden_layers=layers, **sizes)).eval()
        counts = of_calibration(model, [_batch(seed) for seed in range(8)], backend="tensorrt", preset=preset)
        print(f"| `{preset}` | {counts.waits.total():,} | {counts.kernels:,} |", flush=True)


if __name__ == "__main__":
    main()
