"""Exports that cannot be: a clear error, and nothing left behind."""

from __future__ import annotations

import builtins
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from daily import some_daily
from helpers import Mlp
from torch import Tensor, nn
from toy_nets import net

import quantizer.export.exporter as onnx_file
from quantizer import Quantizer
from quantizer.errors import ExportError, MissingDependencyError
from quantizer.export.exporter import export_onnx

Prepared = tuple[Quantizer, nn.Module, Tensor]


@pytest.fixture(scope="module")
def mlp() -> Prepared:
    torch.manual_seed(0)
    model, x = Mlp().eval(), torch.randn(4, 32)
    quantizer = Quantizer(preset="plain", backend="tensorrt")
    quantizer.calibrate(model, [x])
    return quantizer, quantizer.quantize(model), x


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_a_missing_library_names_the_extra(
    mlp: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    quantizer, frozen, x = mlp
    original = builtins.__import__

    def missing(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return original(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(
        MissingDependencyError, match=rf"'{package}' is not installed: run  pip install 'enginequant\[onnx\]'"
    ):
        quantizer.export(frozen, tmp_path / "m.onnx", x)
    assert not list(tmp_path.iterdir())


PLACES = [
    ("none/m.onnx", r"the folder .*/none does not exist; create it first"),
    ("file/m.onnx", r"the folder .*/file is not a folder"),
    (".", "is a folder; expected the name of a file, such as model.onnx"),
    ("", "the path to write to is empty|is a folder"),
    ("nowhere", "is a link to none, which does not exist"),
    ("n" * 300, "File name too long"),
    ("/dev/null", "is a device, a pipe or a socket"),
]


@pytest.mark.parametrize(("place", "words"), PLACES, ids=[words for _, words in PLACES])
def test_where_no_file_can_be(
    mlp: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, words: str
) -> None:
    quantizer, frozen, x = mlp
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to("none")
    # Before the export: the model is not run.
    monkeypatch.delattr(torch.onnx, "export")
    with pytest.raises(ExportError, match=words):
        quantizer.export(frozen, tmp_path if place == "." else place, x)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "nowhere"]


@pytest.mark.parametrize(
    ("opset", "words"),
    [
        (13, "scales need opset 19 or later"),
        (18, "scales need opset 19 or later"),
        (99, "expected 18 or later"),
    ],
)
def test_an_opset_that_cannot_be(mlp: Prepared, tmp_path: Path, opset: int, words: str) -> None:
    quantizer, frozen, x = mlp
    with pytest.raises(ExportError, match=f"opset={opset}.*{words}"):
        quantizer.export(frozen, tmp_path / "m.onnx", x, opset=opset)
    assert not list(tmp_path.iterdir())


def test_a_folder_without_permission(mlp: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantizer, frozen, x = mlp
    # Nothing is forbidden to root, which tests may run as.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ExportError, match="cannot be written"):
        quantizer.export(frozen, tmp_path / "m.onnx", x)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a file system that nobody can write to: /proc")
def test_a_file_system_that_nobody_can_write_to(mlp: Prepared) -> None:
    quantizer, frozen, x = mlp
    with pytest.raises(ExportError, match=r"^/proc/m\.onnx.* cannot be written"):
        quantizer.export(frozen, "/proc/m.onnx", x)


@pytest.mark.parametrize("step", ["run_passes", "replace", "checker"])
@pytest.mark.parametrize("error", some_daily([OSError(28, "No space left on device"), KeyboardInterrupt()], 1))
def test_nothing_is_left_half_written(
    mlp: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    quantizer, frozen, x = mlp
    onnx = pytest.importorskip("onnx", reason="exporting needs enginequant[onnx]")
    (tmp_path / "m.onnx").write_text("before")

    def fail(*arguments: Any) -> None:
        raise error

    owner, name = {
        "run_passes": (onnx_file, "run_passes"),
        "replace": (os, "replace"),
        "checker": (onnx.checker, "check_model"),
    }[step]
    monkeypatch.setattr(owner, name, fail)
    # What a pass or the checker itself raises is no error of ours.
    expected = ExportError if isinstance(error, OSError) and step != "run_passes" else type(error)
    with pytest.raises(expected, match="No space left on device" if isinstance(error, OSError) else None):
        quantizer.export(frozen, tmp_path / "m.onnx", x)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("m.onnx", "before")]


def test_a_graph_that_the_checker_refuses(mlp: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantizer, frozen, x = mlp
    onnx = pytest.importorskip("onnx", reason="exporting needs enginequant[onnx]")

    class Spoil:
        def requires(self, model: Any) -> None:
            return None

        def run(self, model: Any) -> int:
            next(iter(model.graph)).op_type = "NoSuchOperator"
            return 1

        def ensures(self, model: Any) -> None:
            return None

    monkeypatch.setattr(onnx_file, "passes", lambda *_: (Spoil(),))
    with pytest.raises(ExportError, match=r"m.onnx: onnx.checker refuses the graph: .*NoSuchOperator") as caught:
        quantizer.export(frozen, tmp_path / "m.onnx", x)
    assert isinstance(caught.value.__cause__, onnx.checker.ValidationError)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("example", [{}, {"z": torch.zeros(4, 32)}, torch.zeros(4, 7), None, (), "text"])
def test_an_example_that_does_not_fit(mlp: Prepared, tmp_path: Path, example: Any) -> None:
    quantizer, frozen, _ = mlp
    with pytest.raises(ExportError, match=r"Mlp.forward fails for the example: "):
        quantizer.export(frozen, tmp_path / "m.onnx", example)
    assert not list(tmp_path.iterdir())


class Branching(nn.Linear):
    """Its way depends on the data, which no graph can hold."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if y.sum() > 0 else -y


def test_a_model_that_cannot_be_exported(tmp_path: Path) -> None:
    model, x = Branching(32, 32).eval(), torch.randn(4, 32)
    quantizer = Quantizer(preset="plain", backend="openvino")
    quantizer.calibrate(model, [x])
    words = r"Branching cannot be exported: .*depends on the values of its inputs at .*test_export_errors"
    with pytest.raises(ExportError, match=words) as caught:
        quantizer.export(quantizer.quantize(model), tmp_path / "m.onnx", x)
    assert "\x1b" not in str(caught.value)
    assert caught.value.__cause__ is not None
    with pytest.raises(ExportError, match="Branching cannot be exported"):
        export_onnx(model, tmp_path / "m.onnx", x, opset=20, dtype=torch.float32)
    assert not list(tmp_path.iterdir())


def test_fused_attention_of_three_axes_that_stays_float(tmp_path: Path) -> None:
    model, x = (
        net("self.head(F.scaled_dot_product_attention(x, x, x))", head=nn.Linear(8, 8)).eval(),
        torch.randn(2, 6, 8),
    )
    quantizer = Quantizer(preset="plain", backend="onnxruntime")
    quantizer.calibrate(model, [x])
    with pytest.raises(ExportError, match="only 4D query, key, and value are supported"):
        quantizer.export(quantizer.quantize(model), tmp_path / "model.onnx", x)
    with pytest.raises(ExportError, match="only 4D query, key, and value are supported"):
        export_onnx(model, tmp_path / "float.onnx", x, opset=20, dtype=torch.float32)
    assert list(tmp_path.iterdir()) == []
