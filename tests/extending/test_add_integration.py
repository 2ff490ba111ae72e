"""An integration from outside the package: the one of the guide."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from outside import run_outside, write_guide_module

PRELUDE = """
import pytest
import torch

from pipeline_parts import Search, quantize_parts

torch.manual_seed(0)
search = Search()
query, document = search.query, search.document
pairs = [(torch.randn(32, 64), torch.randn(32, 256)) for _ in range(4)]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the guide's module lies."""
    write_guide_module(tmp_path, "add-an-integration.md", "pipeline_parts")
    return tmp_path


def test_the_modules_of_a_pipeline_are_quantized_by_one_run(folder: Path) -> None:
    run_outside(
        folder,
        PRELUDE
        + """
with torch.no_grad():
    before = search(*pairs[0])
    quantizers = quantize_parts(
        search, ["query", "document"], lambda it: [it(*pair) for pair in pairs], preset="plain", backend="openvino"
    )
    assert {name: q.coverage.share for name, q in quantizers.items()} == {"query": 1.0, "document": 1.0}
    assert 0 < (search(*pairs[0]) - before).abs().max() < 0.1
    # Each quantizer has seen what the pipeline gave its module.
    assert torch.equal(search.query(pairs[0][0]), quantizers["query"].quantize(query)(pairs[0][0]))
    assert quantizers["document"].plan["forward.linear_0"].operands[0].largest_amax > 3
""",
    )


def test_after_an_error_the_pipeline_has_its_float_modules(folder: Path) -> None:
    run_outside(
        folder,
        PRELUDE
        + """
from quantizer.errors import CalibrationError

def fails(it):
    it(*pairs[0])
    raise KeyError("data")

with pytest.raises(KeyError, match="data"):
    quantize_parts(search, ["query", "document"], fails, preset="plain")
assert search.query is query and search.document is document
with pytest.raises(CalibrationError, match="calibrate"):
    quantize_parts(search, ["query", "document"], lambda it: it.query(pairs[0][0]), preset="plain")
assert search.query is query and search.document is document
with pytest.raises(TypeError, match="pipeline.__call__ is an object of method; expected a torch.nn.Module"):
    quantize_parts(search, ["__call__"], fails)
""",
    )


def test_it_uses_public_names_alone(folder: Path) -> None:
    import quantizer

    tree = ast.parse((folder / "pipeline_parts.py").read_text(encoding="utf-8"))
    ours = [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and str(node.module).startswith("quantizer")
    ]
    assert {node.module for node in ours} == {"quantizer"}
    assert {name.name for node in ours for name in node.names} <= set(quantizer.__all__)
