"""An operation from outside the package, whose calls become sites: the one of the guide."""

from __future__ import annotations

from pathlib import Path

import pytest
from outside import run_outside, write_guide_module

PRELUDE = """
import pytest
import torch

import inner_product
from quantizer import Quantizer

torch.manual_seed(0)
net, data = inner_product.Scores().eval(), [torch.randn(8, 64) for _ in range(4)]
q = Quantizer(preset="plain", backend="openvino")
"""

OWN_NET = """
import torch

class Net(torch.nn.Module):
    def forward(self, x):
        return x.inner(torch.relu(x))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the guide's module lies, and a model beside it."""
    write_guide_module(tmp_path, "add-a-site-kind.md", "inner_product")
    (tmp_path / "own_net.py").write_text(OWN_NET, encoding="utf-8")
    return tmp_path


def test_its_calls_are_sites(folder: Path) -> None:
    run_outside(
        folder,
        PRELUDE
        + """
proxy = q.proxy(net)
assert torch.equal(proxy(data[0]), net(data[0]))
q.calibrate(net, data)
entry = q.plan["forward.inner_0"]
assert entry.kind == "linear" and entry.quantized
assert [operand.axis for operand in entry.operands] == [None, 0]
assert entry.operands[1].scale.shape == (32,)
assert q.coverage.share == 1.0 and not q.coverage.not_quantized.rows
int8 = q.quantize(net)
error = (int8(data[0]) - net(data[0])).abs().max()
assert 0 < error < 1, error
q.save("saved")
assert torch.equal(Quantizer.load("saved").quantize(net)(data[0]), int8(data[0]))
""",
    )


def test_of_two_activations_it_goes_by_another_switch(folder: Path) -> None:
    run_outside(
        folder,
        PRELUDE
        + """
from own_net import Net

net = Net()
for switch in (True, False):
    q = Quantizer(preset="plain", backend="openvino", sites={"matmul": switch})
    q.calibrate(net, data)
    (entry,) = q.plan.values()
    assert entry.kind == "matmul" and entry.quantized == switch
    assert torch.equal(q.quantize(net)(data[0]), net(data[0])) != switch
""",
    )


def test_exported(folder: Path) -> None:
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason="install enginequant[onnx]")
    run_outside(
        folder,
        PRELUDE
        + """
import onnx
from onnx.reference import ReferenceEvaluator
from quantizer.check import check_file

q.calibrate(net, data)
int8 = q.quantize(net)
q.export(int8, "net.onnx", (data[0],))
file = onnx.load("net.onnx")
products = [node for node in file.graph.node if node.op_type == "MatMul"]
assert len(products) == 1
assert check_file("net.onnx", "openvino") == []
evaluator = ReferenceEvaluator(file)
(output,) = evaluator.run(None, {evaluator.input_names[0]: data[0].numpy()})
torch.testing.assert_close(torch.from_numpy(output), int8(data[0]), atol=1e-3, rtol=0)
""",
    )


def test_a_proxy_made_before_has_the_sites_of_then(folder: Path) -> None:
    run_outside(
        folder,
        """
import inspect

import torch
from own_net import Net

from quantizer import Quantizer

net, x = Net(), torch.randn(4, 8)
before = Quantizer(preset="plain").proxy(net)
import inner_product

after = Quantizer(preset="plain").proxy(net)
assert "site_forward_inner_0" in inspect.getsource(type(after).forward)
assert "site_" not in inspect.getsource(type(before).forward)
assert torch.equal(before(x), after(x))
""",
    )


def test_what_cannot_be_added_is_refused(folder: Path) -> None:
    run_outside(
        folder,
        PRELUDE
        + """
from dataclasses import replace

from quantizer.rewrite.operations import Operand, operation, register_operation, registered_operations

fresh = dict(name="other", functions=("torch.dot",), methods=())
for change, words in [
    ({"name": "inner"}, "operation 'inner': it is registered twice"),
    ({"name": "matmul"}, "operation 'matmul': it is registered twice"),
    ({"functions": ("torch.inner",)}, "'inner' is a spelling of operation 'inner'"),
    ({"methods": ("mm",)}, "'mm' is a spelling of operation 'mm'"),
    ({"functions": ("torch.innner",)}, "function 'torch.innner' does not exist"),
    ({"functions": ("inner",)}, "function 'inner' does not exist"),
    ({"methods": ("innner",)}, "'innner' is not a method of Tensor"),
    ({"methods": ("mul_",)}, "'mul_' is not a method of Tensor, or works in place"),
    ({"operators": ("Mult",)}, "only built-in operations may have operators"),
    ({"operands": (Operand(name="inside", index=None),)}, "only built-in operations may have operators"),
    ({"kind": "inner"}, "kind is 'inner'; expected one of linear, conv, matmul, residual_add, embedding"),
    ({"geometry": None}, "an operation of kind matmul needs a geometry"),
]:
    with pytest.raises(ValueError, match=words):
        register_operation(replace(inner_product.INNER, **{**fresh, **change}))
assert registered_operations() == 1
assert operation("inner") is inner_product.INNER
""",
    )
