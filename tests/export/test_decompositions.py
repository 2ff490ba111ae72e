"""Graphs whose operators are replaced where they stand: the same file as by the exporter's own decomposition."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.onnx._internal.exporter import _decomp, _fx_passes
from toy_nets import net

from quantizer.errors import ExportError
from quantizer.export import quick_exporter
from quantizer.export.exporter import export_onnx
from quantizer.export.quick_exporter import replaced_in_place

X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))


class _Composed(nn.Module):
    """Every operator that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.dropout(self.linear(x)).detach()
        heads = y.unflatten(-1, (2, 4)).transpose(1, 2).contiguous()
        scores = heads @ heads.mT
        seen = (mask > 0) & (mask < 4) | (mask == 9)
        y = (functional.softmax(scores, -1) @ heads).transpose(1, 2).reshape(*x.shape[:2], -1)
        y = y.reshape(x.shape) + seen.to(x.dtype)[..., None]
        return y.to("cpu").to(x.dtype).flatten(1)


class _Residual(nn.Module):
    """Normalizations, an addition in place and pooling, as networks of images have them; and clipped places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.plain = nn.BatchNorm2d(8), nn.BatchNorm2d(8, affine=False)
        self.pool = nn.AdaptiveAvgPool2d(1)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm(self.first(x)))
        z = self.plain(self.second(y))
        z += torch.max(y, torch.full_like(y, 0.1)).detach_()
        z = torch.min(functional.relu(z), torch.full_like(y, 4.0))
        z += 0.5
        return self.pool(z).flatten(1)


class _Shared(nn.Module):
    """Changes in place what something else reads."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        if self.kind == "view":
            y[:, 0].add_(1)
        elif self.kind == "reshaped":
            y.reshape(-1, 8).add_(1)
        elif self.kind == "read before":
            z = y + 1
            y.add_(z)
            return y.mT + z.mT
        elif self.kind == "type":
            seen = x > 0
            whole = seen.to(torch.int32) + 1
            whole.add_(seen)
            y = y + whole
        return y.contiguous()


class _WithSize(nn.Module):
    """Adds a size that is not known, and a tensor given by its name."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y.add_(x.shape[0])
        z = x + 1
        z.add_(other=y)
        return z.contiguous()


class _OtherOrders(nn.Module):
    """Views that the order of elements in memory allows, as an operator before them asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(5, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.convolution(x)
        last = y[..., None].contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1).view(-1, 6)
        cast = y[..., None].to(memory_format=torch.channels_last).permute(0, 2, 3, 1).view(-1, 6)
        shape = y.transpose(1, 2).reshape(3, 8, 6).transpose(1, 2).view(3, 48)
        return (last + cast).reshape(x.shape[0], -1) + shape


class _Lengths(nn.Module):
    """Shapes of two sizes that are not known."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.reshape(*x.shape[:2], 2, 4).transpose(1, 2)
        return heads.reshape(x.shape[0], -1, 8) + x.transpose(1, 2).reshape(x.shape[0], -1).mean(-1)[:, None, None]


def _doubled() -> nn.Module:
    """Changes a tensor in place."""
    return net("y = x + 1; y.mul_(2); return y.contiguous()")


def _deviation() -> nn.Module:
    """Has an operator that the exporter has to decompose."""
    return net("x.std(-1).contiguous()")


def _flattened() -> nn.Module:
    """Flattens to a shape of which two sizes are not known."""
    return net("x[..., None].flatten(2)")


def _empty() -> nn.Module:
    """Flattens nothing."""
    return net("x[..., :0].flatten(1)")


def _shaped() -> nn.Module:
    """Needs nothing but another shape."""
    return net("x.flatten(1)")


def _branching() -> nn.Module:
    """Decides by a value, which no graph can."""
    return net("x.contiguous() if x.sum() > 0 else -x")


@pytest.fixture
def decomposed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the exporter itself decomposed."""
    seen: list[Any] = []
    decompose = _fx_passes.decompose_with_registry

    def counted(program: Any, registry: Any) -> Any:
        seen.append(program)
        return decompose(program, registry)

    monkeypatch.setattr(_fx_passes, "decompose_with_registry", counted)
    return seen


def _graph(path: Path) -> list[Any]:
    """Return the nodes of a file without names: operator, attributes, and what each input is."""
    graph = onnx.load(path).graph
    known: dict[str, Any] = {value.name: f"input {value.name}" for value in graph.input}
    for constant in graph.initializer:
        array = onnx.numpy_helper.to_array(constant)
        known[constant.name] = (str(array.dtype), array.shape, array.tobytes())
    nodes = []
    for place, node in enumerate(graph.node):
        attributes = sorted(attribute.SerializeToString() for attribute in node.attribute)
        nodes.append((node.op_type, attributes, [known.get(name) for name in node.input]))
        known.update({name: (place, index) for index, name in enumerate(node.output)})
    return nodes


