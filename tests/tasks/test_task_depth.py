"""The task ``depth-estimation``: the order of distances, whatever their scale, and the files that hold them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image as Picture

from quantizer.errors import TaskError
from quantizer.tasks import Depths, Image, Task, build_task, load_examples, load_model, load_processor

NAME = "depth-estimation"
SIZE = 32


@pytest.fixture(scope="module")
def glpn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("glpn")
    torch.manual_seed(0)
    config = transformers.GLPNConfig(
        hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=8
    )
    transformers.GLPNForDepthEstimation(config).save_pretrained(folder)
    transformers.ViTImageProcessorPil(size={"height": SIZE, "width": SIZE}).save_pretrained(folder)
    return folder


@pytest.fixture
def task(glpn: Path) -> Task:
    return build_task(NAME, load_model(str(glpn), NAME), load_processor(str(glpn), NAME), batch_size=2)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two images of 64 x 48; what is in the first is further away to the right, what is in the second to the left."""
    pick = np.random.default_rng(0)
    for part in ("images", "depths"):
        (tmp_path / part).mkdir()
    ramp = np.tile(np.arange(1, 65, dtype=np.uint16) * 100, (48, 1))
    for number, depths in enumerate((ramp, ramp[:, ::-1])):
        Picture.fromarray(pick.integers(0, 255, (48, 64, 3), dtype=np.uint8)).save(tmp_path / f"images/{number}.png")
        Picture.fromarray(depths.copy()).save(tmp_path / f"depths/{number}.png")
    return tmp_path


def _says(*distances: torch.Tensor):  # type: ignore[no-untyped-def]
    told = torch.stack(distances)
    return lambda batch: {"predicted_depth": told}


def _ramp(right: bool) -> torch.Tensor:
    ramp = torch.arange(1.0, SIZE + 1).repeat(SIZE, 1)
    return ramp if right else ramp.flip(1)


def test_the_order_is_scored_in_any_unit_and_in_its_inverse(task: Task, data: Path) -> None:
    examples = load_examples("image-depths", path=data)
    assert set(examples) == {Depths(data / f"images/{n}.png", data / f"depths/{n}.png") for n in (0, 1)}
    first = examples[0] == Depths(data / "images/0.png", data / "depths/0.png")
    right = task.predict(_says(_ramp(first), _ramp(not first)), examples)
    assert right.outputs.shape == (2, SIZE, SIZE)
    assert task.score(right, examples) == pytest.approx(1.0)
    inverse = task.predict(_says(1 / _ramp(first), 7 / _ramp(not first) + 3), examples)
    assert task.score(inverse, examples) == pytest.approx(1.0)
    across = task.predict(_says(_ramp(first).T, _ramp(not first)), examples)
    assert task.score(across, examples) == pytest.approx(0.5, abs=0.01)
    low, high = task.difference_interval(right, across, examples, 200)
    assert low < -0.9
    assert high == pytest.approx(0.0)
    assert task.paired(right, right) == {"relative_change": 0.0}
    assert task.paired(right, task.predict(_says(2 * _ramp(first), 2 * _ramp(not first)), examples)) == {
        "relative_change": pytest.approx(1.0)
    }


def test_the_same_distance_everywhere_has_no_order(task: Task, data: Path) -> None:
    examples = load_examples("image-depths", path=data)
    assert task.score(task.predict(_says(*2 * [torch.ones(SIZE, SIZE)]), examples), examples) == 0.0


def test_what_was_not_measured_does_not_count(task: Task, data: Path) -> None:
    measured = np.asarray(Picture.open(data / "depths/0.png")).astype(np.float64)
    measured[:, 32:] = np.nan
    measured[:, :8] = 0
    (data / "depths/0.png").unlink()
    np.save(data / "depths/0.npy", measured)
    examples = [example for example in load_examples("image-depths", path=data) if "0.png" in str(example)]
    wrong_there = _ramp(True)
    wrong_there[:, 16:], wrong_there[:, :4] = 0, 99
    assert task.score(task.predict(_says(wrong_there), examples), examples) == pytest.approx(1.0)


def test_images_with_classes_calibrate(task: Task, data: Path) -> None:
    depths = load_examples("image-depths", path=data)
    image = Image(data / "images/0.png", "a class")
    assert task.samples([image, depths[0]]) == [image.path, depths[0].path]
    with pytest.raises(TaskError, match=r"needs samples of kind Depths, got Image: .*'image-depths'"):
        task.targets([image])


def test_files_that_do_not_fit(task: Task, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = load_examples("image-depths", path=data)
    Picture.fromarray(np.ones((8, 16), dtype=np.uint8)).save(data / "depths/0.png")
    with pytest.raises(
        TaskError,
        match=r"depths/0\.png has 16 x 8 distances, and its image has 64 x 48 pixels: "
        r"expected a dist",
    ):
        task.targets(examples)
    (data / "depths/0.png").rename(data / "depths/0.npy")
    with pytest.raises(TaskError, match=r"0\.npy cannot be read as an array"):
        task.targets(load_examples("image-depths", path=data))
    np.save(data / "depths/0.npy", np.ones((48, 64, 3)))
    with pytest.raises(TaskError, match=r"0\.npy holds float64 \[48, 64, 3\], expected numbers \[height x width\]"):
        task.targets(load_examples("image-depths", path=data))
    np.save(data / "depths/0.npy", np.zeros((48, 64)))
    with pytest.raises(TaskError, match=r"0\.npy has no distance other than 0 and NaN"):
        task.targets(load_examples("image-depths", path=data))
    (data / "depths/0.npy").unlink()
    with pytest.raises(TaskError, match=r"images/0\.png has no file in depths; expected .*depths/0\.png"):
        load_examples("image-depths", path=data)
    with pytest.raises(TaskError, match=r"there is no folder .*images"):
        load_examples("image-depths", path=data / "depths")
    with pytest.raises(TaskError, match=r"expected distances \[batch, height, width\]"):
        task.predict(lambda batch: {"predicted_depth": torch.zeros(2, 3)}, examples)
    monkeypatch.setattr(task.inputs.processor, "do_center_crop", True, raising=False)
    with pytest.raises(TaskError, match=r"has do_center_crop, so its pixels do not match the measured distances"):
        task.targets(examples)
