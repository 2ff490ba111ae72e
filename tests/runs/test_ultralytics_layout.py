"""The layout ``ultralytics``: names, metadata, and what is refused. The client: tests/clients/test_ultralytics.py."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

for _package in ("onnx", "onnxscript", "onnxruntime", "openvino"):
    pytest.importorskip(_package, reason="the layout needs enginequant[onnx,onnxruntime,openvino]")

import onnx
import onnxruntime
from helpers import openvino_core

import quantizer
from quantizer.cli.main import main
from quantizer.config import RunConfig
from quantizer.config.data_section import MODULE
from quantizer.config.layouts import backends_of
from quantizer.config.schema import check_run
from quantizer.engines.for_this_cpu import cpu_candidates
from quantizer.errors import ConfigError, ExportError, QuantizerError, TaskError
from quantizer.pipeline.client_code import yolo_code
from quantizer.pipeline.convert_options import conversion_configs
from quantizer.pipeline.layouts import batch_of, write_module_card
from quantizer.pipeline.ultralytics_layout import ultralytics_model, write_ultralytics
from quantizer.plan.targets.clients import OF_MODULES, ULTRALYTICS
from quantizer.report.model_card import CARD

ONNXRUNTIME = next(name for name in cpu_candidates()[0] if name.startswith("onnxruntime"))
OPENVINO = next(name for name in cpu_candidates()[0] if name.startswith("openvino"))


class Head(nn.Module):
    """A head with the attributes of one of ultralytics."""

    kpt_shape = (17, 3)

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 6, 1)
        self.export = True

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).flatten(2)


class Detector(nn.Module):
    """A module with the attributes of a model of ultralytics, and with its ``forward`` and ``_apply``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 1), Head())
        self.names = {0: "a disc", 1: "sqüare"}
        self.stride = torch.tensor([8.0, 32.0])
        self.task = "detect"
        self.args = SimpleNamespace(imgsz=640)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = self.model(x)
        return out

    def _apply(self, fn: Callable[[Tensor], Tensor]) -> Detector:  # type: ignore[override]
        super()._apply(fn)
        self.stride = fn(self.stride)
        return self


def _images(count: int = 32) -> Tensor:
    return torch.rand(count, 3, 16, 24, generator=torch.Generator().manual_seed(0))


def _quantized(backend: str) -> Any:
    torch.set_num_threads(1)
    return quantizer.quantize_model(Detector().eval(), _images().split(4), backend=backend, progress=False)


@pytest.fixture(scope="module")
def made() -> Any:
    return _quantized(ONNXRUNTIME)


