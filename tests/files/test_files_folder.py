"""What a folder of ours replaces, and what it never does."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from folders import KIND, fill, names, text_of, write

from quantizer.errors import QuantizerError
from quantizer.utils.files import MARKER, checked_folder, folder, restore_folder, write_folder
from quantizer.utils.files.folder import exchange as really_exchange
from quantizer.utils.files.temporary import NEW, OLD, new_name

# -- what is kept --------------------------------------------------------------------------------------------------


def test_a_folder_of_ours_is_replaced(tmp_path: Path) -> None:
    assert write(tmp_path / "out", "old") == tmp_path / "out"
    write(tmp_path / "out", "new")
    assert text_of(tmp_path / "out") == "new"
    assert names(tmp_path) == ["out"]


def _mine(folder: Path) -> None:
    folder.mkdir()
    (folder / "mine").write_text("mine")


def _mine_beside_ours(folder: Path) -> None:
    write(folder, "old")
    (folder / "mine").write_text("mine")


def _mine_below_ours(folder: Path) -> None:
    write(folder, "old")
    (folder / "below" / "mine").write_text("mine")


def _an_empty_folder_in_ours(folder: Path) -> None:
    write(folder, "old")
    (folder / "mine").mkdir()


def _a_folder_where_ours_had_a_file(folder: Path) -> None:
    write(folder, "old")
    (folder / "a").unlink()
    (folder / "a").mkdir()
    (folder / "a" / "mine").write_text("mine")


def _ours_in_ours(folder: Path) -> None:
    write(folder, "old")
    write(folder / "mine", "another")


def _another_kind(folder: Path) -> None:
    write_folder(folder, fill("old"), kind="saved quantizer")


def _a_marker_that_is_damaged(folder: Path) -> None:
    write(folder, "old")
    (folder / MARKER).write_text('{"format": 1, "kind": "run"')


def _a_marker_of_a_later_format(folder: Path) -> None:
    write(folder, "old")
    (folder / MARKER).write_text('{"format": 2, "kind": "run", "holds": ["a", "below/", "below/b"]}')


def _a_working_tree(folder: Path) -> None:
    write(folder, "old")
    (folder / ".git").mkdir()


KEPT: dict[Callable[[Path], None], str] = {
    _mine: "was not written by this quantizer .* it contains 'mine'",
    _mine_beside_ours: "contains 'mine', which quantizer did not write: move that elsewhere",
    _mine_below_ours: "contains 'below/mine', which quantizer did not write",
    _an_empty_folder_in_ours: "contains 'mine/', which quantizer did not write",
    _a_folder_where_ours_had_a_file: "contains 'a/mine', 'a/', which quantizer did not write",
    _ours_in_ours: "which quantizer did not write",
    _another_kind: "contains a saved quantizer, which a run does not replace",
    _a_marker_that_is_damaged: r"\.quantizer\.json cannot be read",
    _a_marker_of_a_later_format: r"\.quantizer\.json cannot be read",
    _a_working_tree: "is a git working tree",
}


@pytest.mark.parametrize("link", [False, True], ids=["folder", "link to it"])
@pytest.mark.parametrize("make", KEPT, ids=lambda make: make.__name__.strip("_"))
def test_what_was_not_written_here_is_kept(tmp_path: Path, make: Callable[[Path], None], link: bool) -> None:
    make(tmp_path / "out")
    before = {path: path.is_file() and path.read_bytes() for path in (tmp_path / "out").rglob("*")}
    if link:
        (tmp_path / "link").symlink_to("out")
    for replace in (True, False):
        with pytest.raises(QuantizerError, match=KEPT[make]):
            write_folder(
                tmp_path / ("link" if link else "out"),
                lambda _: pytest.fail("the work was begun"),
                kind=KIND,
                replace=replace,
            )
    assert {path: path.is_file() and path.read_bytes() for path in (tmp_path / "out").rglob("*")} == before
    assert names(tmp_path) == (["link", "out"] if link else ["out"])


def test_without_replace_nothing_that_stands_there_is_replaced(tmp_path: Path) -> None:
    write(tmp_path / "ours", "old")
    (tmp_path / "empty").mkdir()
    for name in ("ours", "empty"):
        with pytest.raises(
            QuantizerError, match=f"{name} already exists; choose another folder, or replace it with --"
        ):
            checked_folder(tmp_path / name, KIND, replace=False)
        assert checked_folder(tmp_path / name, KIND, replace=True) == tmp_path / name


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write(tmp_path / "out", "new")
    assert text_of(tmp_path / "out") == "new"


def test_the_current_folder_a_root_and_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "below")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    for place in (".", "..", tmp_path, tmp_path / "here" / "below", "../../here", "/"):
        with pytest.raises(QuantizerError, match=r"is or contains the current folder|is the root of a f"):
            checked_folder(place, KIND, replace=True)
    with pytest.raises(QuantizerError, match="is a home folder; nothing was changed"):
        checked_folder(tmp_path / "home", KIND, replace=True)
    # A folder that is empty could be replaced, and a process that stands in it would stand nowhere.
    with pytest.raises(QuantizerError, match="is or contains the current folder"):
        write(Path(), "new")


def test_where_a_file_system_is_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda _: True)
    with pytest.raises(QuantizerError, match="is a mount point"):
        checked_folder(tmp_path / "out", KIND, replace=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "the path to write to is empty"),
        ("n" * 300, "cannot be written: File name too long"),
        ("below/" + "n" * 300, "cannot be written: File name too long"),
        ("a\0b", "is not a valid name of a file or folder"),
        ("a\ud800b", "is not a valid name of a file or folder"),
        ("dangling", "dangling is a link to nowhere, which does not exist"),
        ("dangling/out", "dangling is a link to nowhere, which does not exist"),
        ("loop", "loop is a link to loop, which does not exist"),
        ("file", "it is not a folder"),
        ("file/out", "file is not a folder"),
    ],
    ids=["empty", "long", "long below", "zero", "surrogate", "link", "below a link", "loop", "file", "below a file"],
)
def test_names_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(QuantizerError, match=message):
        write_folder(name, lambda _: pytest.fail("the work was begun"), kind=KIND)
    assert names(tmp_path) == ["dangling", "file", "loop"]


def test_a_name_that_leaves_no_room_for_more(tmp_path: Path) -> None:
    for text in ("old", "new"):
        write(tmp_path / ("n" * 255), text)
    assert text_of(tmp_path / ("n" * 255)) == "new"
    assert len(names(tmp_path)) == 1


def test_the_folder_behind_a_link_is_replaced(tmp_path: Path) -> None:
    write(tmp_path / "real" / "out", "old")
    (tmp_path / "link").symlink_to("real/out")
    write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert text_of(tmp_path / "real" / "out") == "new"
    assert (names(tmp_path), names(tmp_path / "real")) == (["link", "real"], ["out"])


def test_a_saved_quantizer_of_an_earlier_version(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "quantizer.yaml").write_text("format: 1\nsites: []\n")
    (out / "ranges.safetensors").write_text("")
    with pytest.raises(QuantizerError, match="contains a saved quantizer, which a run does not replace"):
        write(out, "new")
    (out / "mine").write_text("mine")
    with pytest.raises(QuantizerError, match="contains 'mine', which quantizer did not write"):
        write_folder(out, fill("new"), kind="saved quantizer")
    (out / "mine").unlink()
    write_folder(out, fill("new"), kind="saved quantizer")
    assert text_of(out) == "new"
    assert names(tmp_path) == ["out"]


# -- what changes while the work is done ---------------------------------------------------------------------------


def test_what_came_in_the_meantime_is_kept_and_so_is_the_work(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, "old")

    def and_mine(target: Path) -> None:
        fill("new")(target)
        (out / "mine").write_text("mine")

    for number in (1, 2):
        with pytest.raises(QuantizerError, match=rf"(?s)did not write.*The new folder is kept in .*/out\.new{number}$"):
            write_folder(out, and_mine, kind=KIND)
        (out / "mine").unlink()
        assert text_of(out) == "old"
        assert text_of(tmp_path / f"out.new{number}") == "new"
    assert names(tmp_path) == ["out", "out.new1", "out.new2"]


def test_two_at_once_that_may_not_replace(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def and_another(target: Path) -> None:
        fill("second")(target)
        other = threading.Thread(target=write, args=(out, "first"))
        other.start()
        other.join()

    with pytest.raises(QuantizerError, match=r"out already exists.*kept in .*/out\.new1"):
        write_folder(out, and_another, kind=KIND, replace=False)
    assert text_of(out) == "first"
    assert text_of(tmp_path / "out.new1") == "second"


@pytest.mark.parametrize("way", [really_exchange, lambda one, other: False], ids=["exchange", "two renames"])
def test_a_file_that_comes_at_the_last_moment_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: Any
) -> None:
    write(tmp_path / "out", "old")

    def late(one: Path, other: Path) -> bool:
        (other / "mine").write_text("mine")
        return bool(way(one, other))

    monkeypatch.setattr(folder, "exchange", late)
    write(tmp_path / "out", "new")
    assert text_of(tmp_path / "out") == "new"
    (aside,) = (path for path in tmp_path.iterdir() if path.name != "out")
    assert (aside / "mine").read_text() == "mine"
    assert f"{aside} is not removed: quantizer did not write mine in it" in caplog.text
    # Nor by the next one, or the one after that.
    monkeypatch.undo()
    for text in ("next", "last"):
        write(tmp_path / "out", text)
        assert (aside / "mine").read_text() == "mine"


def test_an_interruption_after_the_work_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(_: Path) -> None:
        raise KeyboardInterrupt

    write(tmp_path / "out", "old")
    monkeypatch.setattr("quantizer.utils.files.folder.sync_folder", stop)
    with pytest.raises(KeyboardInterrupt, match=r"/out is complete$"):
        write(tmp_path / "out", "new")
    assert text_of(tmp_path / "out") == "new"
    assert names(tmp_path) == ["out"]


# -- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        # As libraries in Rust say it, which raise exceptions of their own.
        Exception("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=["OSError", "of a library"],
)
def test_a_full_disk(tmp_path: Path, error: Exception) -> None:
    write(tmp_path / "out", "old")

    def full(target: Path) -> None:
        fill("new")(target)
        raise error

    for name in ("out", "deep/er/out"):
        with pytest.raises(QuantizerError, match=r"nothing was written to .*out: .*No space left on device"):
            write_folder(tmp_path / name, full, kind=KIND)
    assert text_of(tmp_path / "out") == "old"
    assert names(tmp_path) == ["out"]


def _read_missing(_: Path, elsewhere: Path) -> None:
    (elsewhere / "weights").read_bytes()


def _write_over_a_folder(_: Path, elsewhere: Path) -> None:
    (elsewhere / "taken").mkdir()
    (elsewhere / "taken").mkdir()


def _full_elsewhere(_: Path, elsewhere: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(elsewhere / "cache"))


def _no_network(_: Path, __: Path) -> None:
    raise OSError("We couldn't connect to the hub\nand more")


def _library_reads(_: Path, __: Path) -> None:
    raise RuntimeError("Error while loading: No such file or directory (os error 2)")


def _write_inside(new: Path, _: Path) -> None:
    (new / "none" / "engine").write_bytes(b"")


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (_read_missing, "ELSEWHERE/weights cannot be read: No such file or directory; nothing was written to OUT"),
        (_write_over_a_folder, "ELSEWHERE/taken cannot be written: File exists; nothing was written to OUT"),
        (_full_elsewhere, "ELSEWHERE/cache cannot be written: No space left on device; nothing was written to OUT"),
        (_no_network, "OSError: We couldn't connect to the hub; nothing was written to OUT"),
        (
            _library_reads,
            "RuntimeError: Error while loading: No such file or directory (os error 2); nothing was written to OUT",
        ),
        (_write_inside, "nothing was written to OUT: No such file or directory"),
    ],
)
def test_an_error_of_the_work_names_its_own_place(
    tmp_path: Path, work: Callable[[Path, Path], None], words: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    told = words.replace("ELSEWHERE", str(elsewhere)).replace("OUT", str(tmp_path / "out"))
    with pytest.raises(QuantizerError, match=f"^{re.escape(told)}$"):
        write_folder(tmp_path / "out", lambda new: work(new, elsewhere), kind=KIND)
    assert names(tmp_path) == ["elsewhere"]


def test_a_disk_that_is_full_before_is_told_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(QuantizerError, match="out cannot be written: No space left on device"):
        write_folder(tmp_path / "out", lambda _: pytest.fail("the work was begun"), kind=KIND)
    assert not names(tmp_path)


def test_an_error_of_another_kind_is_itself(tmp_path: Path) -> None:
    def wrong(_: Path) -> None:
        raise ZeroDivisionError("ours")

    with pytest.raises(ZeroDivisionError, match="ours"):
        write_folder(tmp_path / "out", wrong, kind=KIND)
    assert not names(tmp_path)


# -- the two ways --------------------------------------------------------------------------------------------------


def test_two_folders_change_places(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("")
    if not really_exchange(tmp_path / "one", tmp_path / "other"):
        pytest.skip("this system exchanges no folders")
    assert names(tmp_path / "one") == ["other"]
    assert names(tmp_path / "other") == ["one"]
    with pytest.raises(FileNotFoundError, match="none"):
        really_exchange(tmp_path / "one", tmp_path / "none")


def test_where_the_system_exchanges_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        """A C library whose call says of a file system that it cannot."""

        def __init__(self, *_: object, **__: object) -> None:
            pass

        def renameat2(self, *_: object) -> int:
            return -1

    monkeypatch.setattr("ctypes.CDLL", Library)
    for code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        monkeypatch.setattr("ctypes.get_errno", lambda code=code: code)
        assert not folder.exchange(tmp_path / "a", tmp_path / "b")
        write(tmp_path / "out", "old")
        write(tmp_path / "out", "new")
        assert text_of(tmp_path / "out") == "new"
    monkeypatch.setattr("ctypes.get_errno", lambda: errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        folder.exchange(tmp_path / "a", tmp_path / "b")
    monkeypatch.delattr(Library, "renameat2")
    assert not folder.exchange(tmp_path / "a", tmp_path / "b")
    monkeypatch.setattr("sys.platform", "darwin")
    assert not folder.exchange(tmp_path / "a", tmp_path / "b")


def test_a_rename_that_fails_brings_the_former_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "out", "old")
    rename, calls = os.rename, []

    def fail(one: Path, other: Path) -> None:
        calls.append(one)
        if len(calls) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(one, other)

    monkeypatch.setattr(folder, "exchange", lambda one, other: False)
    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(QuantizerError, match=r"Input/output error.*kept in .*out\.new1"):
        write(tmp_path / "out", "new")
    assert text_of(tmp_path / "out") == "old"
    assert text_of(tmp_path / "out.new1") == "new"
    assert names(tmp_path) == ["out", "out.new1"]


@pytest.mark.parametrize("complete", [True, False])
def test_what_a_kill_between_two_renames_left_is_restored(tmp_path: Path, complete: bool) -> None:
    out = tmp_path / "out"
    new = new_name(out)
    old = new.with_suffix(OLD)
    for text, aside in (("old", old), ("new", new)):
        write(tmp_path / "elsewhere", text).rename(aside)
    if not complete:
        (new / MARKER).unlink()
    restore_folder(out)
    assert text_of(out) == ("new" if complete else "old")
    write(out, "next")
    assert names(tmp_path) == ["out"]
    assert new.suffix == NEW


# -- how it is written ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mask", "file", "folder"), [(0o022, 0o644, 0o755), (0o027, 0o640, 0o750), (0, 0o666, 0o777)])
def test_all_files_have_the_mode_of_the_umask(tmp_path: Path, mask: int, file: int, folder: int) -> None:
    def private(target: Path) -> None:
        fill("new")(target)
        (target / "a").chmod(0o600)
        (target / "below").chmod(0o700)

    before = os.umask(mask)
    try:
        out = write_folder(tmp_path / "out", private, kind=KIND)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (out, *out.rglob("*"))}
    assert modes == {"out": folder, "below": folder, "a": file, "b": file, MARKER: file}


def test_a_folder_that_was_made_private_stays_so(tmp_path: Path) -> None:
    write(tmp_path / "out", "old").chmod(0o700)
    write(tmp_path / "out", "new")
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o700


def test_all_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    seen: list[tuple[str, bool]] = []
    sync = os.fsync

    def synced(descriptor: int) -> None:
        seen.append((os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")), out.exists()))
        sync(descriptor)

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc to tell what is synced")
    monkeypatch.setattr(os, "fsync", synced)
    write(out, "new")
    *before, last = seen
    assert {name for name, _ in before} >= {"a", "b", "below", MARKER}
    assert not any(there for _, there in before)
    assert last == (tmp_path.name, True)


def test_a_copy_of_a_folder_of_ours_is_one_too(tmp_path: Path) -> None:
    write(tmp_path / "out", "old")
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    write(tmp_path / "copy", "new")
    assert text_of(tmp_path / "copy") == "new"
