"""A kill or a Ctrl-C at every single line: the former folder or the new one is in its place, whole, and nothing stays.

Each line of ``quantizer/files`` that runs while a folder is replaced is such a moment.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from folders import Steps, names, text_of, write

from quantizer.utils.files import restore_folder, whole_file

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")

HERE = Path(__file__).parent
# Some moments of each step, and all of them at night.
WAYS = pytest.mark.parametrize(
    ("exchanges", "every"),
    [
        pytest.param(True, 3, id="exchange, each third line"),
        pytest.param(True, 1, id="exchange", marks=pytest.mark.nightly),
        pytest.param(False, 1, id="two renames", marks=pytest.mark.nightly),
    ],
)


def _no_exchange(one: Path, other: Path) -> bool:
    return False


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of folders are written, and none of them has to outlive a power failure."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@WAYS
@pytest.mark.parametrize("former", [True, False], ids=["former", "none before"])
def test_ctrl_c_at_every_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool, every: int, former: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr("quantizer.utils.files.folder.exchange", _no_exchange)
    out = tmp_path / "out"

    def stop() -> None:
        raise KeyboardInterrupt

    found, number = set(), 0
    while True:
        number += every
        if former:
            write(out, "old")
        with Steps(number, stop) as steps, suppress(KeyboardInterrupt):
            write(out, "new")
        if steps.done < number:
            break
        restore_folder(out)
        if former or out.exists():
            found.add(text_of(out))
        write(out, "next")
        assert text_of(out) == "next"
        assert names(tmp_path) == ["out"], f"line {number}"
        if not former:
            shutil.rmtree(out)
    assert number > 100
    assert found == ({"old", "new"} if former else {"new"})


# Forked, so that one process with its imports does for all kills.
KILLS = """
import os
import shutil
import signal
import sys
import types
from pathlib import Path

# The package without what it imports: a fork of little memory takes little time.
package = types.ModuleType("quantizer")
package.__path__ = [str(Path(sys.argv[2]).parents[1] / "quantizer")]
sys.modules["quantizer"] = package
sys.path.insert(0, sys.argv[2])
from folders import Steps
from folders import names
from folders import text_of
from folders import write
from quantizer.utils.files import folder
from quantizer.utils.files import restore_folder

os.fsync = lambda _: None
if sys.argv[3] == "False":
    folder.exchange = lambda one, other: False
base = Path(sys.argv[1])
out = base / "out"
found, number, ended = set(), 0, False
while not ended:
    number += int(sys.argv[4])
    write(out, "old")
    child = os.fork()
    if child == 0:
        with Steps(number, lambda: os.kill(os.getpid(), signal.SIGKILL)):
            write(out, "new")
        os._exit(0)
    ended = os.waitpid(child, 0)[1] == 0
    if number % 2:
        restore_folder(out)
        found.add(text_of(out))
    write(out, "next")
    assert text_of(out) == "next", number
    assert names(base) == ["out"], (number, names(base))
assert number > 100, number
assert found == {"old", "new"}, found
print(number)
"""


@WAYS
def test_a_kill_at_every_line(tmp_path: Path, exchanges: bool, every: int) -> None:
    (tmp_path / "base").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path / "base"), str(HERE), str(exchanges), str(every)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


def test_ctrl_c_at_every_line_of_a_file(tmp_path: Path) -> None:
    file, found, number = tmp_path / "model.onnx", set(), 0

    def stop() -> None:
        raise KeyboardInterrupt

    while True:
        number += 1
        file.write_text("old")
        with Steps(number, stop) as steps, suppress(KeyboardInterrupt), whole_file(file) as part:
            part.write_text("new")
        if steps.done < number:
            break
        found.add(file.read_text())
        with whole_file(file) as part:
            part.write_text("next")
        assert names(tmp_path) == ["model.onnx"], f"line {number}"
    assert found == {"old", "new"}
    assert number > 30


def test_what_a_killed_process_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from quantizer.utils.files import write_folder\n"
        "def fill(target):\n"
        "    (target / 'large').write_bytes(bytes(1000))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_folder(Path(sys.argv[1]), fill, kind='run')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
        timeout=120,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    (left,) = names(tmp_path)
    assert left.startswith(".out.")
    write(tmp_path / "out", "new")
    assert names(tmp_path) == ["out"]
