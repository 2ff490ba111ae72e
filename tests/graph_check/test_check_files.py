"""Files that cannot be read, and external data: clear errors, and nothing opened outside the model's folder."""

from __future__ import annotations

import builtins
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from qdq_graphs import linear, onnx

from quantizer.check import Finding, check_file, checked_file
from quantizer.errors import ConfigError, ExportError, MissingDependencyError
from quantizer.export.qdq import onnx_file as light_message
from quantizer.plan.targets import profile


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return linear().save(tmp_path / "m.onnx")


def external(folder: Path) -> Path:
    """The same graph with all of its constants in ``m.data`` beside it."""
    path = folder / "m.onnx"
    proto = linear().proto()
    onnx.save(proto, path, save_as_external_data=True, location="m.data", size_threshold=0)
    assert (folder / "m.data").is_file()
    return path


def moved(path: Path, location: str) -> None:
    """Let the model say that its data is elsewhere."""
    proto = onnx.load(path, load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    path.write_bytes(proto.SerializeToString())


def the_data_finding(path: Path) -> Finding:
    findings = check_file(path, "tensorrt")
    assert {finding.rule for finding in findings} == {"external-data"}
    assert {finding.severity for finding in findings} == {"error"}
    return findings[0]


@pytest.mark.parametrize("share", [0.2, 0.5, 0.99])
def test_a_truncated_file(file: Path, share: float) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ExportError, match=r"m.onnx is not a complete ONNX file .*copy it again"):
        check_file(file, "tensorrt")


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 something else", b"\x00" * 100])
def test_a_file_of_something_else(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "m.onnx").write_bytes(data)
    with pytest.raises(ExportError, match=r"m.onnx (contains no nodes|is not a complete ONNX file)"):
        check_file(tmp_path / "m.onnx", "tensorrt")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"none.onnx does not exist; expected an ONNX file"):
        check_file(tmp_path / "none.onnx", "tensorrt")
    with pytest.raises(ExportError, match=r"is a folder; expected an ONNX file"):
        check_file(tmp_path, "tensorrt")


def test_an_unknown_target(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown backend 'tensort'; known: onnxruntime, .*tensorrt"):
        check_file(file, "tensort")


@pytest.mark.parametrize("package", ["onnx", "onnx_ir"])
def test_a_missing_library_names_the_extra(file: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    original = builtins.__import__

    def missing(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return original(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(
        MissingDependencyError, match=rf"'{package}' is not installed: run  pip install 'enginequant\[onnx"
    ):
        check_file(file, "tensorrt")


def test_external_data_in_the_folder_is_read(tmp_path: Path) -> None:
    assert check_file(external(tmp_path), "tensorrt") == []


def test_what_external_data_says_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(linear(scale=-1).proto(), path, save_as_external_data=True, location="m.data", size_threshold=0)
    assert {finding.rule for finding in check_file(path, "tensorrt")} == {"scale-value"}


@pytest.mark.parametrize("location", ["../outside.data", "/etc/passwd", "sub/../../outside.data"])
def test_external_data_outside_the_folder_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, location: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = external(folder)
    shutil.copy(folder / "m.data", tmp_path / "outside.data")
    moved(path, location)
    opened = []
    original = builtins.open

    def note(file: Any, *arguments: Any, **keywords: Any) -> Any:
        opened.append(os.fspath(file) if not isinstance(file, int) else "")
        return original(file, *arguments, **keywords)

    monkeypatch.setattr(builtins, "open", note)
    finding = the_data_finding(path)
    assert "outside the model's folder and was not opened" in finding.problem
    assert location in finding.problem
    assert not {Path(name).name for name in opened} & {"outside.data", "passwd"}
    assert path.name in {Path(name).name for name in opened}


def test_a_link_to_data_outside_the_folder_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = external(folder)
    (folder / "m.data").rename(tmp_path / "outside.data")
    (folder / "m.data").symlink_to(tmp_path / "outside.data")
    assert "outside the model's folder and was not opened" in the_data_finding(path).problem


def test_a_second_name_of_a_file_elsewhere_is_not_opened(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = external(folder)
    os.link(folder / "m.data", tmp_path / "outside.data")
    assert "has a second hard link and was not opened" in the_data_finding(path).problem


def test_missing_external_data(tmp_path: Path) -> None:
    path = external(tmp_path)
    (tmp_path / "m.data").unlink()
    finding = the_data_finding(path)
    assert finding.problem == "its data file m.data does not exist"
    assert finding.node == "c0"


def test_truncated_external_data(tmp_path: Path) -> None:
    path = external(tmp_path)
    data = tmp_path / "m.data"
    data.write_bytes(data.read_bytes()[:1000])
    assert "of m.data, but the file has 1000 bytes" in the_data_finding(path).problem


def test_a_finding_reads_as_a_sentence(tmp_path: Path) -> None:
    (finding,) = check_file(linear(zero=3).save(tmp_path / "m.onnx"), "tensorrt-rtx")
    assert str(finding) == (
        "error [zero-point] at QuantizeLinear_0: its zero point is 3, and tensorrt-rtx accepts only 0; "
        "quantize symmetrically: zero point 0, scale = largest magnitude / 127"
    )


def test_errors_come_first(tmp_path: Path) -> None:
    found = check_file(linear(zero=3, k=8, scale=0.0).save(tmp_path / "m.onnx"), "tensorrt")
    assert [finding.severity for finding in found] == ["error", "error", "warning"]


def test_nodes_of_branches_and_functions_are_seen(tmp_path: Path) -> None:
    """A file that calls its quantizer as a function of its own is judged by what stands in the function."""
    proto = linear(zero=3).proto()
    quantize = proto.graph.node[0]
    body = onnx.helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["y"])
    imports = [onnx.helper.make_opsetid("", 20)]
    function = onnx.helper.make_function("local", "Own", ["x", "scale", "zero"], ["y"], [body], imports)
    quantize.op_type, quantize.domain = "Own", "local"
    proto.functions.append(function)
    proto.opset_import.append(onnx.helper.make_opsetid("local", 1))
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    (finding,) = check_file(tmp_path / "m.onnx", "tensorrt")
    assert finding.rule == "zero-point"


def test_weights_are_kept_out_of_what_onnx_reads(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    check = onnx.checker.check_model

    def checked(proto: Any) -> None:
        given.append(len(proto.graph.initializer))
        check(proto)

    monkeypatch.setattr(onnx.checker, "check_model", checked)
    whole = checked_file.read_subject(file, profile("tensorrt"))
    monkeypatch.setattr(light_message, "_LARGE", 0)
    light = checked_file.read_subject(file, profile("tensorrt"))
    assert given[0] > 0
    assert given[1] == 0
    # What the rules see is the same: constants with their values, inputs, and inferred shapes.
    held, expected = light.model.graph, whole.model.graph
    assert [value.name for value in held.inputs] == [value.name for value in expected.inputs]
    assert held.initializers.keys() == expected.initializers.keys()
    for name, value in expected.initializers.items():
        assert (held.initializers[name].const_value.numpy() == value.const_value.numpy()).all()
    shapes = [
        [[str(value.shape), value.dtype] for node in graph for value in node.outputs] for graph in (held, expected)
    ]
    assert shapes[0] == shapes[1]
    assert light.refused_by_checker == whole.refused_by_checker == ""
