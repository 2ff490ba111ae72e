"""Whose a temporary folder is, and when it is removed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from folders import names, write

from quantizer.errors import QuantizerError
from quantizer.utils.files import (
    begun_in,
    is_begun,
    require_sole_writer,
    scratch,
    scratch_folder,
    temporary,
    temporary_beside,
)
from quantizer.utils.files.temporary import leftovers, new_name, remove_leftovers

ROOT = str(Path(__file__).parents[2])
WAITS = (
    "import sys\n"
    "from pathlib import Path\n"
    "from quantizer.utils.files import write_folder\n"
    "def fill(target):\n"
    "    (target / 'half').write_text('half')\n"
    "    print(target, flush=True)\n"
    "    sys.stdin.readline()\n"
    "write_folder(Path(sys.argv[1]), fill, kind='run')\n"
)


def _left(target: Path, machine: str | None = None, owner: int | None = None, start: int | None = None) -> Path:
    """A temporary folder with a file in it, as another owner would have left it."""
    _, stem, owned, ending = new_name(target).name.split(".")
    parts = owned.split("-")
    parts = [
        str(given if given is not None else part)
        for given, part in zip((machine, owner, start, None), parts, strict=True)
    ]
    folder = target.with_name(f".{stem}.{'-'.join(parts)}.{ending}")
    folder.mkdir()
    (folder / "half").write_text("half")
    return folder


def test_the_folder_of_a_process_that_is_alive_stays(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS, str(tmp_path / "out")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ROOT},
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        folder = Path(process.stdout.readline().strip())
        assert (folder / "half").exists()
        remove_leftovers(tmp_path / "out")
        assert (folder / "half").exists()
        process.communicate("go on\n", timeout=300)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0
    assert names(tmp_path) == ["out"]


def test_the_folder_of_a_process_that_has_ended_goes(tmp_path: Path) -> None:
    # One that its parent has not asked for is not alive, though its number is still taken.
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    _left(tmp_path / "out", owner=process.pid)
    remove_leftovers(tmp_path / "out")
    assert not names(tmp_path)
    process.wait()
    _left(tmp_path / "out", owner=process.pid)
    remove_leftovers(tmp_path / "out")
    assert not names(tmp_path)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs a system that tells when a process began")
def test_a_number_that_another_process_has_now(tmp_path: Path) -> None:
    parent = os.getppid()
    began = temporary._started(parent)
    stays = _left(tmp_path / "out", owner=parent, start=began)
    _left(tmp_path / "out", owner=parent, start=1)
    remove_leftovers(tmp_path / "out")
    assert names(tmp_path) == [stays.name]


@pytest.mark.skipif(sys.platform != "linux", reason="threads have numbers of their own on Linux")
def test_the_folder_of_another_thread_stays_and_ones_own_goes(tmp_path: Path) -> None:
    made, done = threading.Event(), threading.Event()

    def other() -> None:
        with temporary_beside(tmp_path / "out") as folder:
            (folder / "half").write_text("half")
            made.set()
            done.wait(300)

    thread = threading.Thread(target=other)
    thread.start()
    assert made.wait(300)
    (theirs,) = names(tmp_path)
    _left(tmp_path / "out")
    remove_leftovers(tmp_path / "out")
    assert names(tmp_path) == [theirs]
    done.set()
    thread.join()
    assert not names(tmp_path)


def test_of_another_machine_by_its_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _left(tmp_path / "out", machine="00000000")
    assert not leftovers(tmp_path / "out", temporary.NEW)
    now = temporary.time.time()
    monkeypatch.setattr(temporary.time, "time", lambda: now + 6 * 24 * 3600)
    assert not leftovers(tmp_path / "out", temporary.NEW)
    monkeypatch.setattr(temporary.time, "time", lambda: now + 8 * 24 * 3600)
    assert leftovers(tmp_path / "out", temporary.NEW) == [folder]
    # What is done below it counts too.
    os.utime(folder / "half", (now + 8 * 24 * 3600,) * 2)
    assert not leftovers(tmp_path / "out", temporary.NEW)


def test_what_only_looks_like_one_stays(tmp_path: Path) -> None:
    process = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    owner = int(process.stdout)
    of_another = _left(tmp_path / "out2", owner=owner)
    file = tmp_path / of_another.name.replace("out2", "out")
    file.write_text("mine")
    (tmp_path / "mine").mkdir()
    link = _left(tmp_path / "out", owner=owner, start=7)
    link.rename(tmp_path / "mine" / "folder")
    link.symlink_to(tmp_path / "mine" / "folder")
    for name in (".out", ".out.old", ".out.part", ".out.abcdefgh", ".out.backup.part"):
        (tmp_path / name).mkdir()
    before = names(tmp_path)
    write(tmp_path / "out", "new")
    assert names(tmp_path) == sorted([*before, "out"])
    assert (tmp_path / "mine" / "folder" / "half").exists()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs a system that tells when a process began")
def test_a_folder_that_another_process_writes_is_told(tmp_path: Path) -> None:
    out, parent = tmp_path / "out", os.getppid()
    require_sole_writer(out)
    # One of a process that has ended, and one of one's own, which an interruption left, are no writers.
    _left(out, owner=parent, start=1)
    _left(out)
    require_sole_writer(out)
    _left(out, owner=parent, start=temporary._started(parent))
    with pytest.raises(QuantizerError, match=rf"out is being written by process {parent}: wait for it, stop it"):
        require_sole_writer(out)
    require_sole_writer(tmp_path / "other")


_KEPT = """
import sys, time
from quantizer.utils.files import scratch_folder
folder = scratch_folder()
(folder / "file").write_text("engine")
print(folder, flush=True)
time.sleep(600)
"""


def test_what_a_killed_process_left_in_the_systems_folder_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    running, killed = (
        subprocess.Popen([sys.executable, "-c", _KEPT], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    )
    try:
        kept, left = (Path(process.stdout.readline().strip()) for process in (running, killed))
        killed.kill()
        killed.wait()
        stranger = tmp_path / "quantizer-mine"
        stranger.mkdir()
        assert left.is_dir()
        first = scratch_folder()
        second = scratch_folder()
        assert sorted(tmp_path.iterdir()) == sorted([kept, stranger, first, second])
        assert (kept / "file").is_file()
    finally:
        for process in (running, killed):
            process.kill()
            process.wait()
            process.stdout.close()


def test_a_folder_outlives_the_thread_that_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made: list[Path] = []
    thread = threading.Thread(target=lambda: made.append(scratch_folder()))
    thread.start()
    thread.join()
    scratch_folder()
    assert made[0].is_dir()


def test_a_scratch_folder_is_removed_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def failed() -> None:
        with scratch() as folder:
            (folder / "engine").write_text("large")
            raise ZeroDivisionError("ours")

    with pytest.raises(ZeroDivisionError, match="ours"):
        failed()
    assert not names(tmp_path)


def test_no_temporary_folder_is_left_by_a_killed_process_for_ever() -> None:
    # One in the folder of a run goes with it; one of tempfile's in the system's folder would stay.
    package = Path(temporary.__file__).parents[1]
    calls = [
        f"{path.relative_to(package)}: {call}"
        for path in sorted(package.rglob("*.py"))
        for call in re.findall(r"(?:TemporaryDirectory|mkdtemp|NamedTemporaryFile|mkstemp)\(.*", path.read_text())
        if "dir=" not in call
    ]
    assert not calls, "use quantizer.utils.files.scratch"


def test_which_targets_of_a_folder_are_begun(tmp_path: Path) -> None:
    targets = [tmp_path / name for name in ("a", "a.b", "c,d=1.5", "n" * 200, "line\nbreak")]
    assert not begun_in(tmp_path)
    assert not begun_in(tmp_path / "none")
    for target in targets:
        new_name(target).mkdir()
        (tmp_path / "plain.part").touch()
    begun = begun_in(tmp_path)
    assert len(begun) == len(targets)
    assert all(is_begun(target, begun) for target in targets)
    assert not any(is_begun(tmp_path / name, begun) for name in ("b", "plain", "a.b.c", "n" * 201))