@pytest.fixture(scope="module")
def saved(made: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = made.save(tmp_path_factory.mktemp("results") / "shapes-int8", deliver=["ultralytics"])
    return folder


def _is_right(facts: dict[str, Any]) -> None:
    """Check the metadata, as ultralytics reads it."""
    assert facts["names"] == {0: "a disc", 1: "sqüare"}
    assert facts["args"] == {"batch": 1, "dynamic": False, "nms": False}
    # The size of the graph, and not that of the training.
    assert facts["imgsz"] == [16, 24]
    assert (facts["stride"], facts["batch"], facts["channels"]) == (32, 1, 3)
    assert (facts["task"], facts["head"], facts["end2end"]) == ("detect", "Head", False)
    assert facts["kpt_shape"] == [17, 3]
    assert {"description", "author", "date", "version", "license", "docs"} <= set(facts)


def test_the_file_of_onnx_runtime(made: Any, saved: Path) -> None:
    path = saved / "ultralytics" / "shapes-int8.onnx"
    assert {file.name for file in path.parent.iterdir()} == {"shapes-int8.onnx", CARD}
    properties = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    texts = ("names", "args", "imgsz", "end2end", "kpt_shape")
    numbers = {key: int(properties[key]) for key in ("stride", "batch", "channels")}
    _is_right({**properties, **{key: ast.literal_eval(properties[key]) for key in texts}, **numbers})
    session = onnxruntime.InferenceSession(path)
    # A batch size that is a name would make YOLO change the image size.
    assert [entry.shape for entry in (*session.get_inputs(), *session.get_outputs())] == [[1, 3, 16, 24], [1, 6, 96]]
    image = _images(1)
    (given,) = session.run(None, {session.get_inputs()[0].name: image.numpy()})
    torch.testing.assert_close(torch.from_numpy(given), made.engine(image), rtol=1e-4, atol=1e-4)
    # The engine's own file keeps its dimensions, although a layout may share files with it.
    assert onnx.load(saved / "model.onnx").graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


def test_the_folder_of_openvino(tmp_path: Path) -> None:
    result = _quantized(OPENVINO)
    name = "shapes-v1.0"
    folder = result.save(tmp_path / name, deliver=["ultralytics"]) / "ultralytics" / f"{name}_openvino_model"
    assert {file.name for file in folder.iterdir()} == {f"{name}.xml", f"{name}.bin", "metadata.yaml"}
    assert "Needs `ultralytics` and `openvino`." in (folder.parent / CARD).read_text(encoding="utf-8")
    _is_right(yaml.safe_load((folder / "metadata.yaml").read_text(encoding="utf-8")))
    model = openvino_core().read_model(folder / f"{name}.xml")
    assert list(model.input().get_shape()) == [1, 3, 16, 24]
    compiled = openvino_core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    image = _images(1)
    given = torch.from_numpy(compiled([image.numpy()])[0])
    torch.testing.assert_close(given, result.engine(image), rtol=1e-4, atol=1e-4)


def test_the_card_has_the_code(saved: Path) -> None:
    card = (saved / "ultralytics" / CARD).read_text(encoding="utf-8")
    assert 'model = YOLO("shapes-int8.onnx")' in card
    assert "Needs `ultralytics` and `onnxruntime`." in card
    assert "library_name: ultralytics" in card


def test_the_folder_of_openvino_may_have_a_dot() -> None:
    code = yolo_code("yolo11n-v1.0_openvino_model", "detect")
    assert code.needs == "`ultralytics` and `openvino`"
    assert 'YOLO("yolo11n-v1.0_openvino_model")' in code.code


@pytest.mark.parametrize(
    ("task", "output"),
    [
        ("classify", "result.probs.top5"),
        ("detect", "result.boxes.xyxy"),
        ("obb", "result.obb.xyxyxyxy"),
        ("pose", "result.keypoints.xy"),
        ("segment", "result.masks.xy"),
        ("another", "result"),
    ],
)
def test_the_code_prints_the_outputs_of_the_task(
    made: Any, saved: Path, tmp_path: Path, task: str, output: str
) -> None:
    folder, model = tmp_path / "ultralytics", Detector()
    model.task = task
    shutil.copytree(saved / "ultralytics", folder)
    write_module_card(made.record, folder, model, quantized=True)
    (printed,) = re.findall(r"print\((.*)\)", (folder / CARD).read_text(encoding="utf-8"))
    assert printed.startswith(output)
    assert ("boxes" in printed) == (task == "detect")


def test_the_code_of_the_guide() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "serve-with.md").read_text(encoding="utf-8")
    assert 'YOLO("yolo11n-int8/ultralytics/yolo11n-int8_openvino_model")' in page
    assert 'deliver=["ultralytics"]' in page


@pytest.mark.parametrize(
    ("note", "batch"),
    [
        ("the engine accepts only batch 1, 2 or 4, with a model for each: openvino's model for all sizes is wrong", 4),
        ("the engine accepts only height 8 x batch 4 or height 9 x batch 2, with a model for each", 4),
        ("the engine accepts only height 8 or 9, with a model for each: batch 2 is wrong", 1),
        ("the float engine accepts only batch 1 or 4, with a model for each", 1),
        ("the model fixes axis 2 of 'x' at 16", 1),
    ],
)
def test_a_note_on_another_axis_keeps_the_smallest_batch(made: Any, note: str, batch: int) -> None:
    assert made._config.export.dynamic.batch[1] == 4
    assert batch_of(made._config, ["the model fixes axis 3 of 'x' at 24", note]) == batch


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["names", "stride", "task"])
def test_a_model_without_an_attribute(name: str) -> None:
    model = Detector()
    delattr(model, name)
    with pytest.raises(TaskError, match=f"needs a model of ultralytics, but Detector has no {name}; set these"):
        ultralytics_model(nn.Sequential(model))


