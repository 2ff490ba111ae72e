"""Results that are kept by what they depend on: found again where it is equal, made again where they are damaged."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantizer.errors import EngineError, QuantizerError
from quantizer.utils.files import NO_STORE, Store
from quantizer.utils.files import store as store_file

KEY = ("engine", 2, {"samples": 3})


class Making:
    """Makes a value, and a file of it where it is told one; counts."""

    def __init__(self, value: Any = 0.1, path: Path | None = None) -> None:
        self.value, self.path, self.calls = value, path, 0

    def __call__(self) -> Any:
        self.calls += 1
        if self.path is not None:
            self.path.write_text(f"made {self.calls}")
        return self.value


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store in a folder that is not there yet."""
    return Store(tmp_path / "above" / "kept")


@pytest.mark.parametrize("value", [0.1, None, [1, "two"], {"a": [1e-300, float("inf")]}, "\u00e9"])
def test_a_value_is_made_once(store: Store, value: Any) -> None:
    make = Making(value)
    assert [store.get(KEY, make) for _ in range(2)] == [value] * 2
    assert Store(store.folder).get(list(KEY), make) == value
    assert make.calls == 1
    assert store.find(KEY) == value
    assert store.count == 1


def test_each_part_of_a_key_counts(store: Store) -> None:
    keys = [("a", "b"), ("b", "a"), ("ab",), ("a", "b", ""), ("a, b",), ('a", "b',)]
    for number, key in enumerate(keys):
        assert store.get(key, Making(number)) == number
    assert [store.find(key) for key in keys] == list(range(len(keys)))
    assert store.find(["another"]) is None


def test_a_path_in_a_key_stands_for_the_content(store: Store, tmp_path: Path) -> None:
    one, other, data = (tmp_path / name for name in ("one.onnx", "other.onnx", "one.onnx.0123.data"))
    one.write_bytes(b"a graph")
    other.write_bytes(b"a graph")
    assert store.get([one], Making(1)) == 1
    assert store.find([other]) == 1
    data.write_bytes(b"weights")
    assert store.find([one]) is None
    assert store.get([one], Making(2)) == 2
    data.write_bytes(b"other weights")
    assert store.find([one]) is None
    assert store.find([other]) == 1


def test_files_are_copied_under_the_name_that_is_asked_for(store: Store, tmp_path: Path) -> None:
    first, again = tmp_path / "float.onnx", tmp_path / "elsewhere" / "model.onnx"
    again.parent.mkdir()
    weights = "float.onnx.0123456789abcdef.data"

    def make() -> None:
        first.write_text("graph")
        (tmp_path / weights).write_text("weights")
        (tmp_path / "float.onnx.notes").write_text("mine")

    store.get(KEY, make, first)
    store.get(KEY, lambda: pytest.fail("it was made again"), again)
    assert {path.name: path.read_text() for path in again.parent.iterdir()} == {
        "model.onnx": "graph",
        weights: "weights",
    }


def _emptied(entry: Path) -> None:
    (entry / "entry.json").write_text("{}")


def _other_value(entry: Path) -> None:
    record = entry / "entry.json"
    record.write_text(record.read_text().replace("0.1", "0.2"))


def _other_file(entry: Path) -> None:
    (entry / "file").write_text("made by others")


def _one_file_less(entry: Path) -> None:
    (entry / "file").unlink()


def _one_file_more(entry: Path) -> None:
    (entry / "more").touch()


def _no_record(entry: Path) -> None:
    (entry / "entry.json").unlink()


def _a_pipe(entry: Path) -> None:
    (entry / "file").unlink()
    os.mkfifo(entry / "file")


def _deep(entry: Path) -> None:
    (entry / "entry.json").write_text("[" * 100_000)


