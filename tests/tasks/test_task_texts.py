"""Plain files of texts, and what a checkpoint says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from quantizer.errors import TaskError
from quantizer.tasks import read_checkpoint, read_texts

GOOD = {
    "lines.txt": "a good film\n\n  the plot was dull \r\n",
    "rows.csv": 'id,text\n1,a good film\n2,"the plot was dull"\n3,""\n',
    "rows.jsonl": '{"text": "a good film"}\n\n{"text": "the plot was dull", "id": 2}\n',
    "MARKED.TXT": "\N{ZERO WIDTH NO-BREAK SPACE}a good film\nthe plot was dull",
}
BAD = {
    "none.txt": ("\n  \n", "holds no texts"),
    "head.csv": ("text\n", "holds no texts"),
    "other.csv": ("id,review\n1,good\n", r"other\.csv:1: the columns are \['id', 'review'\], and 'text' is none"),
    "short.csv": ("id,text\n1\n", r"short\.csv:2: 1 fields, expected 2"),
    "quote.csv": ('text\n"good" film\n', r"quote\.csv:2: not CSV"),
    "broken.jsonl": ('{"text": "good"}\n{"text": \n', r"broken\.jsonl:2: not JSON"),
    "list.jsonl": ('["good"]\n', r"list\.jsonl:1: .* expected an object like"),
    "number.jsonl": ('{"text": 3}\n', r"number\.jsonl:1: .* expected an object like"),
    "good.parquet": ("x", r"expected a file that ends in \.txt, \.csv, \.jsonl"),
}


@pytest.mark.parametrize("name", GOOD)
def test_texts_of_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(GOOD[name], encoding="utf-8", newline="")
    assert read_texts(tmp_path / name) == ["a good film", "the plot was dull"]


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    content, expected = BAD[name]
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(TaskError, match=expected):
        read_texts(tmp_path / name)


def test_another_column(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,review\n1,good\n")
    (tmp_path / "a.jsonl").write_text('{"review": "good"}\n')
    assert read_texts(tmp_path / "a.csv", "review") == read_texts(tmp_path / "a.jsonl", "review") == ["good"]


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="there is no file"):
        read_texts(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("BertModel", "sentence-similarity"),
        ("BertForSequenceClassification", "sequence-classification"),
        ("BertForMaskedLM", "fill-mask"),
        ("BertForPreTraining", None),
        (None, None),
    ],
)
def test_a_checkpoint_tells_its_task(tmp_path: Path, architecture: str | None, task: str | None) -> None:
    config = transformers.BertConfig(
        max_position_embeddings=40,
        architectures=None if architecture is None else [architecture],
        id2label={1: "good", 0: "bad"},
    )
    config.save_pretrained(tmp_path)
    found = read_checkpoint(str(tmp_path))
    assert (found.architecture, found.task, found.positions) == (architecture, task, 40)
    assert found.labels == ("bad", "good")


def test_a_checkpoint_without_text(tmp_path: Path) -> None:
    transformers.PatchTSTConfig(architectures=["PatchTSTModel"]).save_pretrained(tmp_path)
    with pytest.raises(TaskError, match="PatchTSTModel has no vocabulary, so it reads no text"):
        read_checkpoint(str(tmp_path))


def test_a_checkpoint_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(TaskError, match="cannot load the config of model source"):
        read_checkpoint(str(tmp_path))