def test_a_model_of_another_library(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    result = quantizer.quantize_model(nn.Conv2d(3, 8, 3), _images().split(4), backend=ONNXRUNTIME, progress=False)
    with pytest.raises(TaskError, match="Conv2d has no names, task, model; set these attributes, or pass the"):
        result.save(tmp_path / "out", deliver=["ultralytics"])
    assert not (tmp_path / "out").exists()


def test_a_wrapped_model_is_found() -> None:
    model = Detector()
    assert ultralytics_model(nn.Sequential(model)) is model


def test_a_head_that_is_not_in_export_mode() -> None:
    model = Detector()
    model.model[-1].export = False
    with pytest.raises(TaskError, match=r"needs the head in export mode.* set model\.model\[-1\]\.export = True"):
        ultralytics_model(model)


def test_a_graph_with_an_open_image_size(saved: Path, tmp_path: Path) -> None:
    graph = onnx.load(saved / "model.onnx")
    graph.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "height"
    onnx.save(graph, tmp_path / "model.onnx")
    with pytest.raises(
        ExportError, match=r"with a constant image size, but the graph has x \['batch', 3, 'height', 24"
    ):
        write_ultralytics(tmp_path, "a", Detector(), ONNXRUNTIME, tmp_path / "model.onnx", 1)


def test_another_layout_and_another_backend(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(QuantizerError, match="deliver: 'optimum' is not a layout of a module; expected ultralytics"):
        made.save(tmp_path / "out", deliver=["optimum"])
    config = made._config.model_copy(update={"quantizer": quantizer.QuantizerConfig(backend="torch")})
    monkeypatch.setattr(made, "_config", config)
    with pytest.raises(
        QuantizerError, match=r"does not exist for backend torch; quantize the model with backend=\['op"
    ):
        made.save(tmp_path / "out", deliver=["ultralytics"])
    assert not (tmp_path / "out").exists()


def test_one_layout_as_a_string(made: Any, tmp_path: Path) -> None:
    folder = made.save(tmp_path / "one", deliver="ultralytics")
    assert (folder / "ultralytics" / "one.onnx").exists()
    with pytest.raises(QuantizerError, match="deliver: 'optimum' is not a layout of a module"):
        made.save(tmp_path / "out", deliver="optimum")


def test_layouts_are_checked_before_the_engine_is_copied(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "copytree", lambda *paths, **options: pytest.fail("the engine was copied"))
    with pytest.raises(QuantizerError, match="deliver: 'optimum' is not a layout of a module"):
        made.save(tmp_path / "out", deliver=["ultralytics", "optimum"])
    monkeypatch.setattr(made, "model", nn.Conv2d(3, 8, 3))
    with pytest.raises(TaskError, match="needs a model of ultralytics"):
        made.save(tmp_path / "out", deliver=["ultralytics"])


def test_a_file_that_exists(made: Any, tmp_path: Path) -> None:
    (tmp_path / "out.onnx").write_text("mine", encoding="utf-8")
    with pytest.raises(QuantizerError, match=r"out\.onnx"):
        made.save(tmp_path / "out.onnx", deliver=["ultralytics"])
    assert (tmp_path / "out.onnx").read_text(encoding="utf-8") == "mine"


def test_the_layout_is_not_loaded_as_an_engine(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "a_openvino_model").mkdir()
    for folder in (saved / "ultralytics", tmp_path / "a_openvino_model"):
        for load in (quantizer.load, quantizer.load_converted):
            with pytest.raises(QuantizerError, match="is a layout for another client, without an engine; load"):
                load(folder)


# -- runs of a function ------------------------------------------------------------------------------------------------


def build() -> nn.Module:
    """The model of a run."""
    return Detector().eval()


def calibration() -> list[Tensor]:
    """The images of a run."""
    return [*_images().split(4)]


def test_a_run_of_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    name = Path(__file__).stem
    words = ["-m", f"{name}:build", "--inputs", f"{name}:calibration", "--quantization", "--deliver", "ultralytics"]
    assert main(["convert", *words, "--backend", ONNXRUNTIME, "-o", str(tmp_path / "shapes")]) == 0
    folder = tmp_path / "shapes" / "ultralytics"
    assert {file.name for file in folder.iterdir()} == {"shapes.onnx", CARD}
    assert 'YOLO("shapes.onnx")' in (folder / CARD).read_text(encoding="utf-8")


def test_a_function_without_a_backend_has_those_with_the_layout() -> None:
    options = {"model": "a:b", "inputs": "a:c", "quantization": True, "deliver": ("ultralytics",), "output": Path("o")}
    (config,) = conversion_configs(options, function=True)
    assert config.quantizer.candidates == ("openvino", "onnxruntime")
    assert config.deliver == ("ultralytics",)
    with pytest.raises(
        ConfigError, match="--deliver ultralytics does not exist for --backend torch; expected openvino"
    ):
        conversion_configs({**options, "backend": ("torch",)}, function=True)
    with pytest.raises(ConfigError, match="--deliver is only for checkpoints, but -m a:b is a function"):
        conversion_configs({**options, "deliver": ("ultralytics", "onnx")}, function=True)


def test_configurations_that_do_not_fit() -> None:
    data = {"calibration": {"name": "image-folder", "path": "a"}}
    values = {"model": {"source": "m", "task": "object-detection"}, "data": data, "deliver": ["ultralytics"]}
    with pytest.raises(
        ConfigError, match="deliver: 'ultralytics' is for a model of ultralytics that a function returns"
    ):
        check_run(RunConfig.model_validate({**values, "quantizer": {"backend": "openvino"}}))
    of_function = {"model": {"source": "a:b", "inputs": "a:c"}, "data": {}, "deliver": ["ultralytics"]}
    with pytest.raises(ConfigError, match="does not exist for backend torch; expected openvino or onnxruntime"):
        check_run(RunConfig.model_validate({**of_function, "quantizer": {"backend": "torch"}}))


def test_the_tables() -> None:
    assert set(ULTRALYTICS) == {MODULE}
    assert backends_of(OF_MODULES) == ["openvino", "onnxruntime"]
