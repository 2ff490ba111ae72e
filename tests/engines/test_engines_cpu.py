"""OpenVINO and ONNX Runtime: numbers against numpy, engine files, and what is said of bad input."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quantizer.engines import BuildOptions, build_engine, load_engine
from quantizer.engines.base import checked_inputs
from quantizer.errors import EngineError, MissingDependencyError
from quantizer.export.qdq.onnx_file import TensorSpec
from quantizer.pipeline.engine_module import CallForm, EngineModule

onnx = pytest.importorskip("onnx", reason="install enginequant[onnx]")

BACKENDS = ["openvino", "onnxruntime"]


@pytest.fixture(params=BACKENDS)
def name(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param, reason=f"install enginequant[{request.param}]")
    return str(request.param)


@pytest.mark.parametrize("shape", [(1, 1), (3, 17)])
def test_numbers(name: str, shape: tuple[int, int], qdq: Any) -> None:
    engine = load_engine(name, qdq.path)
    x = qdq.input(*shape)
    np.testing.assert_allclose(engine({"x": x})["y"], qdq.expected(x), rtol=1e-4, atol=1e-4)


def test_engine_file_gives_the_same_bits_and_needs_no_onnx_file(name: str, qdq: Any, tmp_path: Path) -> None:
    source = shutil.copy(qdq.path, tmp_path / "model.onnx")
    x = qdq.input(2, 9)
    expected = load_engine(name, source)({"x": x})["y"]
    result = build_engine(name, source, tmp_path / "model.engine")
    Path(source).unlink()
    assert result.path == tmp_path / "model.engine"
    assert result.size_bytes == result.path.stat().st_size
    assert result.seconds > 0
    assert [path.name for path in tmp_path.iterdir()] == ["model.engine"]
    np.testing.assert_array_equal(load_engine(name, result.path, threads=2)({"x": x})["y"], expected)


def test_description(name: str, qdq: Any, tmp_path: Path) -> None:
    for path in (qdq.path, build_engine(name, qdq.path, tmp_path / "model.engine").path):
        engine = load_engine(name, path)
        assert engine.name == name
        assert engine.device == "cpu"
        assert engine.input_names == ("x",)
        assert engine.output_names == ("y",)
        assert [str(spec) for spec in engine.inputs] == ["x: float32[?, ?, 64]"]


def test_outputs_are_the_callers_own(name: str, qdq: Any) -> None:
    engine = load_engine(name, qdq.path)
    first = engine({"x": qdq.input(1, 4)})["y"]
    kept = first.copy()
    engine({"x": np.zeros((1, 4, 64), np.float32)})
    np.testing.assert_array_equal(first, kept)


def test_input_that_is_not_contiguous(name: str, qdq: Any) -> None:
    engine = load_engine(name, qdq.path)
    x = qdq.input(4, 6)
    turned = np.asfortranarray(x)
    turned.flags.writeable = False
    np.testing.assert_array_equal(engine({"x": turned})["y"], engine({"x": x})["y"])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, r"input 'x' is missing; expected x: float32\[\?, \?, 64\]"),
        ({"x": np.zeros((1, 2, 64), np.float32), "ids": np.zeros(1)}, r"it has no input 'ids'; expected x: float32"),
        ({"x": np.zeros((1, 2, 64))}, r"input 'x' is float64\[1, 2, 64\], expected x: float32\[\?, \?, 64\]"),
        ({"x": np.zeros((1, 2, 65), np.float32)}, r"input 'x' is float32\[1, 2, 65\], expected x: float32"),
        ({"x": np.zeros((2, 64), np.float32)}, r"input 'x' is float32\[2, 64\], expected x: float32"),
    ],
    ids=["missing", "unknown", "type", "size", "rank"],
)
def test_wrong_inputs(name: str, inputs: dict[str, Any], message: str, qdq: Any) -> None:
    engine = load_engine(name, qdq.path)
    # Calls with known types and shapes are not checked again; this must not let others through.
    right = {"x": qdq.input(1, 2)}
    for _ in range(2):
        np.testing.assert_array_equal(engine(right)["y"], engine(right)["y"])
        with pytest.raises(EngineError, match=f"{name} engine: {message}"):
            engine(inputs)


def test_progress_starts_at_zero_and_ends_at_one(name: str, qdq: Any, tmp_path: Path) -> None:
    told: list[float] = []
    options = BuildOptions(progress=lambda share, _: told.append(share))
    build_engine(name, qdq.path, tmp_path / "model.engine", options)
    assert told == [0.0, 1.0]


def test_unknown_operator_is_named_and_the_old_engine_stays(name: str, write_qdq: Any, tmp_path: Path) -> None:
    engine = tmp_path / "model.engine"
    engine.write_bytes(b"the old one")
    said = r"refused .*model\.onnx.*node 'tail/0' \(Frobnicate\) of module 'tail'.*; replace the call"
    with pytest.raises(EngineError, match=said):
        build_engine(name, write_qdq(tail=("Frobnicate",)).path, engine)
    assert engine.read_bytes() == b"the old one"
    assert [path.name for path in tmp_path.iterdir()] == ["model.engine"]


class Cancelled(Exception):
    """A caller's own, which says nothing about the file."""


