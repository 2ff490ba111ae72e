"""OpenVINO's models for fixed shapes of the inputs: when there is one, when it is taken, what it gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantizer.engines import BuildOptions, InputSizes, build_engine, inspect_engine, load_engine
from quantizer.engines.engine_file import read_engine, write_engine
from quantizer.engines.openvino import compiled_models as fixed_shapes
from quantizer.engines.openvino.engine import _loaded
from quantizer.errors import EngineError

onnx = pytest.importorskip("onnx", reason="install enginequant[onnx]")
pytest.importorskip("openvino", reason="install enginequant[openvino]")

WEIGHT = np.random.default_rng(1).normal(size=(64, 32)).astype(np.float32) / 8
USUAL = BuildOptions(dynamic={"batch": (1, 4, 8), "sequence": (1, 16, 64)})


def written(folder: Path, shape: str) -> Path:
    """A product and a residual add of an input of this shape, in an ONNX file."""
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 20]> g (float[{shape}] x, float[{shape}] z) => (float[batch, n, 32] y)'
        " { s = Add (x, z) y = MatMul (s, w) }"
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(WEIGHT, "w"))
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


def given(batch: int, sequence: int) -> dict[str, np.ndarray]:
    """Two inputs."""
    random = np.random.default_rng(batch + sequence)
    return {name: random.normal(size=(batch, sequence, 64)).astype(np.float32) for name in ("x", "z")}


@pytest.mark.parametrize("size", [(4, 16), (4, 17), (1, 16), (8, 3)], ids=str)
def test_every_size_is_right(tmp_path: Path, size: tuple[int, int]) -> None:
    build_engine("openvino", written(tmp_path, "batch, sequence, 64"), tmp_path / "m.engine", USUAL)
    engine = load_engine("openvino", tmp_path / "m.engine")
    for _ in range(2):
        arrays = given(*size)
        np.testing.assert_allclose(engine(arrays)["y"], (arrays["x"] + arrays["z"]) @ WEIGHT, rtol=1e-4, atol=1e-4)


def test_the_usual_size_and_one_row_have_models_of_their_own(tmp_path: Path) -> None:
    path = build_engine("openvino", written(tmp_path, "batch, sequence, 64"), tmp_path / "m.engine", USUAL).path
    models = _loaded(path, 1)
    assert list(models.fixed) == [((4, 16, 64), (4, 16, 64)), ((1, 16, 64), (1, 16, 64))]
    for (rows, length, _), _ in models.fixed:
        found = models.of(list(given(rows, length).values()))
        assert [list(port.shape) for port in found.inputs] == [[rows, length, 64]] * 2
    for size in ((4, 17), (1, 17), (2, 16)):
        assert models.of(list(given(*size).values())) is models.compiled
    for size in ((4, 16), (8, 16), (1, 16)):
        assert inspect_engine("openvino", path, sizes=InputSizes(size[0], size[1])).layers


def test_the_smallest_size_is_that_of_the_batch_alone(tmp_path: Path) -> None:
    path = build_engine("openvino", written(tmp_path, "sequence, batch, 64"), tmp_path / "m.engine", USUAL).path
    assert list(_loaded(path, 1).fixed) == [((16, 4, 64), (16, 4, 64)), ((16, 1, 64), (16, 1, 64))]


@pytest.mark.parametrize(
    ("shape", "dynamic"),
    [
        ("batch, sequence, 64", {}),
        ("batch, sequence, 64", {"batch": (1, 4, 8)}),
        ("batch, rows, 64", USUAL.dynamic),
        ("4, 16, 64", USUAL.dynamic),
    ],
    ids=["nothing is known", "one size is not known", "another name", "no dynamic size"],
)
def test_without_usual_sizes_there_is_one_model(
    tmp_path: Path, shape: str, dynamic: dict[str, tuple[int, int, int]]
) -> None:
    path = build_engine("openvino", written(tmp_path, shape), tmp_path / "m.engine", BuildOptions(dynamic=dynamic)).path
    assert not _loaded(path, 1).fixed


def test_usual_sizes_of_one_row_have_one_model(tmp_path: Path) -> None:
    sizes = BuildOptions(dynamic={"batch": (1, 1, 8), "sequence": (4, 16, 64)})
    path = build_engine("openvino", written(tmp_path, "batch, sequence, 64"), tmp_path / "m.engine", sizes).path
    assert list(_loaded(path, 1).fixed) == [((1, 16, 64), (1, 16, 64))]


@pytest.mark.parametrize("beside", [False, True], ids=["in the file", "in a second file"])
def test_a_large_model_has_fewer_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: bool) -> None:
    path = written(tmp_path, "batch, sequence, 64")
    if beside:
        onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights", size_threshold=0)
    for copies in (0, 1, 2):
        monkeypatch.setattr(fixed_shapes, "MOST_COPIED_BYTES", (copies + 1) * WEIGHT.nbytes - 1)
        built = build_engine("openvino", path, tmp_path / f"{copies}.engine", USUAL).path
        assert len(_loaded(built, 1).fixed) == copies


def test_sizes_that_the_model_cannot_take(tmp_path: Path) -> None:
    # 16 columns, where the weight has 64 rows.
    built = build_engine("openvino", written(tmp_path, "batch, 5, sequence"), tmp_path / "m.engine", USUAL)
    assert [warning.partition(": ")[0] for warning in built.warnings] == [
        f"no separate model for inputs of x [{rows}, 5, 16], z [{rows}, 5, 16]" for rows in (4, 1)
    ]
    arrays = {name: values[:, :5] for name, values in given(2, 9).items()}
    assert load_engine("openvino", built.path)(arrays)["y"].shape == (2, 5, 32)


def built_and_told(folder: Path) -> tuple[Path, bytes, dict[str, Any]]:
    """An engine of three models, what the library built, and what its note tells."""
    path = build_engine("openvino", written(folder, "batch, sequence, 64"), folder / "m.engine", USUAL).path
    content, note = read_engine(path)
    return path, bytes(content), note


def test_the_weights_are_in_the_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.WEIGHT", np.random.default_rng(1).normal(size=(64, 4096)).astype(np.float32))
    path, content, _ = built_and_told(tmp_path)
    assert len(_loaded(path, 1).fixed) == 2
    assert WEIGHT.nbytes < len(content) < 1.1 * WEIGHT.nbytes
    assert content.count(WEIGHT.tobytes()) == 1


@pytest.mark.parametrize(
    "told",
    [[], None, 9, "0-9", [[]], [[[0]]], [[[0, 999999999]]], [[[9, 0]]], [[[0, "x"]]], [[[0, 9, 18]]], [[[-1, 9]]]],
    ids=str,
)
def test_damaged_ranges(tmp_path: Path, told: Any) -> None:
    path, content, note = built_and_told(tmp_path)
    write_engine(path, memoryview(content), note | {"models": told})
    with pytest.raises(EngineError, match="is not an engine of backend openvino, or is cut short"):
        load_engine("openvino", path)


def test_an_engine_can_have_models_for_some_sizes_alone(tmp_path: Path) -> None:
    options = BuildOptions(only_sizes=({"batch": 4, "sequence": 16}, {"batch": 1, "sequence": 16}))
    path = build_engine("openvino", written(tmp_path, "batch, sequence, 64"), tmp_path / "m.engine", options).path
    engine = load_engine("openvino", path)
    assert [spec.shape for spec in engine.inputs] == [(None, 16, 64)] * 2
    for size in ((4, 16), (1, 16)):
        arrays = given(*size)
        np.testing.assert_allclose(engine(arrays)["y"], (arrays["x"] + arrays["z"]) @ WEIGHT, rtol=1e-4, atol=1e-4)
    with pytest.raises(EngineError, match=r"no model for x \[3, 16, 64\], z .*; expected x \[4, .* or x \[1"):
        engine(given(3, 16))
    with pytest.raises(EngineError, match=r"expected x: float32\[\?, 16, 64\]"):
        engine(given(4, 17))
    # It is inspected at a size that it has.
    assert inspect_engine("openvino", path, sizes=InputSizes(8, 128)).layers
    one = replace(options, only_sizes=options.only_sizes[:1])
    alone = load_engine("openvino", build_engine("openvino", tmp_path / "model.onnx", tmp_path / "o.engine", one).path)
    assert alone.inputs[0].shape == (4, 16, 64)


def test_sizes_alone_must_be_known_and_are_openvinos(tmp_path: Path) -> None:
    path = written(tmp_path, "batch, rows, 64")
    with pytest.raises(EngineError, match=r"only_sizes: \{'batch': 4\} lacks the size of a dynamic axis"):
        build_engine("openvino", path, tmp_path / "m.engine", BuildOptions(only_sizes=({"batch": 4},)))
    with pytest.raises(EngineError, match="an engine of onnxruntime has one model for all sizes; leave it out"):
        build_engine("onnxruntime", path, tmp_path / "m.engine", BuildOptions(only_sizes=({"batch": 4, "samples": 1},)))
    assert not (tmp_path / "m.engine").exists()
