"""An ``ExportedProgram`` as the model, and direct calls of ATen operators, whose products are sites."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from calibrated import make_calibrated
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from quantizer import Quantizer
from quantizer.engines.backends import backends
from quantizer.errors import ProxyError

# torch copies the trees of a graph so.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")


class Net(nn.Module):
    """A convolution, attention and a linear. [N, 3, 10, 10] to [N, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 3)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.conv(x).flatten(2).mT
        mixed = torch.bmm((tokens @ tokens.mT / 64).softmax(-1), tokens)
        return self.head(mixed.mean(1).relu())


class Direct(nn.Module):
    """Operators as a compiler writes them. [8, 32] to [8, 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) * 0.1)
        self.bias = nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.ops.aten.linear.default(x, self.weight, self.bias).relu()
        x = torch.ops.aten.addmm.default(self.bias, x, self.weight)
        return torch.ops.aten.mm(x, torch.ops.aten.t.default(self.weight))


class Convolutions(nn.Module):
    """Of each kind. [N, 16, 20] to [N, 32, 6, 38]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(16, 32, 3, padding=1)
        self.wider = nn.ConvTranspose1d(32, 32, 4, stride=2, output_padding=1, dilation=2, groups=2)
        self.second = nn.Conv2d(32, 32, 3, stride=(1, 2))
        self.last = nn.ConvTranspose2d(32, 32, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.wider(self.first(x))
        return self.last(self.second(wide[:, :, None].expand(-1, -1, 8, -1)))


def _program() -> tuple[ExportedProgram, list[Tensor]]:
    torch.manual_seed(0)
    data = [torch.randn(4, 3, 10, 10) for _ in range(2)]
    return export(Net().eval(), (data[0],), dynamic_shapes=({0: Dim("batch", min=1)},)), data


def test_convolutions_of_a_decomposed_program_are_sites() -> None:
    torch.manual_seed(0)
    model, x = Convolutions().eval(), torch.randn(2, 16, 20)
    program = export(model, (x,)).run_decompositions()
    assert "aten.convolution" in str(program.graph)
    q = Quantizer(preset="plain", backend="torch")
    q.calibrate(program, [x])
    # Of the four, torch has no integer kernels for those that are transposed.
    assert {site.operation: (site.kind, site.quantized) for site in q.plan.values()} == {
        "conv1d": ("conv", True),
        "conv_transpose1d": ("conv", False),
        "conv2d": ("conv", True),
        "conv_transpose2d": ("conv", False),
    }
    with torch.no_grad():
        assert torch.equal(q.proxy(program)(x), model(x))
    same = Quantizer(preset="plain", backend="torch")
    same.calibrate(model, [x])
    with torch.no_grad():
        assert torch.equal(q.quantize(program)(x), same.quantize(model)(x))


@pytest.mark.usefixtures("exact_byte_products")
def test_a_program_is_calibrated_and_becomes_an_engine(tmp_path: Path) -> None:
    program, data = _program()
    code, weights = str(program.graph_module.code), {name: value.clone() for name, value in program.state_dict.items()}
    q = make_calibrated(program, data, backend="openvino")
    assert q.coverage.share == 1
    found = {operand.parameter for entry in q.plan.values() for operand in entry.operands if operand.parameter}
    assert found == {"conv.weight", "head.weight"}
    frozen = q.quantize(program)
    x = torch.randn(5, 3, 10, 10)
    assert torch.equal(q.proxy(program)(x), program.module()(x))
    file = q.export(frozen, tmp_path / "model.onnx", (data[0],))
    q.build(file, tmp_path / "engine")
    (got,) = backends["openvino"].load(tmp_path / "engine")({"x": x.numpy()}).values()
    expected = frozen(x).detach()
    noise = (torch.as_tensor(got) - expected).square().sum()
    assert float(expected.square().sum() / noise) > 1e3
    assert str(program.graph_module.code) == code
    assert all(torch.equal(value, program.state_dict[name]) for name, value in weights.items())


def test_what_is_saved_serves_the_program_loaded_again(tmp_path: Path) -> None:
    program, data = _program()
    q = make_calibrated(program, data, backend="openvino")
    q.save(tmp_path / "saved")
    torch.export.save(program, tmp_path / "program.pt2")
    again = torch.export.load(tmp_path / "program.pt2")
    got = Quantizer.load(tmp_path / "saved").quantize(again)(data[0])
    assert torch.equal(got, q.quantize(program)(data[0]))


def test_a_program_is_trained_as_a_module() -> None:
    program, data = _program()
    q = make_calibrated(program, data, backend="openvino")
    proxy = q.qat(program, copy=True)
    before = {name: parameter.detach().clone() for name, parameter in proxy.named_parameters()}
    proxy(data[0]).square().sum().backward()
    torch.optim.SGD(proxy.parameters(), 0.1).step()
    assert all(not torch.equal(before[name], parameter) for name, parameter in proxy.named_parameters())


def test_direct_calls_of_aten_operators_are_sites() -> None:
    model, x = Direct().eval(), torch.randn(8, 32)
    q = make_calibrated(model, [x], backend="openvino")
    assert q.coverage.share == 1
    assert [entry.operation for entry in q.plan.values()] == ["linear", "addmm", "mm"]
    assert torch.equal(q.proxy(model)(x), model(x))
    expected = model(x).detach()
    noise = (q.quantize(model)(x).detach() - expected).square().sum()
    assert float(expected.square().sum() / noise) > 1e3


def test_what_is_neither_is_refused() -> None:
    with pytest.raises(ProxyError, match=r"expected a torch\.nn\.Module, got str"):
        Quantizer().calibrate("model.pt2", [torch.ones(1)])
