"""Synthetic scenes for detectors: the same number gives the same scene, and their annotations are valid COCO."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from quantizer.tasks import Boxes, load_examples

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks" / "detectors"))

from scenes import CLASSES, SIDE, scene, write_scenes
from ssd import SSD, ssd_loss


def test_a_number_determines_its_scene() -> None:
    first, again, other = scene(3), scene(3), scene(4)
    np.testing.assert_array_equal(first.image, again.image)
    np.testing.assert_array_equal(first.boxes, again.boxes)
    np.testing.assert_array_equal(first.labels, again.labels)
    assert not np.array_equal(first.image, other.image)


def test_boxes_lie_in_the_image_and_every_class_appears() -> None:
    scenes = [scene(number) for number in range(20)]
    boxes = np.concatenate([made.boxes for made in scenes])
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 2:] >= 4).all()
    assert (boxes[:, :2] + boxes[:, 2:] <= SIDE).all()
    assert {*np.concatenate([made.labels for made in scenes])} == {*range(len(CLASSES))}


def test_written_scenes_are_read_by_pycocotools_and_by_the_data_set(tmp_path: Path) -> None:
    coco = pytest.importorskip("pycocotools.coco", reason="install enginequant[hf]")
    path = write_scenes(tmp_path / "scenes", range(4))
    with redirect_stdout(StringIO()):
        read = coco.COCO(str(path))
    assert [category["name"] for category in read.loadCats(read.getCatIds())] == [*CLASSES]
    examples = load_examples("coco-json", path=str(path))
    assert len(examples) == 4
    for number, example in enumerate(examples):
        assert isinstance(example, Boxes)
        made = scene(number)
        np.testing.assert_array_equal(np.asarray(Image.open(example.path)), made.image)
        np.testing.assert_array_equal(example.boxes, made.boxes)
        assert example.labels == tuple(CLASSES[kind] for kind in made.labels)
    ids = [annotation["id"] for annotation in json.loads(path.read_text())["annotations"]]
    assert ids == [*range(1, len(ids) + 1)]


def test_the_single_shot_detector_learns_one_scene() -> None:
    torch.manual_seed(0)
    model = SSD(len(CLASSES), SIDE)
    made = scene(0)
    images = torch.from_numpy(made.image).permute(2, 0, 1)[None].float() / 255
    corners = torch.from_numpy(np.concatenate([made.boxes[:, :2], made.boxes[:, :2] + made.boxes[:, 2:]], -1)).float()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(8):
        loss = ssd_loss(model, images, [corners], [torch.from_numpy(made.labels)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    outputs = model.eval()(images)
    assert outputs["boxes"].shape == (1, len(model.anchors), 4)
    assert outputs["scores"].shape == (1, len(model.anchors), len(CLASSES))
