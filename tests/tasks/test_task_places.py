"""Tasks with an answer in the places of an image: the score of classes of pixels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as Picture
from tiny_vision import tiny_segformer

from quantizer.errors import TaskError
from quantizer.tasks import Masked, Task, build_task, load_examples, load_model, load_processor

NAME = "semantic-segmentation"
CLASSES = ("road", "car", "sky")
SIZE = 32


@pytest.fixture(scope="module")
def segformer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_segformer(tmp_path_factory.mktemp("segformer"))


@pytest.fixture(scope="module")
def task(segformer: Path) -> Task:
    return build_task(NAME, load_model(str(segformer), NAME), load_processor(str(segformer), NAME), batch_size=2)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two images of 64 x 64, with masks of road on the left, and a car or the sky on the right."""
    pick = np.random.default_rng(0)
    for number, right in enumerate((1, 2)):
        for part, pixels in (
            ("images", pick.integers(0, 255, (64, 64, 3), dtype=np.uint8)),
            ("masks", np.repeat(np.array([[0] * 32 + [right] * 32], dtype=np.uint8), 64, axis=0)),
        ):
            (tmp_path / part).mkdir(exist_ok=True)
            Picture.fromarray(pixels).save(tmp_path / part / f"{number}.png")
    return tmp_path


def _says(*classes: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], object]:
    """Return a model that says these classes [h x w] of each image of a batch."""
    told = torch.stack(classes)
    return lambda batch: {"logits": torch.nn.functional.one_hot(told, len(CLASSES)).permute(0, 3, 1, 2).float()}


def _half(right: int) -> torch.Tensor:
    return torch.tensor([[0] * 4 + [right] * 4] * 8)


def test_right_classes_have_a_score_of_one(task: Task, data: Path) -> None:
    examples = load_examples("image-masks", path=data)
    assert examples == [Masked(data / "images" / f"{n}.png", data / "masks" / f"{n}.png") for n in (0, 1)]
    found = task.predict(_says(_half(1), _half(2)), examples)
    assert found.outputs.shape == (2, 8, 8)
    assert task.score(found, examples) == 1.0
    assert task.paired(found, found) == {"label_flips": 0.0}


def test_the_mean_is_over_classes(task: Task, data: Path) -> None:
    examples = load_examples("image-masks", path=data)
    right = task.predict(_says(_half(1), _half(2)), examples)
    # All of the sky is called a car: road 1, car 32 of 64 places, sky 0.
    found = task.predict(_says(_half(1), _half(1)), examples)
    assert task.score(found, examples) == pytest.approx((1 + 0.5 + 0) / 3)
    assert task.paired(right, found) == {"label_flips": 0.25}
    low, high = task.difference_interval(right, found, examples, 200)
    assert low < -0.5 <= high


def test_places_of_255_count_nowhere(task: Task, data: Path) -> None:
    masked = np.asarray(Picture.open(data / "masks" / "1.png")).copy()
    masked[:, 32:] = 255
    Picture.fromarray(masked).save(data / "masks" / "1.png")
    examples = load_examples("image-masks", path=data)
    assert task.score(task.predict(_says(_half(1), _half(1)), examples), examples) == 1.0


def test_masks_that_do_not_fit(task: Task, data: Path) -> None:
    examples = load_examples("image-masks", path=data)
    Picture.fromarray(np.full((64, 64), 7, dtype=np.uint8)).save(data / "masks" / "0.png")
    with pytest.raises(TaskError, match=r"0\.png holds class 7, but the model has 3 classes \(0 to 2; 255 is ignored"):
        task.targets(examples)
    Picture.fromarray(np.zeros((8, 16), dtype=np.uint8)).save(data / "masks" / "0.png")
    with pytest.raises(TaskError, match=r"0\.png has 16 x 8 pixels, and its image has 64 x 64"):
        task.targets(examples)
    Picture.fromarray(np.zeros((64, 64, 3), dtype=np.uint8)).save(data / "masks" / "0.png")
    with pytest.raises(TaskError, match=r"its pixels are RGB, expected one number each"):
        task.targets(examples)


def test_folders_of_masks(data: Path) -> None:
    (data / "masks" / "1.png").unlink()
    with pytest.raises(TaskError, match=r"1\.png has no file in masks; expected .*masks/1\.png"):
        load_examples("image-masks", path=data)
    with pytest.raises(TaskError, match=r"there is no folder .*images"):
        load_examples("image-masks", path=data / "masks")


def test_what_gives_no_class_for_each_place(task: Task, data: Path) -> None:
    examples = load_examples("image-masks", path=data)
    with pytest.raises(TaskError, match=r"expected logits \[batch, classes, height, width\]"):
        task.predict(lambda batch: {"logits": torch.zeros(2, 3)}, examples)
