"""The task of multiple choice: rows of any number of choices, pairs as transformers reads them, and the score."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMultipleChoice

from quantizer.cli.main import main
from quantizer.errors import TaskError
from quantizer.tasks import Choices, Task, build_task, load_examples, load_model

NAME = "multiple-choice"
EXAMPLES = [
    Choices("the film was", "", ("good", "a cat", "fast ."), 0),
    Choices("the dog is", "a dog and a cat .", ("slow", "fine"), 1),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> str:
    folder = tmp_path_factory.mktemp("choice")
    torch.manual_seed(0)
    options = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, initializer_range=0.5, **options)
    BertForMultipleChoice(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def task(source: str, tokenizer: Any) -> Task:
    return build_task(NAME, load_model(source, NAME), tokenizer, max_length=64, batch_size=2)


def _scores(task: Task, of: dict[str, float]) -> Callable[[dict[str, torch.Tensor]], object]:
    """Return a model that scores pairs by the last word of the choice."""
    words = {task.inputs.tokenizer.convert_tokens_to_ids(word): score for word, score in of.items()}  # type: ignore

    def run(batch: dict[str, torch.Tensor]) -> object:
        last = batch["attention_mask"].sum(dim=1) - 2
        ids = batch["input_ids"][torch.arange(len(last)), last]
        return {"logits": torch.tensor([[words[int(one)]] for one in ids])}

    return run


def test_scores_are_those_of_the_model_with_all_choices_at_once(source: str, task: Task, tokenizer: Any) -> None:
    model = load_model(source, NAME)
    found = task.predict(lambda batch: model(**batch), EXAMPLES)
    whole = BertForMultipleChoice.from_pretrained(source).eval()
    for example, logits, decision in zip(EXAMPLES, found.outputs, found.decisions, strict=True):
        first = [example.context or example.question] * len(example.choices)
        second = [f"{example.question} {choice}" if example.context else choice for choice in example.choices]
        encoded = tokenizer(first, second, padding=True, return_tensors="pt")
        with torch.no_grad():
            expected = whole(**{name: value[None] for name, value in encoded.items()}).logits[0].numpy()
        np.testing.assert_allclose(logits[: len(expected)], expected, atol=1e-5)
        assert np.isnan(logits[len(expected) :]).all()
        assert decision == expected.argmax()


def test_answers_are_scored_by_accuracy(task: Task) -> None:
    right = task.predict(_scores(task, {"good": 1, "cat": 0, ".": -1, "slow": -3, "fine": -2}), EXAMPLES)
    assert right.decisions.tolist() == [0, 1]
    assert task.score(right, EXAMPLES) == 1.0
    wrong = task.predict(_scores(task, {"good": 1, "cat": 0, ".": -1, "slow": -1, "fine": -2}), EXAMPLES)
    assert task.score(wrong, EXAMPLES) == 0.5
    figures = task.paired(right, wrong)
    assert figures["label_flips"] == 0.5
    # Only the second row differs: by one step of logits each way.
    p = 1 / (1 + np.exp(-1))
    assert figures["kl_divergence"] == pytest.approx((p - (1 - p)) / 2)
    assert figures["sqnr_db"] == pytest.approx(10 * np.log10((1 + 0 + 1 + 9 + 4) / 4))
    assert task.paired(right, right) == {"label_flips": 0.0, "kl_divergence": 0.0, "sqnr_db": np.inf}


def test_files_of_choices(tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    good = [
        {"question": "q", "choices": ["a", "b"], "label": 1},
        {"question": "q", "context": "c", "choices": ["a", "b"], "answer": "a"},
        {"context": "c", "choices": ["a", "b"], "label": "1"},
    ]
    file.write_text("".join(json.dumps(example) + "\n" for example in good))
    assert load_examples("choices-jsonl", path=file) == [
        Choices("q", "", ("a", "b"), 1),
        Choices("q", "c", ("a", "b"), 0),
        Choices("", "c", ("a", "b"), 1),
    ]


def test_what_is_no_choice(task: Task) -> None:
    with pytest.raises(TaskError, match="'a film' is a single text, and task 'multiple-choice' is for questions with"):
        task.inputs.check(["a film"])  # type: ignore[attr-defined]
    with pytest.raises(TaskError, match="expected a score for each pair"):
        task.predict(lambda batch: {"logits": torch.zeros(2, 2)}, EXAMPLES)


@pytest.mark.nightly
def test_a_checkpoint_is_converted_end_to_end(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason="a conversion needs enginequant[hf,onnx,onnxruntime]")
    from quantizer.pipeline import benchmark
    from quantizer.pipeline.load import load_converted

    monkeypatch.setattr(benchmark, "_LATENCY_SECONDS", 0.1)
    lines = [dataclasses.asdict(example) for example in EXAMPLES]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines * 4))
    data = f"choices-jsonl:{tmp_path / 'c.jsonl'}"
    words = ["--quantization", "--calibration", data, "--evaluation", data, "--backend", "onnxruntime"]
    words += ["--batch-size", "1", "2", "8", "--seq-len", "8", "16", "32", "-o", str(tmp_path / "out")]
    assert main(["convert", "-m", source, *words]) == 0
    record = json.loads((tmp_path / "out" / "onnxruntime" / "report.json").read_text())
    assert [(one["form"], one["metric"], one["samples"]) for one in record["scores"]] == [
        (which, "accuracy", 8) for which in ("float", "engine")
    ]
    served = load_converted(tmp_path / "out" / "onnxruntime")
    assert served([("the film was", "good"), ("the film was", "a cat")])["logits"].shape == (2, 1)


@pytest.mark.parametrize(
    ("label", "expected"),
    [(0.5, "the label 0.5, expected a class number"), (2, r"the label 2, expected the index of one of its 2 choices")],
)
def test_a_label_must_be_the_index_of_a_choice(task: Task, label: Any, expected: str) -> None:
    with pytest.raises(TaskError, match=rf"task 'multiple-choice': sample 2 has {expected}"):
        task.targets([EXAMPLES[0], dataclasses.replace(EXAMPLES[1], label=label)])
