"""The float types of a file: one for the operands of each node, whatever the forward casts or makes."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from onnx_graphs import operators
from torch import Tensor, nn
from torch.nn import functional as F

for _package in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(_package, reason="types of files need enginequant[onnx,onnxruntime]")

import onnx
from calibrated import make_calibrated

from quantizer.check import check_file
from quantizer.engines import BuildOptions, build_engine, load_engine
from quantizer.observe.float16_overflow import MadeFloats

ENGINES = [
    pytest.param(name, marks=() if find_spec(library) else pytest.mark.skip(reason=f"install enginequant[{extra}]"))
    for name, library, extra in (
        ("onnxruntime", "onnxruntime", "onnxruntime"),
        ("openvino", "openvino", "openvino"),
        ("torch", "torch", "onnx"),
    )
]
RTX = find_spec("tensorrt_rtx_bindings") is not None

Forward = Callable[..., Tensor]


class Net(nn.Module):
    """Layers for a forward that a test gives."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.norm = nn.Linear(32, 32), nn.Linear(32, 32), nn.LayerNorm(32)
        self.conv = nn.Conv2d(3, 16, 3)
        self.w = nn.Parameter(torch.randn(32, 32) / 6)
        self.register_buffer("frequencies", torch.rand(32))
        self._of_test = forward

    def forward(self, *args: Tensor) -> Tensor:
        return self._of_test(self, *args)


def mask_mean(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    weight = mask.float()[..., None]
    return net.b((torch.relu(net.a(x)) * weight).sum(1) / weight.sum(1).clamp(min=1e-9))


def positions(net: Net, x: Tensor) -> Tensor:
    angle = torch.arange(x.shape[1])[:, None].float() * net.frequencies
    return net.b(net.a(x) * angle.cos() + x * angle.sin())


def filled(net: Net, x: Tensor) -> Tensor:
    made = torch.zeros(x.shape[0], 6, 32)
    made[:, :3] = net.a(x)[:, :3]
    return net.b(made)


def residual(net: Net, x: Tensor) -> Tensor:
    hidden = net.a(x) + torch.linspace(0, 1, 32)
    return net.b(net.norm(hidden) + hidden)


def one_hot(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    return net.b(F.one_hot(mask.long(), 32).float() @ net.w + net.a(x))


def masked_attention(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    bias = (1.0 - mask.float())[:, None] * -3.4e38
    return net.b(((net.a(x) @ net.b(x).mT) * 0.2 + bias).softmax(-1) @ x)


def upcast(net: Net, x: Tensor) -> Tensor:
    hidden = net.a(x).float()
    return net.b(net.w[0] * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)))


def image(net: Net, x: Tensor) -> Tensor:
    return net.conv(x.permute(0, 3, 1, 2).float() / 255)


def compared_image(net: Net, x: Tensor) -> Tensor:
    return net.conv((x.permute(0, 3, 1, 2)[:, :, 1:] > 3).float())


def vectors() -> Tensor:
    return torch.randn(4, 6, 32)


def with_mask() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 6, 32), torch.arange(6) < 6 - torch.arange(4)[:, None]


def bytes_of_image() -> Tensor:
    return torch.randint(0, 256, (4, 12, 12, 3), dtype=torch.uint8)


MADE: dict[str, tuple[Forward, Callable[[], Any]]] = {
    "mask_mean": (mask_mean, with_mask),
    "positions": (positions, vectors),
    "filled": (filled, vectors),
    "residual": (residual, vectors),
    "one_hot": (one_hot, with_mask),
    "masked_attention": (masked_attention, with_mask),
    "upcast": (upcast, vectors),
    "image": (image, bytes_of_image),
    "compared_image": (compared_image, bytes_of_image),
}


def called(model: nn.Module, batch: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(*batch) if isinstance(batch, tuple) else model(batch)
    return out


def sqnr(right: Tensor, found: Tensor) -> float:
    error = (right.double() - found.double()).square().sum()
    return float(10 * torch.log10(right.double().square().sum() / error)) if error else math.inf


@pytest.mark.parametrize("name", MADE)
def test_tensors_that_a_forward_makes_have_the_type_of_a_half_file(name: str, tmp_path: Path) -> None:
    forward, make = MADE[name]
    model = Net(forward).eval()
    torch.manual_seed(1)
    batches = [make() for _ in range(3)]
    q = make_calibrated(model, batches, backend="tensorrt-rtx")
    path = q.export(q.quantize(model), tmp_path / "model.onnx", batches[0])
    assert not [found for found in check_file(path, "tensorrt-rtx") if found.severity == "error"]
    assert onnx.load(path).graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT16
    # A simulation of the target computes by the same rule.
    assert sqnr(called(model, batches[0]), called(q.simulate(model), batches[0])) > 30
    if RTX:
        sizes = {"batch": (1, 4, 8), "sequence": (12, 12, 12)}
        options = BuildOptions(compute_capability="sm89", dynamic=sizes)
        build_engine("tensorrt-rtx", path, tmp_path / "model.engine", options)


def test_a_residual_stays_in_the_type_of_the_file(tmp_path: Path) -> None:
    model, batches = Net(residual).eval(), [vectors() for _ in range(3)]
    q = make_calibrated(model, batches, backend="tensorrt-rtx")
    assert "Cast" not in operators(q.export(q.quantize(model), tmp_path / "model.onnx", batches[0]))


class Attended(Net):
    """torch's own attention behind a product that is float32 on purpose."""

    def __init__(self) -> None:
        super().__init__(lambda net, x: net.attention(net.a(x).float(), x, x, need_weights=False)[0])
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)