def _both(model: nn.Module, example: tuple[Tensor, ...], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold the file of a model to that by the exporter's own decomposition, and to the model."""
    here, exporters = folder / "here.onnx", folder / "exporters.onnx"
    export_onnx(model.eval(), here, example, opset=20, dtype=torch.float32)
    with monkeypatch.context() as alone:
        alone.setattr(quick_exporter, "replaced_in_place", contextlib.nullcontext)
        export_onnx(model, exporters, example, opset=20, dtype=torch.float32)
    assert _graph(here) == _graph(exporters)
    session = onnxruntime.InferenceSession(str(here), providers=["CPUExecutionProvider"])
    inputs = zip(session.get_inputs(), example, strict=True)
    (found,) = session.run(None, {port.name: value.numpy() for port, value in inputs})
    torch.testing.assert_close(torch.from_numpy(found), model(*example))


@pytest.mark.parametrize("model", [_OtherOrders(), _Lengths()], ids=type)
def test_views_and_shapes_compute_the_same(model: nn.Module, tmp_path: Path, decomposed: list[Any]) -> None:
    path = tmp_path / "model.onnx"
    axes = {"x": {0: "batch", 1: "sequence"}} if isinstance(model, _Lengths) else {}
    export_onnx(model.eval(), path, {"x": X}, opset=20, dtype=torch.float32, axes=axes)
    assert not decomposed
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for x in (X, torch.randn(2, 9, 8)) if axes else (X,):
        (found,) = session.run(None, {"x": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), model(x))


@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")
def test_a_program_of_another_thread_stays_as_it_is(decomposed: list[Any]) -> None:
    with replaced_in_place(), ThreadPoolExecutor(1) as pool:
        exported = pool.submit(torch.onnx.export, _shaped().eval(), (X,), dynamo=True, verbose=False).result()
    assert len(decomposed) == 1
    assert exported is not None


def test_every_operator_that_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decomposed: list[Any]
) -> None:
    mask = torch.arange(15).reshape(3, 5)
    _both(_Composed(), (X, mask), tmp_path, monkeypatch)
    assert len(decomposed) == 1, "only by the exporter alone"


def test_a_network_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decomposed: list[Any]) -> None:
    model = _Residual()
    model(torch.randn(8, 3, 6, 6))
    _both(model, (torch.randn(2, 3, 6, 6),), tmp_path, monkeypatch)
    assert len(decomposed) == 1, "only by the exporter alone"


@pytest.mark.parametrize("kind", ["view", "reshaped", "read before", "type"])
def test_what_others_see_change_is_left_to_the_exporter(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decomposed: list[Any]
) -> None:
    _both(_Shared(kind), (X,), tmp_path, monkeypatch)
    assert len(decomposed) == 2


def test_a_size_is_added_in_place(tmp_path: Path, decomposed: list[Any]) -> None:
    path, axes = tmp_path / "model.onnx", {"x": {0: "batch"}}
    export_onnx(_WithSize().eval(), path, {"x": X}, opset=20, dtype=torch.float32, axes=axes)
    assert not decomposed
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": X[:2].numpy()})
    torch.testing.assert_close(torch.from_numpy(found), _WithSize()(X[:2]))


@pytest.mark.parametrize(
    "model", [nn.BatchNorm1d(5, track_running_stats=False), nn.AdaptiveAvgPool2d((2, 1))], ids=type
)
def test_normalization_by_the_batch_and_larger_pools_are_left_to_the_exporter(
    model: nn.Module, tmp_path: Path, decomposed: list[Any]
) -> None:
    export_onnx(model.eval(), tmp_path / "model.onnx", (X,), opset=20, dtype=torch.float32)
    assert len(decomposed) == 1


@pytest.mark.parametrize("model", [_doubled(), _deviation(), _flattened(), _empty()], ids=type)
def test_other_graphs_are_left_to_the_exporter(model: nn.Module, tmp_path: Path, decomposed: list[Any]) -> None:
    axes = {"x": {0: "batch", 1: "sequence"}}
    export_onnx(model.eval(), tmp_path / "model.onnx", {"x": X}, opset=20, dtype=torch.float32, axes=axes)
    assert len(decomposed) == 1


def test_the_exporter_is_as_before_it(tmp_path: Path) -> None:
    before = _fx_passes.decompose_with_registry
    with pytest.raises(ExportError, match="cannot be exported"):
        export_onnx(_branching(), tmp_path / "model.onnx", (X,), opset=20, dtype=torch.float32)
    assert _fx_passes.decompose_with_registry is before


def test_a_release_that_decomposes_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_decomp, "get_onnx_implemented_overloads")
    with replaced_in_place():
        assert _fx_passes.decompose_with_registry.__module__ == _fx_passes.__name__


class _ChannelsLast(nn.Module):
    """Images whose channels come last, normalized in place, which the exporter decomposes itself, and pooled."""

    def __init__(self, axes: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1) if axes == 2 else nn.AdaptiveAvgPool3d(1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.movedim(-1, 1).float()
        return self.pool(x.sub_(0.5).div_(2.0)).flatten(1)


@pytest.mark.parametrize("axes", [2, 3])
def test_channels_last_pooling_is_no_gather(axes: int, tmp_path: Path) -> None:
    x = torch.randint(0, 256, (2, *[4] * axes, 3), dtype=torch.uint8)
    model = _ChannelsLast(axes).eval()
    file = export_onnx(model, tmp_path / "m.onnx", x, opset=20, dtype=torch.float32)
    assert not {"Gather", "Range"} & {node.op_type for node in onnx.load(file).graph.node}
    (given,) = onnxruntime.InferenceSession(str(file)).run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(given), model(x))


def _restrided() -> nn.Module:
    return net("x.sub_(1.0).as_strided((x.shape[0], 4, 2), (8, 2, 1)) * 2.0")


def test_other_strides_stay(tmp_path: Path) -> None:
    x = torch.randn(3, 8)
    file = export_onnx(_restrided(), tmp_path / "m.onnx", x, opset=20, dtype=torch.float32)
    (given,) = onnxruntime.InferenceSession(str(file)).run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(given), _restrided()(x.clone()))
