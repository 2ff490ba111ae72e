"""The notebooks: they run from top to bottom, and are stored with what they show."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbformat", reason="needs enginequant[notebook]")
pytest.importorskip("nbclient", reason="needs enginequant[notebook]")
pytest.importorskip("ipykernel", reason="needs enginequant[notebook]")

import nbformat
from example_runs import EXAMPLES, NEEDED, skip_without
from gallery import NOTEBOOKS, executed, shown
from helpers import BYTE_PRODUCTS_ARE_EXACT
from notebook_here import executed_here

_ENGINE = ("onnx", "onnxscript", "openvino")
_PACKAGES = {
    "compare_runs": ("sklearn", "jinja2", *_ENGINE),
    "own_net": ("PIL", "jinja2", *_ENGINE),
    "quantize_decoder": ("transformers", *_ENGINE),
    "quantize_minilm": NEEDED,
    "quantize_vision": ("sklearn", "transformers", *_ENGINE),
    "train_quantized": NEEDED,
}

_PICTURES = {"image/png", "image/svg+xml"}


def _code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@cache
def _executed(name: str) -> Any:
    skip_without(*_PACKAGES[name])
    return shown(executed_here(EXAMPLES / f"{name}.ipynb"))


def _output(notebook: Any, line: str, kind: str) -> str:
    """The last output of ``kind`` of the cell whose last line is ``line``."""
    cell = next(cell for cell in _code_cells(notebook) if cell.source.splitlines()[-1] == line)
    found = [output.data[kind] for output in cell.outputs if kind in output.get("data", {})]
    assert found, f"the cell that ends in {line!r} has no {kind}"
    return str(found[-1])


def _printed(notebook: Any) -> str:
    outputs = [output for cell in _code_cells(notebook) for output in cell.outputs]
    return "".join(output.text for output in outputs if output.output_type == "stream")


def _kinds(cell: Any) -> list[str]:
    """What a cell shows: the types of its outputs, and ``table`` or ``picture`` for each of these."""
    data = [output.get("data", {}) for output in cell.outputs]
    tables = ["table" for one in data if "<table" in one.get("text/html", "")]
    pictures = [
        "picture" for one in data if "<svg" in one.get("text/html", "") or {"image/png", "image/svg+xml"} & {*one}
    ]
    return sorted({output.output_type for output in cell.outputs}) + tables + pictures


def test_there_is_a_notebook_of_each_kind() -> None:
    assert {path.stem for path in NOTEBOOKS} == set(_PACKAGES)


def test_one_table_names_each_file_of_the_examples_once() -> None:
    table = [line for line in (EXAMPLES / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    named = re.findall(r"^\| \[([\w.]+)\]\(([\w.]+)\) \|", "\n".join(table), flags=re.MULTILINE)
    assert sorted(named) == [(name, name) for name in sorted(files)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_with_what_it_shows_and_nothing_of_its_machine(path: Path) -> None:
    stored = nbformat.read(path, as_version=4)
    nbformat.validate(stored)
    assert [cell.execution_count for cell in _code_cells(stored)] == [*range(1, 1 + len(_code_cells(stored)))]
    assert not [output for cell in _code_cells(stored) for output in cell.outputs if output.output_type == "error"]
    assert shown(nbformat.read(path, as_version=4)) == stored, "make gallery"
    assert not re.search(r"/(tmp|home|root|work|Users)/", path.read_text(encoding="utf-8"))
    kinds = [kind for cell in _code_cells(stored) for kind in _kinds(cell)]
    assert "picture" in kinds


_LONG = ("compare_runs", "quantize_decoder", "quantize_minilm", "quantize_vision", "train_quantized")
"""Notebooks that run at night alone, with all others, in kernels of their own.

