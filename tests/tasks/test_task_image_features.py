"""The task ``image-feature-extraction``: embeddings of bare image encoders, and images that find those of their label.

Whole runs of such a model: tests/runs/test_embeddings.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sklearn.metrics import ndcg_score
from tiny_vision import SIZE, tiny_dinov2, tiny_images

from quantizer.errors import TaskError
from quantizer.tasks import Image, Task, build_task, load_examples, load_model, load_processor, read_checkpoint

NAME = "image-feature-extraction"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_images(tmp_path_factory.mktemp("images"), 12, seed=0)


@pytest.fixture(scope="module")
def dinov2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_dinov2(tmp_path_factory.mktemp("dinov2"))


def _task(folder: Path) -> tuple[torch.nn.Module, Task]:
    model = load_model(str(folder), NAME)
    return model, build_task(NAME, model, load_processor(str(folder), NAME), batch_size=5)


def test_each_image_looks_for_the_others_with_its_label(dinov2: Path, images: Path) -> None:
    model, task = _task(dinov2)
    examples: Any = load_examples("image-folder", path=images)
    predictions = task.predict(lambda batch: model(**batch), examples)
    with torch.no_grad():
        hidden = [model(**task.inputs.batch([example.path])).last_hidden_state[0, 0] for example in examples]
    np.testing.assert_allclose(predictions.outputs, torch.stack(hidden), atol=1e-5)
    unit = torch.nn.functional.normalize(torch.stack(hidden), dim=-1)
    labels = np.array([example.label for example in examples])
    scores = []
    for image, similarities in enumerate((unit @ unit.T).numpy()):
        others = np.arange(len(labels)) != image
        same = (labels == labels[image])[others].astype(int)
        scores.append(ndcg_score(same[None], similarities[others][None], k=10))
    np.testing.assert_allclose(predictions.decisions[:, 0], scores, atol=1e-6)
    assert predictions.decisions[:, 1].tolist() == [1.0] * 12
    assert task.score(predictions, examples) == pytest.approx(np.mean(scores))
    assert set(task.paired(predictions, predictions)) >= {"recall_at_100", "mean_cosine", "sqnr_db"}


def test_an_image_that_is_alone_with_its_label_is_no_query(dinov2: Path, images: Path) -> None:
    model, task = _task(dinov2)
    first, second, third = sorted(images.rglob("*.png"))[:3]
    examples = [Image(first, "a"), Image(second, "b"), Image(third, "a")]
    predictions = task.predict(lambda batch: model(**batch), examples)
    # Each finds the other one at place 1 or 2.
    assert predictions.decisions.shape == task.targets(examples).shape == (2, 2)
    assert (predictions.decisions > 0.6).all()
    assert len(predictions.outputs) == 3
    with pytest.raises(TaskError, match="no two of the 2 images have the same label, so no image can find another"):
        task.targets([Image(first, "a"), Image(second, "b")])


def test_labels_are_not_needed_for_a_calibration(dinov2: Path, images: Path) -> None:
    task = _task(dinov2)[1]
    batches = task.batches(load_examples("images", path=images))
    assert [tuple(batch["pixel_values"].shape) for batch in batches] == [(n, 3, SIZE, SIZE) for n in (5, 5, 2)]
    with pytest.raises(TaskError, match="needs samples of kind Image, got Pos"):
        task.targets(load_examples("images", path=images))


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"), 16),
        (
            transformers.SiglipVisionConfig(
                hidden_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=16,
                image_size=SIZE,
                patch_size=8,
            ),
            16,
        ),
    ],
    ids=["pixels", "tokens"],
)
def test_a_model_without_a_class_token_takes_the_mean(tmp_path: Path, images: Path, config: Any, shape: int) -> None:
    torch.manual_seed(0)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    transformers.ViTImageProcessorPil(size={"height": SIZE, "width": SIZE}).save_pretrained(tmp_path)
    assert read_checkpoint(str(tmp_path)).task == NAME
    model, task = _task(tmp_path)
    examples: Any = load_examples("image-folder", path=images)[:2]
    outputs = task.outputs(lambda batch: model(**batch), examples)
    with torch.no_grad():
        hidden = model(**task.inputs.batch([example.path for example in examples])).last_hidden_state
    expected = hidden.mean(dim=(2, 3)) if hidden.dim() == 4 else hidden.mean(dim=1)
    assert outputs.shape == (2, shape)
    np.testing.assert_allclose(outputs, expected, atol=1e-5)


def test_an_output_that_is_no_feature(dinov2: Path, images: Path) -> None:
    task = _task(dinov2)[1]
    examples = load_examples("image-folder", path=images)
    with pytest.raises(
        TaskError, match=r"the model's output has the shape \(5, 3\), expected \[batch, tokens, width\]"
    ):
        task.predict(lambda batch: torch.zeros(len(batch["pixel_values"]), 3), examples)


@pytest.mark.parametrize("config", [transformers.CLIPConfig(), transformers.BertConfig()], ids=["clip", "bert"])
def test_other_models_keep_their_tasks(tmp_path: Path, config: Any) -> None:
    kind = transformers.AutoModel.from_config.__self__._model_mapping[type(config)].__name__
    config.architectures = [kind]
    config.save_pretrained(tmp_path)
    expected = {"CLIPModel": "zero-shot-image-classification", "BertModel": "sentence-similarity"}
    assert read_checkpoint(str(tmp_path)).task == expected[kind]
