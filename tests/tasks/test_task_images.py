"""Images as data: folders and lists of them, an image processor's batches, labels, and what is refused."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image as Picture
from tiny_vision import CLASSES, SIZE, tiny_images, tiny_vit

from quantizer.errors import TaskError
from quantizer.tasks import (
    Image,
    Task,
    build_task,
    load_examples,
    load_image_processor,
    load_model,
    load_processor,
    read_image,
    read_images,
)

NAME = "image-classification"


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vit(tmp_path_factory.mktemp("vit"))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_images(tmp_path_factory.mktemp("images"), 12, seed=0)


@pytest.fixture(scope="module")
def model(vit: Path) -> torch.nn.Module:
    return load_model(str(vit), NAME)


@pytest.fixture(scope="module")
def task(vit: Path, model: torch.nn.Module) -> Task:
    return build_task(NAME, model, load_processor(str(vit), NAME), batch_size=5)


# -- rows --------------------------------------------------------------------------------------------------------------


def test_a_folder_of_classes_mixes_them(images: Path) -> None:
    examples = load_examples("image-folder", path=images)
    assert examples == load_examples("image-folder", path=images)
    assert sorted(example.path for example in examples) == sorted(images.rglob("*.png"))
    assert all(example.label == example.path.parent.name for example in examples)
    assert {example.label for example in examples[:6]} == set(CLASSES)


def test_images_without_labels_are_in_one_order_whatever_the_folders_place(images: Path, tmp_path: Path) -> None:
    copied = tiny_images(tmp_path / "elsewhere", 12, seed=5)
    (copied / "README.txt").write_text("no image")
    assert [p.relative_to(copied) for p in read_images(copied)] == [p.relative_to(images) for p in read_images(images)]


@pytest.mark.parametrize("header", ["path,label", "file,class_index", "label,note,path"])
def test_a_list_of_images_keeps_its_order(images: Path, header: str) -> None:
    line = {"path": "red/0.png", "label": "red", "file": "red/0.png", "class_index": "red", "note": "x"}
    written = images / "list.csv"
    names = header.split(",")
    other = {**line, "path": "blue/2.png", "file": "blue/2.png", "label": "2", "class_index": "2"}
    rows = [",".join(row[name] for name in names) for row in (line, other)]
    written.write_text("\n".join([header, *rows]) + "\n")
    found = load_examples("image-csv", path=written)
    assert found == [Image(images / "red" / "0.png", "red"), Image(images / "blue" / "2.png", "2")]


def test_folders_that_are_wrong(images: Path, tmp_path: Path) -> None:
    (tmp_path / "empty" / "red").mkdir(parents=True)
    with pytest.raises(TaskError, match=r"empty holds no images; expected .*empty/CLASS/FILE with files that end in"):
        load_examples("image-folder", path=tmp_path / "empty")
    with pytest.raises(TaskError, match=r"empty holds no images: expected files that end in \.bmp"):
        read_images(tmp_path / "empty")
    with pytest.raises(TaskError, match=r"red/\d\.png is not in a class folder; expected .*/red/CLASS/\d\.png"):
        load_examples("image-folder", path=images / "red")
    with pytest.raises(TaskError, match="there is no folder"):
        load_examples("image-folder", path=tmp_path / "missing")
    with pytest.raises(TaskError, match=r"0\.png is a file, expected a folder"):
        load_examples("image-folder", path=images / "red" / "0.png")
    with pytest.raises(TaskError, match="needs a folder, but no path was given"):
        load_examples("image-folder")


# -- images ------------------------------------------------------------------------------------------------------------


def test_an_image_is_turned_as_the_camera_was_held(tmp_path: Path) -> None:
    picture = Picture.new("L", (4, 2))
    exif = picture.getexif()
    exif[0x0112] = 6
    picture.save(tmp_path / "turned.png", exif=exif)
    read = read_image(tmp_path / "turned.png")
    assert (read.size, read.mode) == ((2, 4), "RGB")


@pytest.mark.parametrize("damage", ["cut", "foreign", "missing", "header"])
def test_an_image_that_cannot_be_read(images: Path, tmp_path: Path, damage: str) -> None:
    whole = (images / "red" / "0.png").read_bytes()
    path = tmp_path / "bad.png"
    content = {"cut": whole[:100], "foreign": b"no image", "header": whole[:20] + b"\xff" * 40 + whole[60:]}
    if damage != "missing":
        path.write_bytes(content[damage])
    with pytest.raises(TaskError, match=r"bad\.png cannot be read as an image \(.+\): repair the file, or remove it"):
        read_image(path)


# -- the task ----------------------------------------------------------------------------------------------------------


def test_batches_are_the_processors(task: Task, vit: Path, images: Path) -> None:
    paths = read_images(images)
    batches = task.sample_batches(paths)
    assert [tuple(batch["pixel_values"].shape) for batch in batches] == [(5, 3, 32, 32), (5, 3, 32, 32), (2, 3, 32, 32)]
    alone = load_image_processor(str(vit))(Picture.open(paths[6]).convert("RGB"), return_tensors="pt")
    assert torch.equal(batches[1]["pixel_values"][1], alone["pixel_values"][0])
    assert task.input_names == ("pixel_values",)
    assert task.example()["pixel_values"].shape == (2, 3, SIZE, SIZE)
    assert torch.equal(task.random_batch(3)["pixel_values"], task.random_batch(3, 128)["pixel_values"])


def test_scores_are_those_of_the_model_run_by_hand(task: Task, model: torch.nn.Module, images: Path) -> None:
    examples = load_examples("image-folder", path=images)
    predictions = task.predict(lambda batch: model(**batch), examples)
    with torch.no_grad():
        by_hand = [int(model(**task.inputs.batch([example.path])).logits.argmax()) for example in examples]
    assert predictions.decisions.tolist() == by_hand
    right = sum(CLASSES[label] == example.label for label, example in zip(by_hand, examples, strict=True))
    assert task.score(predictions, examples) == pytest.approx(right / 12)
    other = task.predictions(-predictions.outputs)
    paired = task.paired(predictions, other)
    assert paired["label_flips"] == np.mean(other.decisions != predictions.decisions) > 0
    assert set(paired) == {"label_flips", "kl_divergence", "sqnr_db"}


def test_labels_are_names_or_numbers(task: Task, images: Path) -> None:
    path = images / "red" / "0.png"
    assert task.targets([Image(path, "blue"), Image(path, "1")]).tolist() == [2, 1]
    for label in ("cat", "3", "-1", "²"):
        with pytest.raises(TaskError, match=rf"0\.png: the label '{label}' is no class of the model; expected one of"):
            task.targets([Image(path, label)])


def test_labels_of_a_reader_may_be_numbers(task: Task, images: Path) -> None:
    path: Any = images / "red" / "0.png"
    label: Any = 1
    assert task.targets([Image(path, label)]).tolist() == [1]
    label = 0.9
    with pytest.raises(TaskError, match=r"0\.png: the label '0\.9' is no class of the model"):
        task.targets([Image(path, label)])


def test_a_name_of_two_classes_is_no_label(vit: Path, images: Path) -> None:
    model = load_model(str(vit), NAME)
    model.config.id2label = {0: "crane", 1: "crane", 2: "7"}
    task = build_task(NAME, model, load_processor(str(vit), NAME))
    assert task.targets([Image(images, "7"), Image(images, "1")]).tolist() == [2, 1]
    with pytest.raises(TaskError, match=r"'crane' is the name of 2 classes of the model; expected .* a number from 0"):
        task.targets([Image(images, "crane")])


def test_rows_of_another_kind(task: Task, tmp_path: Path) -> None:
    (tmp_path / "texts.csv").write_text("text,label\na film,0\n")
    with pytest.raises(TaskError, match="needs samples of kind Image, got Text: use a data set of such samples, like"):
        task.batches(load_examples("text-csv", path=tmp_path / "texts.csv"))


# -- checkpoints and processors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "task", "expected"),
    [
        (transformers.BertConfig(), NAME, "bert has text inputs, and task 'image-classification' needs image inputs"),
        (
            transformers.ViTConfig(),
            "sequence-classification",
            "vit has image inputs, and task 'sequence-classification' needs",
        ),
        (transformers.BeitConfig(), "sentence-similarity", "beit has image inputs, and task"),  # it has a vocabulary
    ],
    ids=["text", "image", "image-with-vocabulary"],
)
def test_a_task_for_another_kind_of_model(
    tmp_path: Path, config: transformers.PretrainedConfig, task: str, expected: str
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(TaskError, match=expected):
        load_model(str(tmp_path), task)


def test_a_model_without_its_head(tmp_path: Path) -> None:
    options = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    transformers.ViTModel(transformers.ViTConfig(image_size=16, patch_size=8, **options)).save_pretrained(tmp_path)
    with pytest.raises(TaskError, match=r"has no weights for classifier\.bias, classifier\.weight"):
        load_model(str(tmp_path), NAME)


def test_no_image_processor(vit: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(TaskError, match="cannot load the image processor of model source"):
        load_image_processor(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"size": {"height": 16, "width": 16}},
            r"does not accept images of the shape \[3, 16, 16\] from its image "
            r"processor",
        ),
        ({"size": {"width": 9}}, "refused new images: .*; check preprocessor_config"),
    ],
    ids=["other-size", "nonsense"],
)
def test_a_processor_that_does_not_fit(
    model: torch.nn.Module, options: dict[str, dict[str, int]], expected: str
) -> None:
    processor = transformers.CLIPImageProcessorPil(do_center_crop=False)
    processor.size = options["size"]
    with pytest.raises(TaskError, match=expected):
        build_task(NAME, model, processor)


def test_a_processor_of_several_sizes_that_cannot_make_one(model: torch.nn.Module) -> None:
    processor = transformers.GLPNImageProcessorPil(size_divisor=SIZE)
    with pytest.raises(TaskError, match=r"returns images of several sizes \(\[3, 64, 96\] and \[3, 96, 64\]\)"):
        build_task(NAME, model, processor)


@pytest.mark.parametrize(
    ("processor", "size"),
    [
        (transformers.CLIPImageProcessorPil(size={"shortest_edge": SIZE}, do_center_crop=False), "shortest_edge"),
        (transformers.DPTImageProcessorPil(size={"height": SIZE, "width": SIZE}, keep_aspect_ratio=True), "height"),
    ],
    ids=["shortest-edge", "keep-aspect-ratio"],
)
def test_a_processor_that_keeps_proportions_stretches_images(
    model: torch.nn.Module, images: Path, caplog: pytest.LogCaptureFixture, processor: Any, size: str
) -> None:
    paths = read_images(images)
    task = build_task(NAME, model, processor, batch_size=5)
    assert task.inputs.batch(paths)["pixel_values"].shape == (len(paths), 3, SIZE, SIZE)
    assert "they are stretched to 32 x 32; set height and width" in caplog.text
    # The caller's own processor does what it did.
    assert task.inputs.processor is not processor
    assert processor.size[size] == SIZE
    assert len({processor(read_image(path), return_tensors="np")["pixel_values"].shape for path in paths}) > 1


def test_a_model_that_takes_no_images() -> None:
    with pytest.raises(TaskError, match="Linear has no input 'pixel_values': expected a model of images"):
        build_task(NAME, torch.nn.Linear(2, 2), transformers.ViTImageProcessorPil())


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_of_too_many_pixels_is_refused_before_they_are_read(tmp_path: Path) -> None:
    path, large = tmp_path / "one.png", (13_000).to_bytes(4, "big") * 2
    Picture.new("RGB", (8, 8)).save(path)
    content = bytearray(path.read_bytes())
    content[16:24] = large
    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    path.write_bytes(content)
    with pytest.raises(TaskError, match=r"13000 x 13000 pixels, and the limit is 89 million: make it smaller"):
        read_image(path)
    with Picture.open(path) as opened:
        assert opened.size == (13_000, 13_000)
