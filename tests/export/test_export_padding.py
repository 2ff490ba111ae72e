"""Zeros around the input of a convolution: which become its own padding, with a quantizer between or without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx_graphs import computed, node_by_node, operators
from torch import nn
from toy_nets import net

from quantizer import Quantizer
from quantizer.export.exporter import export_onnx
from quantizer.export.passes.folding import FoldPadding

onnx = pytest.importorskip("onnx", reason="exporting needs enginequant[onnx]")
ir = pytest.importorskip("onnx_ir", reason="exporting needs enginequant[onnx]")

pytestmark = pytest.mark.usefixtures("exact_byte_products")

_TEXT = """
<ir_version: 10, opset_import: ["" : 20]>
g (float[1, 2, 5, 5] x) => (float[N, C, H, W] y{outputs})
<float[3, 2, 3, 3] w = {{{weights}}}, int64[8] pads = {{{pads}}}, float zero = {{{value}}}, float s = {{0.05}},
 uint8 z = {{7}}>
{{
  p = Pad {mode} (x, pads, zero)
  {nodes}
}}
"""
_PAIR = "q = QuantizeLinear (p, s, z) d = DequantizeLinear (q, s, z) y = Conv <pads = [0, 1, 0, 0]> (d, w)"
_PLAIN = "y = Conv (p, w)"


def graph(nodes: str, *, pads: str = "0,0,1,2,0,0,3,1", value: str = "0.0", mode: str = "", outputs: str = "") -> Any:
    weights = ",".join(f"{(place * 7) % 11 - 5}.0" for place in range(54))
    text = _TEXT.format(nodes=nodes, pads=pads, value=value, mode=mode, outputs=outputs, weights=weights)
    return ir.from_proto(onnx.parser.parse_model(text))


def values_of(model: Any) -> list[np.ndarray]:
    return computed(model, x=np.linspace(-3, 4, 50, dtype=np.float32).reshape(1, 2, 5, 5))


@pytest.mark.parametrize("nodes", [_PAIR, _PLAIN], ids=["quantized", "plain"])
def test_zeros_become_the_convolution_s(nodes: str) -> None:
    model = graph(nodes)
    before = values_of(model)
    assert FoldPadding().run(model) == 1
    convolution = next(node for node in model.graph if node.op_type == "Conv")
    added = [0, 1, 0, 0] if nodes is _PAIR else [0, 0, 0, 0]
    assert list(convolution.attributes["pads"].as_ints()) == [a + b for a, b in zip(added, [1, 2, 3, 1], strict=True)]
    # Nothing reads the Pad any more.
    assert not next(node for node in model.graph if node.op_type == "Pad").outputs[0].uses()
    assert FoldPadding().ensures(model) is None
    assert all(np.array_equal(one, other) for one, other in zip(before, values_of(model), strict=True))


@pytest.mark.parametrize(
    "changes",
    [
        {"value": "0.5"},
        {"mode": '<mode = "reflect">'},
        {"pads": "0,1,1,1,0,0,1,1"},
        {"pads": "0,0,-1,1,0,0,1,1"},
        {"outputs": ", float d", "nodes": _PAIR.replace("y = Conv", "r = Relu (d) y = Conv")},
        {"nodes": _PLAIN.replace("Conv", 'Conv <auto_pad = "SAME_UPPER">')},
        {"nodes": "r = Relu (p) y = Conv (r, w)"},
    ],
    ids=["a value", "reflected", "channels", "cropped", "another reader", "automatic", "an activation between"],
)
def test_what_is_no_padding_of_zeros_stays(changes: dict[str, str]) -> None:
    assert FoldPadding().run(graph(**{"nodes": _PAIR, **changes})) == 0


def same() -> nn.Module:
    """Two convolutions with padding of their own functions, as networks from TensorFlow have it."""
    return net(
        "y = F.relu6(self.first(F.pad(x_BCHW, [0, 1, 0, 1]))); return self.second(F.pad(y, [1, 1, 1, 1]))",
        "x_BCHW",
        first=nn.Conv2d(3, 8, 3, stride=2),
        second=nn.Conv2d(8, 8, 3, groups=8),
    )


def test_files_hold_no_paddings(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = same().eval(), torch.randn(2, 3, 9, 9)
    q = Quantizer(preset="plain", backend="onnxruntime")
    q.calibrate(model, [x])
    frozen = q.quantize(model)
    files = {
        q.export(frozen, tmp_path / "low.onnx", x): frozen,
        export_onnx(model, tmp_path / "float.onnx", x, opset=20, dtype=torch.float32): model,
    }
    for path, expected in files.items():
        assert "Pad" not in operators(path)
        found = torch.from_numpy(node_by_node(path, x)[0])
        with torch.no_grad():
            torch.testing.assert_close(found, expected(x), atol=0.02 if expected is frozen else 1e-5, rtol=0)
