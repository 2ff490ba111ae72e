"""What tasks refuse before any work, and what they read from data whose form is unusual."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as tf
from PIL import Image as Picture
from tiny_vision import tiny_vit
from transformers import BertForSequenceClassification

from quantizer.errors import QuantizerError, TaskError
from quantizer.export.qdq.onnx_file import TensorSpec
from quantizer.pipeline.load import Converted
from quantizer.pipeline.scores import TaskMetric
from quantizer.tasks import Image, build_task, load_examples, load_model, read_checkpoint, read_image, read_images

# -- labels ----------------------------------------------------------------------------------------------------------

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
OTHERS = [
    ({"num_labels": 1}, "returns a score instead of a class"),
    ({"num_labels": 3, "problem_type": "regression"}, "returns a score instead of a class"),
    ({"num_labels": 3, "problem_type": "multi_label_classification"}, "returns several labels at once"),
]


@pytest.mark.parametrize(("options", "message"), OTHERS)
def test_a_model_whose_largest_logit_decides_nothing(options, message, tokenizer, tmp_path) -> None:
    config = tf.BertConfig(vocab_size=24, max_position_embeddings=64, **SIZES, **options)
    model = BertForSequenceClassification(config).eval()
    expected = rf"task 'sequence-classification' needs one class per sample.*{message}.* with Quantizer"
    with pytest.raises(TaskError, match=expected):
        build_task("sequence-classification", model, tokenizer)
    model.save_pretrained(tmp_path)
    for load in (load_model, read_checkpoint):
        with pytest.raises(TaskError, match=expected):
            load(str(tmp_path), "sequence-classification")
    # What it is can be read, and it may be used for what takes no label.
    assert read_checkpoint(str(tmp_path)).architecture == "BertForSequenceClassification"


def test_a_model_of_images_with_one_output(tmp_path: Path) -> None:
    folder = tiny_vit(tmp_path / "vit")
    config = tf.AutoConfig.from_pretrained(folder)
    config.num_labels = 1
    model = tf.ViTForImageClassification(config).eval()
    with pytest.raises(TaskError, match=r"task 'image-classification' .*returns a score instead of a class"):
        build_task("image-classification", model, tf.AutoImageProcessor.from_pretrained(folder))


def test_a_converted_folder_with_one_output_has_no_labels() -> None:
    converted = Converted({"name": "m", "labels": ["LABEL_0"], "task": "sequence-classification"}, None, None)
    with pytest.raises(QuantizerError, match="m has one output and no classes: call it to get its outputs instead"):
        converted.labels(["a text"])


def test_a_converted_folder_is_shown_in_a_line() -> None:
    spec = TensorSpec("input_ids", np.dtype("int64"), (None, None))
    engine = SimpleNamespace(inputs=(spec,), output_names=("logits",))
    config = {"name": "m", "task": "sequence-classification", "backend": "openvino", "checks": ["x" * 3000]}
    assert repr(Converted(config, engine, None)) == (  # type: ignore[arg-type]
        f"Converted('m', sequence-classification, openvino: {spec} -> logits)"
    )


# -- lengths ---------------------------------------------------------------------------------------------------------


def test_positions_begin_behind_that_of_padding(tokenizer, tmp_path: Path) -> None:
    config = tf.RobertaConfig(vocab_size=24, max_position_embeddings=66, pad_token_id=1, num_labels=3, **SIZES)
    model = tf.RobertaForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    assert read_checkpoint(str(tmp_path)).positions == 64
    with pytest.raises(TaskError, match="max_length=65, but the model has 64 positions: lower it"):
        build_task("sequence-classification", model, tokenizer, max_length=65)
    task = build_task("sequence-classification", model, tokenizer, max_length=64)
    with torch.no_grad():
        model(**task.random_batch(2, 64))


# -- images ----------------------------------------------------------------------------------------------------------

RAMP = np.arange(256, dtype=np.uint8).reshape(16, 16)


@pytest.mark.parametrize("ending", ["png", "tif"])
def test_an_image_of_16_bits_is_scaled(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"deep.{ending}"
    Picture.fromarray(RAMP.astype(np.uint16) * 257).save(path)
    found = np.asarray(read_image(path))
    np.testing.assert_array_equal(found, np.repeat(RAMP[..., None], 3, axis=-1))


@pytest.mark.parametrize(("dtype", "what"), [(np.float32, "floats"), (np.int32, "whole numbers of 32 bits")])
def test_an_image_without_a_known_range(dtype: type, what: str, tmp_path: Path) -> None:
    path = tmp_path / "wide.tif"
    Picture.fromarray(RAMP.astype(dtype)).save(path)
    with pytest.raises(TaskError, match=rf"wide\.tif cannot be read as an image \(its pixels are {what}, whose range"):
        read_image(path)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "LA", "CMYK"])
def test_images_of_8_bits_keep_their_values(mode: str, tmp_path: Path) -> None:
    path = tmp_path / ("image.tif" if mode == "CMYK" else "image.png")
    picture = Picture.new("RGB", (4, 4), (255, 255, 255)).convert(mode)
    picture.save(path)
    np.testing.assert_array_equal(np.asarray(read_image(path)), np.full((4, 4, 3), 255))


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    for place, name in enumerate(("images/cat/0.png", "images/cat/1.png", "elsewhere/0.png")):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Picture.new("RGB", (4, 4), (place, 0, 0)).save(path)
    return tmp_path / "images"


def test_links_to_folders_are_followed(classes: Path) -> None:
    (classes / "dog").symlink_to(classes.parent / "elsewhere")
    assert sorted((example.label, example.path.name) for example in load_examples("image-folder", path=classes)) == [
        ("cat", "0.png"),
        ("cat", "1.png"),
        ("dog", "0.png"),
    ]
    assert len(read_images(classes)) == 3


def test_hidden_files_are_no_images(classes: Path) -> None:
    (classes / "cat" / ".ipynb_checkpoints").mkdir()
    for name in (".ipynb_checkpoints/0.png", "._1.png"):
        (classes / "cat" / name).write_bytes((classes / "cat" / "0.png").read_bytes())
    assert sorted(path.name for path in read_images(classes)) == ["0.png", "1.png"]


def test_links_that_lead_nowhere_or_in_circles(classes: Path) -> None:
    link = classes / "dog"
    link.symlink_to(classes)
    with pytest.raises(TaskError, match=r"dog is a link to a folder that contains it: remove the link"):
        read_images(classes)
    link.unlink()
    (classes / "cat" / "2.png").symlink_to(classes / "missing.png")
    with pytest.raises(TaskError, match=r"2\.png is a broken link: repair or remove it"):
        read_images(classes)


class _Task:
    higher_is_better = True


def test_other_pixels_under_one_name_are_other_rows(classes: Path) -> None:
    def identity() -> str:
        examples = load_examples("image-folder", path=classes)
        return TaskMetric(("model",), _Task(), examples, [], lambda model: model).reads

    before = identity()
    assert identity() == before
    Picture.new("RGB", (4, 4), (9, 9, 9)).save(classes / "cat" / "0.png")
    assert identity() != before
    with pytest.raises(TaskError, match=r"gone\.png cannot be read: No such file"):
        TaskMetric((), _Task(), [Image(classes / "gone.png", "cat")], [], lambda model: model)