``own_net`` runs each day. ``tests/test_real_model.py`` measures MiniLM, ``tests/runs/test_convert_images.py`` vision
models, ``tests/report`` and ``tests/sensitivity`` check what the tables show.
"""


@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path.stem not in _LONG], ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_is_stored(path: Path) -> None:
    _shows_what_is_stored(_executed(path.stem), path)


@pytest.mark.nightly
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_in_a_kernel_of_its_own(path: Path) -> None:
    skip_without(*_PACKAGES[path.stem])
    _shows_what_is_stored(shown(executed(path)), path)


def _shows_what_is_stored(notebook: Any, path: Path) -> None:
    stored = nbformat.read(path, as_version=4)
    assert [_kinds(cell) for cell in _code_cells(notebook)] == [_kinds(cell) for cell in _code_cells(stored)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_step_is_explained(path: Path) -> None:
    kinds = [cell.cell_type for cell in nbformat.read(path, as_version=4).cells]
    assert kinds[0] == "markdown"
    # Three cells of code in a row are one step: files of a run, or numbers and a picture.
    assert all("markdown" in kinds[at : at + 4] for at in range(len(kinds) - 3))


@pytest.mark.nightly
def test_minilm_shows_tables_and_pictures() -> None:
    notebook = _executed("quantize_minilm")
    coverage = _output(notebook, "q.coverage", "text/html")
    assert "<table>" in coverage
    # Without VNNI products of two activations gain nothing, and the fastest engine adds in float. With it, their loss
    # is near the limit: a processor that adds in another order may decide otherwise.
    left = "quantizing the attention lowers the SQNR" in coverage or not BYTE_PRODUCTS_ARE_EXACT
    assert f"linear 37 of 37, matmul {0 if left else 12} of 12" in coverage
    assert "encoder.layer.0.attention.self.eager_attention_forward.matmul_0" in coverage
    assert ("SQNR" in coverage) is BYTE_PRODUCTS_ARE_EXACT
    assert "<table>" in _output(notebook, "q.ranges", "text/html")
    sensitivity = _output(notebook, "q.sensitivity", "text/html")
    assert "{query,key,value}" in sensitivity
    assert "<svg" in _output(notebook, "q.sensitivity.plot(limit=12)", "text/html")
    assert "kept in float" in _output(notebook, "q.sensitivity.plot(limit=6)", "text/html")
    assert _output(notebook, "same", "text/plain") == "True"


@pytest.mark.nightly
def test_minilm_shows_each_table_once() -> None:
    notebook = _executed("quantize_minilm")
    for cell in _code_cells(notebook):
        shown = [output for output in cell.outputs if "text/html" in output.get("data", {})]
        # A widget of a progress bar is no table of ours.
        assert sum("qz-" in output.data["text/html"] for output in shown) <= 1, cell.source


@pytest.mark.nightly
def test_minilm_engine_is_close_to_float() -> None:
    notebook = _executed("quantize_minilm")
    printed = _printed(notebook)
    means = {line.split()[0]: float(line.split()[5].rstrip(",")) for line in printed.splitlines() if "mean" in line}
    assert means["float"] == pytest.approx(1, abs=1e-3)
    assert means["proxy"] > 0.97
    assert means["engine"] > 0.97
    assert "+        return self.site_forward_linear_0(F.linear, input, self.weight, self.bias)" in printed
    assert "times as fast" in printed


@pytest.mark.nightly
def test_training_with_the_rounding_is_shown_step_by_step() -> None:
    notebook = _executed("train_quantized")
    assert "<svg" in _output(notebook, "q.sensitivity.plot(limit=8)", "text/html")
    assert "<polyline" in _output(notebook, "curve(losses)", "image/svg+xml")
    table = [line for line in _printed(notebook).splitlines() if line.endswith(" dB")][-5:]
    rows = {line[:22].strip(): [float(cell) for cell in line[22:].split()[:4]] for line in table}
    assert list(rows) == ["float", "PTQ", "PTQ, 2 in float", "QAT", "engine"]
    accuracy, _, divergence, _ = ({name: row[at] for name, row in rows.items()} for at in range(4))
    assert accuracy["float"] > 0.9
    assert divergence["float"] == 0
    assert divergence["PTQ, 2 in float"] < divergence["PTQ"] / 2
    assert divergence["QAT"] < divergence["PTQ"] / 2
    assert divergence["engine"] < divergence["PTQ"] / 2
    assert accuracy["engine"] == pytest.approx(accuracy["QAT"], abs=0.02)


def test_the_vision_model_in_int8_reads_what_float_reads() -> None:
    notebook = _executed("quantize_vision")
    assert "SQNR" in _output(notebook, "q.layers", "text/html")
    rows = {line[:17].strip(): line[17:].split() for line in _printed(notebook).splitlines() if " of 397 " in line}
    assert list(rows) == ["float", "INT8 in PyTorch", "INT8 engine"]
    assert float(rows["float"][0]) > 0.9
    assert float(rows["INT8 engine"][0]) == pytest.approx(float(rows["float"][0]), abs=0.02)
    assert int(rows["float"][1]) == 0
    assert int(rows["INT8 engine"][1]) < 12
    assert float(rows["INT8 engine"][4]) > 20


@pytest.mark.nightly
def test_the_decoder_writes_with_its_cache_what_float_writes() -> None:
    notebook = _executed("quantize_decoder")
    printed = _printed(notebook)
    scores = {line[:17].strip(): float(line[17:].split()[0]) for line in printed.splitlines() if line.endswith("%")}
    assert list(scores) == ["float", "INT8 in PyTorch", "INT8 engine"]
    assert 1 < scores["float"] < 3
    assert scores["INT8 engine"] == pytest.approx(scores["float"], rel=0.02)
    written = [line for line in printed.splitlines() if "the train to Turin leaves from platform" in line]
    assert len(written) == 2
    assert len(written[0].split()) == 30


def test_a_net_of_ones_own_has_a_verdict_and_pictures() -> None:
    notebook = _executed("own_net")
    printed = _printed(notebook)
    scores = {
        line.split()[0]: float(line.split()[1]) for line in printed.splitlines() if re.match(r"(float|engine) ", line)
    }
    assert scores["float"] > 18
    assert scores["engine"] == pytest.approx(scores["float"], abs=0.1)
    assert "verdict" in printed
    assert _output(notebook, "torch.equal(engine(unseen[:4]), narrow)", "text/plain") == "True"


@pytest.mark.nightly
def test_compared_runs_differ_in_score_and_in_ranges() -> None:
    notebook = _executed("compare_runs")
    table = _output(notebook, "runs", "text/html")
    assert all(f"calibrator={name}" in table for name in ("max", "percentile", "output"))
    assert "The best score is" in table
    assert "latency" in _output(notebook, "runs.plot()", "text/html")
    layers = {line.split()[0]: line for line in _printed(notebook).splitlines() if " dB" in line}
    assert {"first", "second", "third", "head"} <= set(layers)
    assert layers["second"].count(" dB") == 2  # max keeps no histogram of it
    scores = dict(re.findall(r">calibrator=(\w+)</td>.*?<td[^>]*>(0\.\d{4})</td>", table, flags=re.DOTALL))
    assert float(scores["percentile"]) < float(scores["output"])