@pytest.mark.parametrize(
    "damage", [_emptied, _other_value, _other_file, _one_file_less, _one_file_more, _no_record, _a_pipe, _deep]
)
def test_what_is_damaged_is_made_again(
    store: Store, tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "engine"
    make = Making(path=path)
    store.get(KEY, make, path)
    assert store.folder is not None
    (entry,) = store.folder.iterdir()
    damage(entry)
    assert store.get(KEY, make, path) == 0.1
    assert make.calls == 2
    assert f"a stored result is damaged, so it is made again: {entry}" in caplog.text
    assert store.get(KEY, make, path) == 0.1
    assert make.calls == 2
    assert path.read_text() == "made 2"


def test_bytes_are_found_again(store: Store) -> None:
    assert store.find_bytes(KEY) is None
    NO_STORE.put_bytes(KEY, b"lost")
    assert NO_STORE.find_bytes(KEY) is None
    store.put_bytes(KEY, b"statistics")
    assert Store(store.folder).find_bytes(list(KEY)) == b"statistics"
    assert store.count == 1
    assert store.folder is not None
    (entry,) = store.folder.iterdir()
    _other_file(entry)
    assert store.find_bytes(KEY) is None
    assert not entry.exists()


def test_a_folder_that_another_process_clears_costs_the_results_alone(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Between the check of an entry and its copy, and while an entry is written."""
    path = tmp_path / "engine"
    make = Making(path=path)
    copied, settle = shutil.copyfile, store_file.settle
    store.get(KEY, make, path)

    def cleared(*args: Any) -> Any:
        Store(store.folder).clear()
        return copied(*args)

    with monkeypatch.context() as patch:
        patch.setattr(store_file.shutil, "copyfile", cleared)
        patch.setattr(store_file, "copy_file", lambda path, target: copied(path, target))
        assert store.get(KEY, make, path) == 0.1
    assert make.calls == 2
    assert path.read_text() == "made 2"

    def settled(part: Path) -> None:
        Store(store.folder).clear()
        settle(part)

    with monkeypatch.context() as patch:
        patch.setattr(store_file, "settle", settled)
        store.put_bytes(["other"], b"statistics")
    assert store.find_bytes(["other"]) is None
    assert "a result is not stored in" in caplog.text


def test_nothing_is_kept_of_what_fails(store: Store) -> None:
    with pytest.raises(ZeroDivisionError, match="by zero"):
        store.get(KEY, lambda: 1 / 0)
    assert store.count == 0
    assert store.folder is not None
    assert not store.folder.exists()


def test_a_kill_leaves_no_half_entry(store: Store, tmp_path: Path) -> None:
    """The process ends when the file is copied, before the entry has its name; the next one makes it."""
    killed = f"""
import os, pathlib
from quantizer.utils.files import Store, store
store.settle = lambda folder: os._exit(9)
path = pathlib.Path({str(tmp_path / "engine")!r})
Store({str(store.folder)!r}).get(["key"], lambda: path.write_text("half"), path)
"""
    assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == 9
    assert store.folder is not None
    assert len(list(store.folder.iterdir())) == 1
    assert store.count == 0
    make = Making(path=tmp_path / "engine")
    assert Store(store.folder).get(["key"], make, tmp_path / "engine") == 0.1
    assert make.calls == 1
    assert len(list(store.folder.iterdir())) == 1
    store.clear()
    assert not store.folder.exists()


def test_stores_below_one_go_with_it(store: Store) -> None:
    below = [store.under("a search"), store.under("another")]
    for number, one in enumerate(below):
        assert one.get(KEY, Making(number)) == number
    assert [one.count for one in below] == [1, 1]
    assert store.find(KEY) is None
    assert store.folder is not None
    Store(store.folder).clear()
    assert not store.folder.exists()
    store.clear()


def test_only_entries_are_removed(store: Store) -> None:
    store.get(KEY, Making())
    assert store.folder is not None
    (store.folder / "notes").touch()
    store.clear()
    assert [path.name for path in store.folder.iterdir()] == ["notes"]


def test_an_entry_can_be_dropped(store: Store) -> None:
    store.get(KEY, Making(1))
    store.get(["other"], Making(2))
    store.drop(KEY)
    assert store.find(KEY) is None
    assert store.find(["other"]) == 2


@pytest.mark.parametrize("name", ["", "notes", "0123.json"])
def test_a_place_of_others_is_refused(tmp_path: Path, name: str) -> None:
    other = tmp_path / "kept" / name
    other.parent.mkdir(exist_ok=True)
    other.touch()
    message = f"kept contains '{name}', which quantizer did not write," if name else "kept is not a folder; choose"
    with pytest.raises(EngineError, match=message):
        Store(tmp_path / "kept", EngineError)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("", "the path to write to is empty"),
        ("file/kept", "file is not a folder"),
        ("n" * 300, "File name too long"),
        ("a\0b", "is not a valid name of a file or folder"),
    ],
)
def test_an_impossible_place_is_told_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(EngineError, match=message):
        Store(place, EngineError)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_full_disk_does_not_keep_a_command_from_its_end(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("quantizer.utils.files.store.settle", full)
    with caplog.at_level(logging.WARNING):
        assert store.get(KEY, Making()) == 0.1
    assert "a result is not stored in" in caplog.text
    assert "No space left on device" in caplog.text
    assert store.count == 0


def test_another_process_may_be_first(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> int:
        assert Store(store.folder).get(KEY, Making(1)) == 1
        return 2

    assert store.get(KEY, make) == 2
    assert store.find(KEY) == 1
    assert not caplog.text


def test_without_a_folder_nothing_is_kept(tmp_path: Path) -> None:
    make = Making(path=tmp_path / "engine")
    for _ in range(2):
        assert NO_STORE.under("one").get([tmp_path / "absent"], make, tmp_path / "engine") == 0.1
    assert make.calls == 2
    assert NO_STORE.find(KEY) is None
    assert NO_STORE.count == 0
    NO_STORE.drop(KEY)
    NO_STORE.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


def test_errors_are_those_of_the_package(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    with pytest.raises(QuantizerError, match="is not a folder"):
        Store(tmp_path / "kept")
