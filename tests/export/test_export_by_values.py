"""Models that need another way to a file, or have none: sums of embeddings, and choices by the values of the inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quantizer import Quantizer
from quantizer.errors import ExportError
from quantizer.export.quick_exporter import bags_as_reductions, reduced_bag

onnx = pytest.importorskip("onnx", reason="exporting needs enginequant[onnx]")


class Bag(nn.Module):
    """Sums of embeddings by ids [B, L]."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.linear = nn.EmbeddingBag(50, 32, mode="sum"), nn.Linear(32, 32)

    def forward(self, ids: Tensor, offsets: Tensor | None = None) -> Tensor:
        return self.linear(torch.relu(self.bag(ids, offsets)))


class ByValue(nn.Module):
    """What it computes depends on x [B, 32]."""

    def __init__(self, choose: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.choose = nn.Linear(32, 32), choose

    def forward(self, x: Tensor) -> Tensor:
        return self.choose(self.linear, x)


def _exit(linear: nn.Module, x: Tensor) -> Tensor:
    y = linear(x)
    return y if float(y.mean()) > 1e6 else torch.relu(linear(y))


def _size(linear: nn.Module, x: Tensor) -> Tensor:
    return linear(x)[:, : int(x.argmax()) + 1]


def _loop(linear: nn.Module, x: Tensor) -> Tensor:
    for _ in range(3):
        x = linear(x)
        if x.abs().max() < 1:
            break
    return x


def _exported(model: nn.Module, example: Any, path: Path) -> Any:
    q = Quantizer(preset="plain", backend="onnxruntime")
    q.calibrate(model.eval(), [example], progress=False)
    q.export(q.quantize(model), path, example)
    return onnx.load(str(path))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 3, -47])
def test_a_bag_of_a_matrix_of_indices_is_a_reduction(mode: str, padding: int | None) -> None:
    torch.manual_seed(0)
    ids, table = torch.randint(0, 6, (7, 4)), torch.randn(50, 8)
    ids[0] = 3
    right = F.embedding_bag(ids, table, mode=mode, padding_idx=padding)
    torch.testing.assert_close(reduced_bag(ids, table, mode=mode, padding_idx=padding), right)


def test_factors_of_a_bag() -> None:
    torch.manual_seed(0)
    ids, table, factors = torch.randint(0, 6, (7, 4)), torch.randn(50, 8), torch.randn(7, 4)
    right = F.embedding_bag(ids, table, mode="sum", per_sample_weights=factors)
    torch.testing.assert_close(reduced_bag(ids, table, mode="sum", per_sample_weights=factors), right)


def test_a_file_has_no_loop_for_a_bag(tmp_path: Path) -> None:
    found = _exported(Bag(), (torch.randint(0, 50, (16, 5)),), tmp_path / "m.onnx")
    assert {"Gather", "ReduceSum"} <= {node.op_type for node in found.graph.node}
    assert "Loop" not in {node.op_type for node in found.graph.node}


def test_a_flat_list_of_indices_is_told(tmp_path: Path) -> None:
    example = (torch.randint(0, 50, (20,)), torch.arange(0, 20, 5))
    with pytest.raises(ExportError, match=r"Bag cannot be exported: embedding_bag of a list .* a matrix of indices"):
        _exported(Bag(), example, tmp_path / "m.onnx")


def test_torch_has_its_own_bag_again_after_an_error() -> None:
    own = F.embedding_bag
    with pytest.raises(ExportError, match="max_norm"), bags_as_reductions():
        F.embedding_bag(torch.zeros(2, 3, dtype=torch.long), torch.randn(5, 8), max_norm=1.0)
    assert F.embedding_bag is own


@pytest.mark.parametrize("choose", [_exit, _size, _loop])
def test_a_choice_by_values_is_told_with_its_place(choose: Callable[..., Tensor], tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"depends on the values of its inputs at .*\.py:\d+.* torch\.where"):
        _exported(ByValue(choose), (torch.randn(8, 32),), tmp_path / "m.onnx")
