"""The data set ``hf``: files, folders and tables of the package ``datasets``, and the rows that their columns make."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as PillowImage
from scipy.io import wavfile

from quantizer.cli.main import main
from quantizer.errors import MissingDependencyError, TaskError
from quantizer.tasks import (
    Audio,
    Choices,
    Example,
    Image,
    Pair,
    Plain,
    Question,
    Rewritten,
    Speech,
    Text,
    Words,
    load_examples,
)

library = pytest.importorskip("datasets", reason="needs the extra datasets")
TEXTS = {"text": ["a good film", "a bad film"], "label": [1, 0]}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", True)
    library.disable_progress_bars()


def _saved(folder: Path, columns: Mapping[str, Any], features: Any = None) -> str:
    library.Dataset.from_dict(dict(columns), features=features).save_to_disk(str(folder / "saved"))
    return str(folder / "saved")


def _names(*names: str) -> Any:
    return library.ClassLabel(names=list(names))


SQUAD = {"answers": [{"text": ["Paris"], "answer_start": [3]}], "question": ["Where?"], "context": ["In Paris"]}
TABLES: dict[str, tuple[dict[str, Any], list[Example]]] = {
    "texts": ({**TEXTS, "idx": [0, 1]}, [Text("a good film", 1), Text("a bad film", 0)]),
    "summaries": ({"article": ["long"], "highlights": ["short"]}, [Rewritten("long", "short")]),
    "plain": ({"text": ["one", "two"]}, [Plain("one"), Plain("two")]),
    "words": ({"tokens": [["In", "Paris"]], "tags": [["O", "B-place"]]}, [Words(("In", "Paris"), ("O", "B-place"))]),
    "questions": (SQUAD, [Question("Where?", "In Paris", (("Paris", 3),))]),
    "choices": ({"question": ["?"], "choices": [["a", "b"]], "answer": ["b"]}, [Choices("?", "", ("a", "b"), 1)]),
    "pairs": ({"sentence1": ["a"], "sentence2": ["b"], "label": [2.5]}, [Pair("a", "b", 2.5)]),
}


@pytest.mark.parametrize("kind", TABLES)
def test_the_columns_say_what_a_row_is(tmp_path: Path, kind: str) -> None:
    columns, examples = TABLES[kind]
    assert load_examples("hf", path=_saved(tmp_path, columns)) == examples


def test_an_answer_must_start_at_an_integer(tmp_path: Path) -> None:
    answers = [{"text": ["Paris"], "answer_start": [3.7]}]
    with pytest.raises(TaskError, match=r"row 0 of .*'float' object cannot be interpreted as an integer"):
        load_examples("hf", path=_saved(tmp_path, {**SQUAD, "answers": answers}))


def test_classes_have_their_names_and_those_of_texts_their_numbers(tmp_path: Path) -> None:
    words = library.Features(
        {"tokens": library.List(library.Value("string")), "ner_tags": library.List(_names("O", "B"))}
    )
    table = _saved(tmp_path / "words", {"tokens": [["x", "y"]], "ner_tags": [[1, 0]]}, words)
    assert load_examples("hf", path=table) == [Words(("x", "y"), ("B", "O"))]
    texts = library.Features({"text": library.Value("string"), "label": _names("bad", "good")})
    assert load_examples("hf", path=_saved(tmp_path / "texts", TEXTS, texts)) == [
        Text("a good film", 1),
        Text("a bad film", 0),
    ]


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "parquet"])
def test_files_are_read_by_their_ending(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"rows.{ending}"
    table = library.Dataset.from_dict(TEXTS)
    writers = {
        "csv": lambda: table.to_csv(path),
        "tsv": lambda: table.to_csv(path, sep="\t"),
        "jsonl": lambda: path.write_text("".join(json.dumps(row) + "\n" for row in table)),
        "parquet": lambda: table.to_parquet(path),
    }
    writers[ending]()
    assert load_examples("hf", path=path, samples=1, offset=1) == [Text("a bad film", 0)]


def test_splits_of_a_saved_folder(tmp_path: Path) -> None:
    parts = {
        "train": library.Dataset.from_dict(TEXTS),
        "test": library.Dataset.from_dict({"text": ["x"], "label": [0]}),
    }
    library.DatasetDict(parts).save_to_disk(str(tmp_path / "both"))
    assert load_examples("hf", path=tmp_path / "both", split="test") == [Text("x", 0)]
    assert load_examples("hf", path=f"{tmp_path / 'both'}@test") == [Text("x", 0)]
    with pytest.raises(TaskError, match=r"has the splits train, test: set 'split', or write .*both@SPLIT"):
        load_examples("hf", path=tmp_path / "both")
    with pytest.raises(TaskError, match=r"has no split 'dev'; it has train, test"):
        load_examples("hf", path=tmp_path / "both", split="dev")
    with pytest.raises(TaskError, match=r"has no splits, but 'dev' was given"):
        load_examples("hf", path=_saved(tmp_path, TEXTS), split="dev")


def test_a_folder_of_images_and_a_table_that_holds_them(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        PillowImage.new("RGB", (4, 4), "red" if name == "cat" else "blue").save(tmp_path / "photos" / name / "one.png")
    examples = load_examples("hf", path=tmp_path / "photos")
    assert examples == [Image(tmp_path / "photos" / name / "one.png", name) for name in ("cat", "dog")]

    content = (tmp_path / "photos" / "cat" / "one.png").read_bytes()
    features = library.Features({"image": library.Image(), "label": _names("dog", "cat")})
    held = _saved(tmp_path, {"image": [{"bytes": content, "path": "gone.png"}], "label": [1]}, features)
    (example,) = load_examples("hf", path=held)
    assert isinstance(example, Image)
    assert (example.label, example.path.suffix, example.path.read_bytes()) == ("cat", ".png", content)
    assert example.path.is_relative_to(tmp_path / "cache")


def test_recordings_with_words_or_classes(tmp_path: Path) -> None:
    wavfile.write(tmp_path / "one.wav", 16000, np.zeros(160, dtype=np.int16))
    content = (tmp_path / "one.wav").read_bytes()
    held = library.Dataset.from_dict({"audio": [{"bytes": content, "path": "gone.wav"}]})
    held = held.cast_column("audio", library.Audio(decode=False))
    held.add_column("text", ["two  words"]).save_to_disk(str(tmp_path / "spoken"))
    (example,) = load_examples("hf", path=tmp_path / "spoken")
    assert isinstance(example, Speech)
    assert (example.text, example.path.read_bytes()) == ("two words", content)
    held.add_column("label", [1]).cast_column("label", _names("yes", "no")).save_to_disk(str(tmp_path / "classes"))
    (example,) = load_examples("hf", path=tmp_path / "classes")
    assert isinstance(example, Audio)
    assert example.label == "no"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "columns": ({"review": ["x"]}, r"has the columns review; expected question with context .*rename_column\(\)"),
    "label": ({"text": ["x"], "label": [-1]}, r"row 0 of .*saved: the label is -1, expected an integer from 0"),
    "tags": ({"tokens": [["a", "b"]], "tags": [["O"]]}, r"row 0 of .*: 2 words, but 1 tags"),
    "choice": (
        {"question": ["?"], "choices": [["a", "b"]], "label": [2]},
        r"row 0 of .*: the label 2 is not one of "
        r"the 2",
    ),
    "empty": ({"text": [], "label": []}, r"saved cannot be read"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_rows_that_cannot_be_made_are_named(tmp_path: Path, fault: str) -> None:
    columns, message = WRONG[fault]
    with pytest.raises(TaskError, match=message):
        load_examples("hf", path=_saved(tmp_path, columns))


def test_what_is_not_there_or_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TaskError, match="no path was given: set 'path', for example"):
        load_examples("hf")
    with pytest.raises(
        TaskError,
        match=r"there is no file or folder .*gone.parquet .* and it is not a name of the "
        r"hub",
    ):
        load_examples("hf", path=tmp_path / "gone.parquet")
    with pytest.raises(TaskError, match="nobody/nothing cannot be read, and there is no file or folder of this name"):
        load_examples("hf", path="nobody/nothing")
    (tmp_path / "broken.parquet").write_text("no parquet")
    with pytest.raises(TaskError, match=r"broken.parquet cannot be read: "):
        load_examples("hf", path=tmp_path / "broken.parquet")
    (tmp_path / "rows.xlsx").write_text("a table")
    with pytest.raises(TaskError, match=r"ends in '.xlsx'; expected a folder, or a file that ends in .arrow, .csv"):
        load_examples("hf", path=tmp_path / "rows.xlsx")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match=r"enginequant\[datasets\]"):
        load_examples("hf", path="org/name")


def test_a_damaged_file_ends_convert_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.csv").write_text("review\nfine\n")
    given = ["-m", str(tmp_path), "--quantization", "--calibration", f"hf:{tmp_path / 'rows.csv'}"]
    assert main(["convert", *given, "-o", str(tmp_path / "out")]) == 1
    assert not (tmp_path / "out").exists()
