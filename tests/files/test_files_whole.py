"""One file: what it replaces, what is told before the work, and what a library's words become."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest
from folders import names

from quantizer.errors import EngineError, QuantizerError
from quantizer.utils.files import checked_file, require_room, whole_file


def _write(path: Path | str, text: str) -> None:
    with whole_file(path, EngineError) as part:
        part.write_text(text)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "the path to write to is empty"),
        (".", "is a folder; expected the name of a file"),
        ("folder", "is a folder; expected the name of a file"),
        ("n" * 300, "cannot be written: File name too long"),
        ("a\0b", "is not a valid name of a file or folder"),
        ("dangling", "dangling is a link to nowhere, which does not exist"),
        ("none/file", "the folder .*/none does not exist; create it first"),
        ("file/file", "the folder .*/file is not a folder; create it first"),
        ("pipe", "is a device, a pipe or a socket"),
        ("socket", "is a device, a pipe or a socket"),
        ("/dev/null", "is a device, a pipe or a socket"),
    ],
    ids=["empty", "here", "folder", "long", "zero", "link", "none", "below a file", "pipe", "socket", "device"],
)
def test_where_no_file_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    # Not by its whole path, which may be longer than an address.
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("socket")
        before = names(tmp_path)
        with pytest.raises(EngineError, match=message):
            checked_file(name, EngineError)
        with pytest.raises(EngineError, match=message):
            _write(name, "new")
    assert names(tmp_path) == before
    assert (tmp_path / "file").read_text() == "mine"


def test_the_file_behind_a_link_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_text("old")
    (tmp_path / "link").symlink_to("real/file")
    _write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "file").read_text() == "new"
    assert names(tmp_path / "real") == ["file"]


def test_a_file_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    with whole_file(tmp_path / "file") as part:
        part.write_text("new")
        part.chmod(0o600)
    other = tmp_path / "other"
    other.write_text("")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == stat.S_IMODE(other.stat().st_mode)


def test_a_full_disk_in_the_words_of_a_library(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")

    def full() -> None:
        with whole_file(tmp_path / "file", EngineError) as part:
            part.write_text("half")
            raise Exception("I/O error: No space left on device (os error 28)")

    with pytest.raises(EngineError, match=r"cannot write .*/file: No space left on device"):
        full()
    assert (tmp_path / "file").read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_a_file_that_was_not_written(tmp_path: Path) -> None:
    def nothing() -> None:
        with whole_file(tmp_path / "file"):
            pass

    with pytest.raises(QuantizerError, match=r"cannot write .*/file: No such file or directory"):
        nothing()
    assert not names(tmp_path)


def test_a_name_as_long_as_it_may_be(tmp_path: Path) -> None:
    for text in ("old", "new"):
        _write(tmp_path / ("n" * 255), text)
    assert (tmp_path / ("n" * 255)).read_text() == "new"


def test_room(tmp_path: Path) -> None:
    require_room(tmp_path, 1, "a file")
    with pytest.raises(QuantizerError, match=r"no room in .*: a file takes at least \d+ MiB, but \d+ MiB are free"):
        require_room(tmp_path, 2**60, "a file")
