"""Files of data that are wrong: told with file and line, whatever is in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Picture
from scipy.io import wavfile

from quantizer.errors import ConfigError, TaskError
from quantizer.tasks import load_examples, read_texts


def _coco(**changes: Any) -> str:
    annotation = {"image_id": 7, "category_id": 3, "bbox": [1, 2, 3, 4]} | changes.pop("annotation", {})
    images, categories = [{"id": 7, "file_name": "a.png"}], [{"id": 3, "name": "dog"}]
    return json.dumps({"images": images, "categories": categories, "annotations": [annotation], **changes})


def _squad(start: int) -> str:
    asked = {"question": "a cat?", "answers": [{"text": "dog", "answer_start": start}]}
    return json.dumps({"data": [{"paragraphs": [{"context": "the dog", "qas": [asked]}]}]})


CHOICES = '{"question": "q", "choices": ["a", "b"], "label": %s}'
# What lies in the folder already: a.png, a.wav.
FAULTS: list[tuple[str, str, str | bytes, str]] = [
    ("stsb-csv", "d.txt", "a,b,1\na,b\n", r"d\.txt:2: 2 fields, expected 3"),
    ("stsb-csv", "d.txt", "a,b,high\n", r"d\.txt:1: the score is 'high'"),
    ("stsb-csv", "d.txt", "a,b,nan\n", r"d\.txt:1: the score is 'nan', expected a finite"),
    ("stsb-csv", "d.txt", "a,,1\n", r"d\.txt:1: an empty sentence"),
    ("stsb-csv", "d.txt", 'a,"b" c,1\n', r"d\.txt:1: not CSV"),
    ("stsb-csv", "d.txt", "", "has no samples"),
    ("sst2-text", "d.txt", "1 fine\npositive great\n", r"d\.txt:2: 'positive great'"),
    ("sst2-text", "d.txt", "1\n", r"d\.txt:1: '1', expected an integer label"),
    ("sst2-text", "d.txt", b"1 caf\xe9\n", "is not UTF-8 text"),
    ("sst2-text", "d.txt", "\n\n", "has no samples"),
    ("text-csv", "d.csv", "a fine film,1\n", r"d\.csv:1: the columns are"),
    ("text-csv", "d.csv", "text,label\nfine,good\n", r"d\.csv:2: the label is 'good'"),
    ("text-csv", "d.csv", "text,label\nfine\n", r"d\.csv:2: 1 fields, expected 2"),
    ("text-csv", "d.csv", "text,label\n ,1\n", r"d\.csv:2: the text is empty"),
    ("text-csv", "d.csv", "", "has no samples"),
    ("text-csv", "d.csv", "text,label\n", "has no samples"),
    ("texts", "d.txt", "\n  \n", "has no texts"),
    ("texts", "d.csv", "text\n", "has no texts"),
    ("texts", "d.csv", "id,review\n1,good\n", r"d\.csv:1: the columns are \['id', 'review'\], without 'text'"),
    ("texts", "d.csv", "id,text\n1\n", r"d\.csv:2: 1 fields, expected 2"),
    ("texts", "d.csv", 'text\n"good" film\n', r"d\.csv:2: not CSV"),
    ("texts", "d.jsonl", '{"text": "good"}\n{"text": \n', r"d\.jsonl:2: not JSON"),
    ("texts", "d.jsonl", '["good"]\n', r"d\.jsonl:1: .* expected an object like"),
    ("texts", "d.jsonl", '{"text": 3}\n', r"d\.jsonl:1: .* expected an object like"),
    ("texts", "d.jsonl", "[" * 100_000, r"d\.jsonl:1: not JSON \(.*nested too deep"),
    ("texts", "d.jsonl", '{"text": "\\ud800"}', r"d\.jsonl:1: not JSON \(.*half a character"),
    ("texts", "d.jsonl", "9" * 5_000, r"d\.jsonl:1: not JSON \(.*Exceeds the limit"),
    ("texts", "d.parquet", "x", r"expected a file that ends in \.txt, \.csv, \.jsonl"),
    ("text-pairs", "d.csv", "source,target\na text,\n", "a text is empty, expected a source text and a target text"),
    ("text-pairs", "d.jsonl", '{"source": "a text"}\n', "expected an object like"),
    ("text-pairs", "d.txt", "a text", "expected a file that ends in .csv or .jsonl"),
    ("choices-jsonl", "d.jsonl", '{"question": "q", "choices": ["a"], "label": 0}', "two choices or more"),
    ("choices-jsonl", "d.jsonl", '{"choices": ["a", "b"], "label": 0}', "expected a question or a context"),
    ("choices-jsonl", "d.jsonl", '{"question": "q", "choices": [1, 2], "label": 0}', "two choices or more"),
    ("choices-jsonl", "d.jsonl", CHOICES % 2, r"d\.jsonl:1: .*the label is 2, .* 0 to 1, or its text"),
    ("choices-jsonl", "d.jsonl", CHOICES % "null", "the label is None"),
    ("choices-jsonl", "d.jsonl", CHOICES % "true", "the label is True"),
    ("choices-jsonl", "d.jsonl", '{"question": "q", "choices": ["a", "a"], "label": "a"}', "the label is 'a'"),
    ("conll", "d.conll", "the O\ncat\n", r"d\.conll:2: 'cat', expected a word and its tag"),
    (
        "squad-json",
        "d.json",
        _squad(40),
        r"the answer 'dog' to 'a cat\?' does not begin at character 40",
    ),
    (
        "squad-json",
        "d.json",
        '{"data": [{"title": "a"}]}',
        r"is not in the format of SQuAD \('paragraphs' is "
        r"missing\)",
    ),
    ("squad-json", "d.json", "{", "is not in the format of SQuAD"),
    ("image-csv", "d.csv", "name,label\n", r"the columns are \['name', 'label'\], expected a header line with 'path'"),
    ("image-csv", "d.csv", "path,label\nb.png,red\n", r"d\.csv:2: there is no image .*b\.png \(a relative path starts"),
    ("image-csv", "d.csv", "path,label\na.png,\n", r"d\.csv:2: the label is empty"),
    ("image-csv", "d.csv", "path,label\na.png\n", r"d\.csv:2: 1 fields, expected 2"),
    ("image-csv", "d.csv", "path,label\n", "has no samples"),
    ("image-csv", "d.csv", f"path,label\n{'x' * 300}.png,0\n", r"d\.csv:2: there is no image"),
    (
        "coco-json",
        "d.json",
        _coco(categories=[]),
        r"is not in the format of COCO \(key 3 is missing\); expected "
        r"images",
    ),
    (
        "coco-json",
        "d.json",
        _coco(images=[{"id": 7, "file_name": "b.png"}]),
        "names b.png, but there is no .*b.png and",
    ),
    ("coco-json", "d.json", _coco(annotation={"bbox": [1, 2, -3, 4]}), r"a box is \[1, 2, -3, 4\]"),
    ("audio-csv", "d.csv", "path,label\nb.wav,low\n", r"d\.csv:2: there is no recording .*b\.wav"),
    ("transcripts", "d.jsonl", '{"path": "a.wav"}', r'd\.jsonl:1: expected an object like \{"path": "one.wav", "text"'),
    ("transcripts", "d.jsonl", '{"path": "b.wav", "text": "x"}', r"d\.jsonl:1: there is no recording .*b\.wav"),
    ("transcripts", "d.jsonl", '{"path": "a.wav", "text": " "}', r"d\.jsonl:1: the text is empty, expected the words"),
    ("transcripts", "d.txt", "a.wav two words\n", r"d\.txt: expected a file that ends in \.csv or \.jsonl"),
]
FILES = sorted({name for name, *_ in FAULTS} - {"texts"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Picture.new("RGB", (8, 8)).save(tmp_path / "a.png")
    wavfile.write(tmp_path / "a.wav", 16000, np.zeros(10, dtype=np.int16))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "file", "content", "message"), FAULTS, ids=[f"{name}-{at}" for at, (name, *_) in enumerate(FAULTS)]
)
def test_a_fault_is_told_with_its_place(folder: Path, name: str, file: str, content: Any, message: str) -> None:
    (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TaskError, match=message):
        read_texts(folder / file) if name == "texts" else load_examples(name, path=folder / file)


@pytest.mark.parametrize("label", ["9" * 5_000, str(2**63), "-1", "1.0", "\u0663"], ids=lambda label: label[:6])
def test_labels_that_are_no_number_of_a_class(label: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"text,label\ngood,{label}\n")
    with pytest.raises(TaskError, match=r"a\.csv:2: the label is .*, expected an integer from 0"):
        load_examples("text-csv", path=tmp_path / "a.csv")
    (tmp_path / "a.txt").write_text(f"{label} good\n")
    with pytest.raises(TaskError, match=r"a\.txt:1: .*, expected an integer label, a space and a text"):
        load_examples("sst2-text", path=tmp_path / "a.txt")


@pytest.mark.parametrize("name", FILES)
def test_a_file_data_set_needs_a_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(TaskError, match="no path was given: set 'path'"):
        load_examples(name)
    for missing in ("absent.csv", "x" * 300):
        with pytest.raises(TaskError, match=r"there is no file|File name too long"):
            load_examples(name, path=tmp_path / missing)
    with pytest.raises(TaskError, match="is a folder, expected a file"):
        load_examples(name, path=tmp_path)


def test_options_and_names_that_do_not_fit(tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_text("1 fine\n")
    for option in ("split", "subset"):
        with pytest.raises(TaskError, match=f"has no {option}s, but {option}='train'"):
            load_examples("sst2-text", path=tmp_path / "d.txt", **{option: "train"})
    with pytest.raises(ConfigError, match="unknown data set 'glue'; known: audio-csv, audio-folder, beir"):
        load_examples("glue")
    with pytest.raises(TaskError, match="there is no file"):
        read_texts(tmp_path / "a.txt")