def test_an_exception_of_the_progress_callback_is_the_callers(name: str, qdq: Any, tmp_path: Path) -> None:
    def cancel(share: float, phase: str) -> None:
        raise Cancelled("by the caller")

    with pytest.raises(Cancelled, match="by the caller"):
        build_engine(name, qdq.path, tmp_path / "m.engine", BuildOptions(progress=cancel))
    assert not (tmp_path / "m.engine").exists()


@pytest.mark.parametrize("name", BACKENDS)
def test_missing_library_names_the_extra(name: str, qdq: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    message = rf"'{name}' is not installed: run  pip install 'enginequant\[{name}\]'"
    with pytest.raises(MissingDependencyError, match=message):
        load_engine(name, qdq.path)
    with pytest.raises(MissingDependencyError, match=message):
        build_engine(name, qdq.path, tmp_path / "model.engine")


def test_weights_in_another_file(write_qdq: Any, tmp_path: Path) -> None:
    model = write_qdq()
    path = tmp_path / "model.onnx"
    onnx.save(onnx.load(model.path), path, save_as_external_data=True, location="model.data", size_threshold=0)
    x = model.input(1, 3)
    # OpenVINO takes them into the engine; ONNX Runtime would go on pointing to them.
    pytest.importorskip("openvino")
    build_engine("openvino", path, tmp_path / "ov.engine")
    pytest.importorskip("onnxruntime")
    with pytest.raises(EngineError, match="stores weights in another file"):
        build_engine("onnxruntime", path, tmp_path / "ort.engine")
    assert not (tmp_path / "ort.engine").exists()
    (tmp_path / "model.data").unlink()
    np.testing.assert_allclose(
        load_engine("openvino", tmp_path / "ov.engine")({"x": x})["y"], model.expected(x), rtol=1e-4, atol=1e-4
    )


def test_openvino_names_outputs_as_the_file_does(write_qdq: Any) -> None:
    # The Identity at the end is removed, and its port then carries the name of the node before as well.
    pytest.importorskip("openvino")
    assert load_engine("openvino", write_qdq(tail=("Tanh", "Identity")).path).output_names == ("y",)


def test_tensors_as_inputs(name: str, qdq: Any) -> None:
    engine = load_engine(name, qdq.path)
    x = qdq.input(2, 3)
    tensor = torch.tensor(x, requires_grad=True)
    made = engine({"x": tensor})["y"]
    assert isinstance(made, torch.Tensor)
    assert not made.requires_grad
    np.testing.assert_array_equal(made.numpy(), engine({"x": x})["y"])
    with pytest.raises(EngineError, match=r"input 'x' is float64\[2, 3, 64\], expected x: float32"):
        engine({"x": tensor.double()})


def test_a_result_takes_tensors_that_need_a_gradient(name: str, qdq: Any) -> None:
    engine = load_engine(name, qdq.path)
    module = EngineModule(engine, CallForm.by_names("Net", engine.input_names, engine.output_names))
    x = torch.from_numpy(qdq.input(2, 3))
    assert torch.equal(module(x=x.clone().requires_grad_())["y"], module(x)["y"])


def test_one_input_needs_no_name(name: str, qdq: Any) -> None:
    engine = load_engine(name, qdq.path)
    x = qdq.input(2, 3)
    np.testing.assert_array_equal(engine(x)["y"], engine({"x": x})["y"])
    assert torch.equal(engine(torch.from_numpy(x))["y"], torch.from_numpy(engine(x)["y"]))
    assert repr(engine) == f"{type(engine).__name__}({engine.name!r}, x: float32[?, ?, 64] -> y)"


def test_one_array_is_not_two_inputs() -> None:
    specs = [TensorSpec(name, np.dtype("int64"), (None,)) for name in ("ids", "mask")]
    with pytest.raises(EngineError, match=r"it has 2 inputs but got one ndarray; expected a mapping of ids: int"):
        checked_inputs("openvino", specs, np.zeros(3, np.int64))


def test_an_engine_that_is_cut_short(name: str, qdq: Any, tmp_path: Path) -> None:
    path = build_engine(name, qdq.path, tmp_path / "model.engine").path
    content = path.read_bytes()
    for kept in (content[: int(0.999 * len(content))], content[: len(content) // 2], content[:50], b"no engine at all"):
        path.write_bytes(kept)
        with pytest.raises(EngineError, match=r"model\.engine (is cut short|is not an engine|is not an ONNX file)"):
            load_engine(name, path)


def test_an_engine_of_the_other_library(name: str, qdq: Any, tmp_path: Path) -> None:
    other = next(other for other in BACKENDS if other != name)
    pytest.importorskip(other)
    path = build_engine(other, qdq.path, tmp_path / "model.engine").path
    with pytest.raises(
        EngineError, match=rf"model\.engine is an engine of {other}, not of {name}: call load_engine\('{other}'"
    ):
        load_engine(name, path)


def test_an_openvino_engine_of_another_release(qdq: Any, tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    path = build_engine("openvino", qdq.path, tmp_path / "model.engine").path
    release = openvino.__version__.partition("-")[0].encode()
    content = path.read_bytes()
    assert release in content
    path.write_bytes(content.replace(b"ov=" + release, b"ov=" + b"1" * len(release), 1))
    with pytest.raises(EngineError, match="An engine only runs with the release and processor type of its build"):
        load_engine("openvino", path, verify=False)


def test_the_input_has_the_name_of_the_file_where_a_node_behind_it_is_removed(name: str, tmp_path: Path) -> None:
    text = (
        '<ir_version: 10, opset_import: ["" : 20]> g (float[n, 4] x) => (float[n, 4] y) '
        "<int64[4] none = {0, 0, 0, 0}> { a = Pad (x, none) y = Relu (a) }"
    )
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    for path in (tmp_path / "model.onnx", build_engine(name, tmp_path / "model.onnx", tmp_path / "m.engine").path):
        engine = load_engine(name, path)
        assert engine.input_names == ("x",)
        assert np.array_equal(engine({"x": np.full((2, 4), -1, np.float32)})["y"], np.zeros((2, 4)))


def test_openvino_outputs_of_other_axes_are_refused() -> None:
    ov = pytest.importorskip("openvino", reason="needs enginequant[openvino]")
    from quantizer.engines.openvino.compiled_models import _check_outputs

    def model(*sizes: int) -> Any:
        input_ = ov.opset13.parameter(ov.PartialShape(list(sizes)), name="x")
        return ov.Model([ov.opset13.relu(input_, name="y")], [input_])

    _check_outputs(model(-1, 16), model(-1, 16), Path("m.onnx"))
    _check_outputs(model(-1, 16), model(4, 16), Path("m.onnx"))
    with pytest.raises(EngineError, match=r"compiles m.onnx wrongly: its output '.*' has the shape \[1,\?,16\]"):
        _check_outputs(model(-1, 16), model(1, -1, 16), Path("m.onnx"))