def test_attention_of_torch_behind_an_upcast(tmp_path: Path) -> None:
    model, batches = Attended().eval(), [vectors() for _ in range(3)]
    q = make_calibrated(model, batches, backend="tensorrt-rtx")
    path = q.export(q.quantize(model), tmp_path / "model.onnx", batches[0])
    assert not [found for found in check_file(path, "tensorrt-rtx") if found.severity == "error"]


class Casts(nn.Module):
    """A linear and a convolution between casts."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.conv, self.w = nn.Linear(32, 32), nn.Conv1d(6, 8, 3, padding=1), nn.Parameter(torch.randn(32, 32))
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        y = (self.a(x).to(self.dtype) @ (self.w / 6).to(self.dtype)).to(x.dtype).to(self.dtype)
        return F.conv1d(y, self.conv.weight.to(self.dtype), self.conv.bias.to(self.dtype), padding=1).to(x.dtype)


class Autocast(Casts):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=self.dtype):
            y = F.gelu(self.a(x)) @ self.w
        return self.a(y.float())


CAST: dict[str, Callable[[], nn.Module]] = {
    "double": lambda: Casts(torch.float64),
    "half": lambda: Casts(torch.float16),
    "bfloat16": lambda: Casts(torch.bfloat16),
    "autocast": lambda: Autocast(torch.bfloat16),
}


@pytest.mark.usefixtures("exact_byte_products")
@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("name", CAST)
def test_products_between_casts_compute_with_codes(name: str, backend: str, tmp_path: Path) -> None:
    model, batches = CAST[name]().eval(), [vectors() for _ in range(3)]
    q = make_calibrated(model, batches, backend=backend)
    frozen = q.quantize(model)
    path = q.export(frozen, tmp_path / "model.onnx", batches[0])
    assert not [found for found in check_file(path, backend) if found.severity == "error"]
    products = [node for node in onnx.load(path).graph.node if node.op_type in ("MatMul", "Conv", "Gemm")]
    made = {name: node.op_type for node in onnx.load(path).graph.node for name in node.output}
    quantized = [node for node in products if all(made.get(name) == "DequantizeLinear" for name in node.input[:2])]
    assert len(quantized) == len(products) == 3
    build_engine(backend, path, tmp_path / "model.engine", BuildOptions(compiled=False))
    (name_of_input,) = [value.name for value in onnx.load(path).graph.input]
    engine = load_engine(backend, tmp_path / "model.engine")
    (found,) = engine({name_of_input: batches[0].numpy()}).values()
    right = called(model, batches[0])
    assert sqnr(right, torch.as_tensor(found)) > min(28, sqnr(right, called(frozen, batches[0])) - 3)


def test_a_model_of_doubles_that_makes_doubles(tmp_path: Path) -> None:
    def forward(net: Net, x: Tensor, mask: Tensor) -> Tensor:
        return net.b(torch.relu(net.a(x)) * mask.double()[..., None])

    model = Net(forward).eval().double()
    batches = [(x.double(), mask) for x, mask in (with_mask() for _ in range(3))]
    q = make_calibrated(model, batches, backend="onnxruntime")
    path = q.export(q.quantize(model), tmp_path / "model.onnx", batches[0])
    assert not [found for found in check_file(path, "onnxruntime") if found.severity == "error"]


# -- the rule in torch ------------------------------------------------------------------------------------------------


def test_made_tensors_follow_the_model_and_upcasts_do_not() -> None:
    x, weight, table = torch.randn(2, 4).half(), torch.randn(4, 4).half(), torch.rand(4).half()
    with MadeFloats(torch.float16, False, [table]):
        assert (x + torch.ones(4)).dtype == torch.float16
        assert (x * (x > 0).float()).dtype == torch.float16
        assert torch.cat([x, torch.zeros(2, 1)], 1).dtype == torch.float16
        angle = torch.arange(4).float() * table
        assert angle.dtype == torch.float32
        assert (x * angle.cos()).dtype == torch.float16
        assert (x.float() * x).dtype == torch.float32
        assert (x.float().softmax(-1) @ weight).dtype == torch.float16
        made = torch.zeros(2, 4)
        made += x
        made[0] = x[0]
        made.index_add_(0, torch.tensor([1]), x[:1])
        assert made.dtype == torch.float32
        assert (made + x).dtype == torch.float16
        # A number in a tensor changes no type in torch either.
        assert (x * torch.tensor(2.0)).dtype == torch.float16
        assert (x.sum() * torch.ones(4)).dtype == torch.float32
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            F.linear(x, weight[:3, :3])
    with pytest.raises(RuntimeError, match=r"same dtype|expected m1"):
        F.linear(x.float(), weight)


def test_made_masks_stay_in_the_range_of_half_floats() -> None:
    x, mask = torch.zeros(1, 4).half(), torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    for masked, least in ((True, -30000.0), (False, -math.inf)):
        with MadeFloats(torch.float16, masked, [mask]):
            assert float((x + mask * -3.4e38).min()) == least
