"""Object detection: rows in the format of COCO, mean average precision as pycocotools has it, and its intervals."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image as Picture
from tiny_vision import tiny_detector

from quantizer.errors import TaskError
from quantizer.export.exporter import export_onnx
from quantizer.pipeline.convert_options import data_source
from quantizer.tasks import Boxes, Image, Task, build_task, load_examples, load_model, load_processor
from quantizer.tasks.image_inputs import read_image, read_size
from quantizer.tasks.object_detection import Detections, average_precision, match_objects

COCO = pytest.importorskip("pycocotools.coco", reason="install enginequant[hf]").COCO
COCOeval = pytest.importorskip("pycocotools.cocoeval", reason="install enginequant[hf]").COCOeval

NAME = "object-detection"
CLASSES = ("cat", "dog", "bird")
SIZE = 64


class _Detector(torch.nn.Module):
    """Takes images, and is asked for nothing else: what it finds is made up by each test."""

    config = transformers.YolosConfig(id2label=dict(enumerate(CLASSES)))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return pixel_values


@pytest.fixture
def task() -> Task:
    processor = transformers.YolosImageProcessorPil(size={"height": SIZE, "width": SIZE}, do_pad=False)
    return build_task(NAME, _Detector(), processor, batch_size=2)


@pytest.fixture
def examples(tmp_path: Path) -> list[Boxes]:
    """Images of several sizes with up to four objects; the first has none, and the last a crowd."""
    pick = np.random.default_rng(0)
    made = []
    for at in range(12):
        width, height = int(pick.integers(60, 100)), int(pick.integers(60, 100))
        Picture.new("RGB", (width, height)).save(tmp_path / f"{at}.png")
        count = 0 if at == 0 else int(pick.integers(1, 5))
        boxes = [tuple(map(float, pick.uniform(1, 30, 4))) for _ in range(count)]
        labels = tuple(CLASSES[kind] for kind in pick.integers(0, 3, count))
        made.append(Boxes(tmp_path / f"{at}.png", tuple(boxes), labels, (at == 11,) * count))  # type: ignore[arg-type]
    return made


def _found(examples: list[Boxes], seed: int) -> list[Detections]:
    """What a mediocre model finds: each object shifted, sometimes of another class, and some that are not there."""
    pick = np.random.default_rng(seed)
    made = []
    for example in examples:
        boxes = [np.add(box, pick.normal(0, 1, 4)) for box in example.boxes]
        kinds = [CLASSES.index(label) if pick.random() < 0.8 else 0 for label in example.labels]
        boxes += list(pick.uniform(1, 30, (3, 4)))
        kinds += list(pick.integers(0, 3, 3))
        made.append(Detections(np.abs(np.array(boxes)), np.array(kinds), pick.random(len(boxes))))
    return made


def _coco(found: list[Detections], examples: list[Boxes]) -> float:
    """The score as pycocotools sums it up itself, each image as one of its own."""
    truth = COCO()
    truth.dataset = {"info": {}, "images": [{"id": at} for at in range(len(examples))], "annotations": []}
    truth.dataset["categories"] = [{"id": at, "name": name} for at, name in enumerate(CLASSES)]
    for at, example in enumerate(examples):
        for box, label, crowd in zip(example.boxes, example.labels, example.crowds, strict=True):
            told = {"image_id": at, "category_id": CLASSES.index(label), "bbox": list(box), "area": box[2] * box[3]}
            number = len(truth.dataset["annotations"]) + 1
            truth.dataset["annotations"].append({**told, "iscrowd": int(crowd), "id": number})
    said = [
        {"image_id": at, "category_id": int(kind), "bbox": [*map(float, box)], "score": float(score)}
        for at, one in enumerate(found)
        for box, kind, score in zip(one.boxes, one.classes, one.scores, strict=True)
    ]
    with redirect_stdout(StringIO()):
        truth.createIndex()
        judged = COCOeval(truth, truth.loadRes(said), "bbox")
        judged.evaluate()
        judged.accumulate()
        judged.summarize()
    return float(judged.stats[0])


def test_the_score_is_that_of_pycocotools_for_all_rows_and_for_resamples(examples: list[Boxes]) -> None:
    found = _found(examples, seed=1)
    matches = match_objects(found, examples, CLASSES)
    draws = [np.arange(len(examples)), *np.random.default_rng(2).integers(len(examples), size=(5, len(examples)))]
    weights = np.array([np.bincount(draw, minlength=len(examples)) for draw in draws])
    expected = [_coco([found[at] for at in draw], [examples[at] for at in draw]) for draw in draws]
    assert 0.1 < expected[0] < 0.9
    np.testing.assert_allclose(average_precision(matches, weights), expected, atol=1e-12)


def _runs(examples: list[Boxes], found: list[Detections]) -> Callable[[dict[str, torch.Tensor]], object]:
    """A model that gives what was found as candidates: logits with a last class for nothing, boxes by their middles."""
    called = iter(range(0, len(examples), 2))

    def run(batch: dict[str, torch.Tensor]) -> object:
        start = next(called)
        logits = torch.full((2, 8, len(CLASSES) + 1), -30.0)
        logits[..., -1] = 0.0
        boxes = torch.zeros(2, 8, 4)
        for at in range(2):
            width, height = read_size(examples[start + at].path)
            one = found[start + at]
            for place, (box, kind, score) in enumerate(zip(one.boxes, one.classes, one.scores, strict=True)):
                x, y, wide, high = box / np.array([width, height, width, height])
                boxes[at, place] = torch.tensor([x + wide / 2, y + high / 2, wide, high])
                logits[at, place, kind] = float(np.log(score / (1 - score)))
        return {"logits": logits, "pred_boxes": boxes}

    return run


def test_objects_of_a_model_are_scored_with_intervals(task: Task, examples: list[Boxes]) -> None:
    found = _found(examples, seed=1)
    predictions = task.predict(_runs(examples, found), examples)
    assert task.score(predictions, examples) == pytest.approx(_coco(found, examples), abs=1e-6)
    perfect = [
        Detections(
            np.array(example.boxes).reshape(-1, 4),
            np.array([CLASSES.index(one) for one in example.labels]),
            np.full(len(example.labels), 0.9),
        )
        for example in examples
    ]
    best = task.predict(_runs(examples, perfect), examples)
    assert task.score(best, examples) == pytest.approx(1.0, abs=1e-6)
    low, high = task.difference_interval(best, predictions, examples, n=200)
    assert low < task.score(predictions, examples) - task.score(best, examples) < high < 0
    assert task.difference_interval(best, best, examples, n=20) == (0.0, 0.0)


def test_the_paired_figure_counts_objects_that_are_lost(task: Task, examples: list[Boxes]) -> None:
    box, other = np.array([[0.1, 0.1, 0.4, 0.4]]), np.array([[0.6, 0.6, 0.2, 0.2]])

    def one(boxes: Any, kind: int, score: float) -> Any:
        made = np.empty(1, dtype=object)
        made[0] = Detections(boxes, np.array([kind]), np.array([score]))
        return type("Told", (), {"decisions": made})

    assert task.paired(one(box, 0, 0.9), one(box + 0.01, 0, 0.6)) == {"objects_lost": 0.0}
    for lost in (one(box, 1, 0.9), one(other, 0, 0.9), one(box, 0, 0.4)):
        assert task.paired(one(box, 0, 0.9), lost) == {"objects_lost": 1.0}
    assert task.paired(one(box, 0, 0.4), one(box, 0, 0.9)) == {}


def _file(folder: Path, **changes: Any) -> Path:
    told = {
        "images": [{"id": 7, "file_name": "a.png"}, {"id": 8, "file_name": "b.png"}],
        "categories": [{"id": 3, "name": "dog"}],
        "annotations": [{"image_id": 7, "category_id": 3, "bbox": [1, 2, 3, 4], "iscrowd": 1}],
    }
    (folder / "images").mkdir()
    for path in (folder / "a.png", folder / "images" / "b.png"):
        Picture.new("RGB", (8, 8)).save(path)
    (folder / "labels.json").write_text(json.dumps({**told, **changes}))
    return folder / "labels.json"


def test_files_of_coco_are_read(tmp_path: Path) -> None:
    first = Boxes(tmp_path / "a.png", ((1.0, 2.0, 3.0, 4.0),), ("dog",), (True,))
    file = _file(tmp_path)
    assert data_source(str(file), "--evaluation") == {"name": "coco-json", "path": str(file)}
    assert load_examples("coco-json", path=file) == [first, Boxes(tmp_path / "images" / "b.png", (), (), ())]


def test_rows_and_models_that_do_not_fit(task: Task, examples: list[Boxes]) -> None:
    with pytest.raises(
        TaskError,
        match=r"the class 'fish', which the model does not have; expected one of cat, "
        r"dog, bird",
    ):
        task.targets([Boxes(examples[0].path, ((1.0, 1.0, 1.0, 1.0),), ("fish",), (False,))])
    with pytest.raises(TaskError, match=r"needs samples of kind Boxes, got Image: use a data set .* 'coco-json'"):
        task.targets([Image(examples[0].path, "cat")])
    with pytest.raises(TaskError, match=r"expected logits \[batch, candidates, classes\] and pred_boxes"):
        task.predict(lambda batch: {"logits": torch.zeros(2, 5, 4), "pred_boxes": torch.zeros(2, 4, 4)}, examples)
    plain = transformers.ViTImageProcessorPil(size={"height": SIZE, "width": SIZE})
    with pytest.raises(TaskError, match="ViTImageProcessorPil has no post_process_object_detection"):
        build_task(NAME, _Detector(), plain)


# -- processors of published detectors, which keep proportions ---------------------------------------------------------


def _pictures(folder: Path) -> list[Path]:
    pick, paths = np.random.default_rng(3), [folder / "wide.png", folder / "tall.png"]
    for path, (width, height) in zip(paths, [(60, 40), (40, 50)], strict=True):
        Picture.fromarray(pick.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(path)
    return paths


def test_a_detector_that_takes_a_mask_gets_padded_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, paths = load_model(str(tiny_detector(tmp_path, "detr")), NAME), _pictures(tmp_path)
    processor = load_processor(str(tmp_path), NAME)
    task = build_task(NAME, model, processor, batch_size=2)
    batch = task.inputs.batch(paths)
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        "pixel_values": (2, 3, 96, 96),
        "pixel_mask": (2, 96, 96),
    }
    assert batch["pixel_mask"].sum(dim=(1, 2)).tolist() == [32 * 48, 40 * 32]
    assert "they are padded to 96 x 96, with a mask" in caplog.text
    assert task.input_names == tuple(task.inputs.random(3, None)) == ("pixel_values", "pixel_mask")
    for row, path in enumerate(paths):
        alone = processor(read_image(path), return_tensors="pt")["pixel_values"][0]
        height, width = alone.shape[1:]
        assert torch.equal(batch["pixel_values"][row, :, :height, :width], alone)
    assert processor.pad_size is None
    # Its short side has the rounded size already, so the processor keeps it, and its long side is over the limit.
    Picture.new("RGB", (65, 31)).save(tmp_path / "long.png")
    assert task.inputs.batch([tmp_path / "long.png"])["pixel_mask"].sum() == 65 * 31


def test_files_contain_the_outputs_that_the_task_reads(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="install enginequant[onnx]")
    source = str(tiny_detector(tmp_path / "yolos", "yolos"))
    model = load_model(source, NAME)
    batch = build_task(NAME, model, load_processor(source, NAME)).example()
    export_onnx(model, tmp_path / "model.onnx", batch, opset=20, dtype=torch.float32)
    assert [value.name for value in onnx.load(tmp_path / "model.onnx").graph.output] == ["logits", "pred_boxes"]
    assert model(**batch).last_hidden_state is not None


def test_a_detector_without_a_mask_gets_stretched_images(tmp_path: Path) -> None:
    model = load_model(str(tiny_detector(tmp_path, "yolos")), NAME)
    task = build_task(NAME, model, load_processor(str(tmp_path), NAME), batch_size=2)
    batch = task.inputs.batch(_pictures(tmp_path))
    assert {name: tuple(value.shape) for name, value in batch.items()} == {"pixel_values": (2, 3, 32, 32)}
