"""A graph pass from outside the package: the one of the guide."""

from __future__ import annotations

from pathlib import Path

import pytest
from outside import run_outside, write_guide_module

for _package in ("onnx", "onnxscript"):
    pytest.importorskip(_package, reason="install enginequant[onnx]")

PRELUDE = """
from pathlib import Path

import onnx
import onnx_ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator

import square_by_mul
from quantizer import Quantizer
from quantizer.errors import ExportError
from quantizer.export.exporter import export_onnx
from quantizer.export.passes import graph_passes, passes
from quantizer.plan.targets import profile

torch.manual_seed(0)
net, data = square_by_mul.Net().eval(), [torch.randn(8, 64) for _ in range(4)]
q = Quantizer(preset="plain", backend="openvino")
q.calibrate(net, data)
int8 = q.quantize(net)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the guide's module lies."""
    write_guide_module(tmp_path, "add-a-graph-pass.md", "square_by_mul")
    return tmp_path


@pytest.mark.parametrize("model", ["int8", "net"])
def test_it_runs_on_every_export(folder: Path, model: str) -> None:
    run_outside(
        folder,
        PRELUDE
        + f"""
export_onnx({model}, Path("net.onnx"), (data[0],), opset=20, dtype=torch.float32)
file = onnx.load("net.onnx")
kinds = [node.op_type for node in file.graph.node]
assert kinds.count("Mul") == 1 and "Pow" not in kinds, kinds
assert all(node.name for node in file.graph.node)
read = {{name for node in file.graph.node for name in node.input}}
assert {{constant.name for constant in file.graph.initializer}} <= read
evaluator = ReferenceEvaluator(file)
(output,) = evaluator.run(None, {{evaluator.input_names[0]: data[0].numpy()}})
torch.testing.assert_close(torch.from_numpy(output), {model}(data[0]), atol=1e-4, rtol=1e-4)
""",
    )


def test_it_stands_behind_the_others_and_before_the_names(folder: Path) -> None:
    run_outside(
        folder,
        PRELUDE
        + """
for target in (None, *(profile(name) for name in ("tensorrt", "openvino", "onnxruntime"))):
    *_, last, names = passes(target)
    assert [type(last).__name__, type(names).__name__] == ["SquareByMul", "NameNodes"]
""",
    )


def test_a_broken_promise_ends_the_export(folder: Path) -> None:
    run_outside(
        folder,
        PRELUDE
        + """
square_by_mul.SquareByMul.run = lambda self, model: 0
with pytest.raises(ExportError, match="pass SquareByMul did not finish: a square is still a Pow: "):
    q.export(int8, "net.onnx", (data[0],))
square_by_mul.SquareByMul.requires = lambda self, model: "no"
with pytest.raises(ExportError, match="pass SquareByMul cannot start: no"):
    q.export(int8, "net.onnx", (data[0],))
assert not list(Path().glob("*net*"))
""",
    )


def test_a_name_is_registered_once(folder: Path) -> None:
    run_outside(
        folder,
        PRELUDE
        + """
with pytest.raises(ValueError, match="graph pass 'square-by-mul' is registered twice"):
    graph_passes.add("square-by-mul")(square_by_mul.SquareByMul())
""",
    )


def test_its_errors_name_it(folder: Path) -> None:
    run_outside(
        folder,
        PRELUDE
        + """
from quantizer.export.passes import run_passes

with pytest.raises(ValueError, match="graph pass 'own' is the class SquareByMul; expected an object: add"):
    graph_passes.add("own")(square_by_mul.SquareByMul)
with pytest.raises(ValueError, match="graph pass 'own' is an object of function, which has no requires, run, ensures"):
    graph_passes.add("own")(lambda model: 0)

def raises(*_):
    raise KeyError("boom")

for method in ("match", "run", "requires", "ensures"):
    broken = type("Broken", (square_by_mul.SquareByMul,), {method: raises})()
    with pytest.raises(KeyError) as caught:
        run_passes(onnx_ir.Model(onnx_ir.Graph([], [], nodes=[onnx_ir.node("Relu", [])]), ir_version=10), [broken])
    assert caught.value.__notes__ == ["in pass Broken"]
square_by_mul.SquareByMul.run = lambda self, model: None
with pytest.raises(ExportError, match="pass SquareByMul: run\\(\\) returned None; expected the number of changes"):
    q.export(int8, "net.onnx", (data[0],))
assert not list(Path().glob("*net*"))
""",
    )
