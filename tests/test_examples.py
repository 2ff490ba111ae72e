"""The notebooks: they are committed without outputs and run from top to bottom."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbformat", reason="needs enginequant[notebook]")
pytest.importorskip("nbclient", reason="needs enginequant[notebook]")
pytest.importorskip("ipykernel", reason="needs enginequant[notebook]")

import nbclient
import nbformat
from example_runs import EXAMPLES
from example_runs import NEEDED
from example_runs import TIMEOUT_S
from example_runs import skip_without

NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def _code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@cache
def _executed(path: Path) -> Any:
    skip_without(*NEEDED)
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    with warnings.catch_warnings():
        # Jupyter's own warnings about its transport; those of the notebook's code stay in the kernel's process.
        warnings.simplefilter("ignore")
        return client.execute()


def _output(notebook: Any, line: str, kind: str) -> str:
    """The last output of ``kind`` of the cell whose last line is ``line``."""
    cell = next(cell for cell in _code_cells(notebook) if cell.source.splitlines()[-1] == line)
    found = [output.data[kind] for output in cell.outputs if kind in output.get("data", {})]
    assert found, f"the cell that ends in {line!r} has no {kind}"
    return str(found[-1])


def test_there_are_two_notebooks() -> None:
    assert [path.name for path in NOTEBOOKS] == ["quantize_minilm.ipynb", "train_quantized.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in _code_cells(notebook):
        assert cell.outputs == []
        assert cell.execution_count is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_step_is_explained(path: Path) -> None:
    kinds = [cell.cell_type for cell in nbformat.read(path, as_version=4).cells]
    assert kinds[0] == "markdown"
    # Two cells of code in a row are one step, shown as numbers and as a picture.
    assert all("markdown" in kinds[at : at + 3] for at in range(len(kinds) - 2))


def test_minilm_shows_tables_and_pictures() -> None:
    notebook = _executed(EXAMPLES / "quantize_minilm.ipynb")
    coverage = _output(notebook, "q.coverage", "text/html")
    assert "<table>" in coverage
    assert "linear 37 of 37, matmul 12 of 12" in coverage
    assert "encoder.layer.0.attention.self.eager_attention_forward.matmul_0" in coverage
    assert "SQNR" in coverage
    assert "<table>" in _output(notebook, "q.ranges", "text/html")
    sensitivity = _output(notebook, "q.sensitivity", "text/html")
    assert "{query,key,value}" in sensitivity
    assert "<svg" in _output(notebook, "q.sensitivity.plot(limit=12)", "text/html")
    assert "put back to float" in _output(notebook, "q.sensitivity.plot(limit=6)", "text/html")
    assert _output(notebook, "same", "text/plain") == "True"


def test_minilm_shows_each_table_once() -> None:
    notebook = _executed(EXAMPLES / "quantize_minilm.ipynb")
    for cell in _code_cells(notebook):
        shown = [output for output in cell.outputs if "text/html" in output.get("data", {})]
        # A widget of a progress bar is no table of ours.
        assert sum("qz-" in output.data["text/html"] for output in shown) <= 1, cell.source


def test_minilm_engine_is_close_to_float() -> None:
    notebook = _executed(EXAMPLES / "quantize_minilm.ipynb")
    printed = "".join(
        output.text
        for cell in _code_cells(notebook)
        for output in cell.outputs
        if output.output_type == "stream" and output.name == "stdout"
    )
    means = {line.split()[0]: float(line.split()[5].rstrip(",")) for line in printed.splitlines() if "mean" in line}
    assert means["float"] == pytest.approx(1, abs=1e-3)
    assert means["proxy"] > 0.97
    assert means["engine"] > 0.97
    assert "+        return self.site_forward_linear_0(F.linear, input, self.weight, self.bias)" in printed
    assert "times as fast" in printed


def test_training_with_the_rounding_is_shown_step_by_step() -> None:
    notebook = _executed(EXAMPLES / "train_quantized.ipynb")
    assert "<svg" in _output(notebook, "q.sensitivity.plot(limit=8)", "text/html")
    assert "<polyline" in _output(notebook, "curve(losses)", "image/svg+xml")
    table = [
        line
        for cell in _code_cells(notebook)
        for output in cell.outputs
        if output.output_type == "stream" and output.name == "stdout"
        for line in output.text.splitlines()
        if line.endswith(" dB")
    ][-5:]
    rows = {line[:22].strip(): [float(cell) for cell in line[22:].split()[:4]] for line in table}
    assert list(rows) == ["float", "PTQ", "PTQ, 2 in float", "QAT", "engine"]
    accuracy, _, divergence, _ = ({name: row[at] for name, row in rows.items()} for at in range(4))
    assert accuracy["float"] > 0.9
    assert divergence["float"] == 0
    assert divergence["PTQ, 2 in float"] < divergence["PTQ"] / 2
    assert divergence["QAT"] < divergence["PTQ"] / 2
    assert divergence["engine"] < divergence["PTQ"] / 2
    assert accuracy["engine"] == pytest.approx(accuracy["QAT"], abs=0.02)
