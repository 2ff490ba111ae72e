"""The harness that damages files: it finds what it is for, does the same from one seed, and goes on where it was."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from torture import mutations
from torture.runner import State

TESTS = Path(__file__).parent
SOME = ["plan", "yaml", "jsonl", "kill-save"]
MORE = ["report", "image-csv", "full-disk-save"]


def _run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    search = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    # A folder below the current one, as in the Makefile.
    command = [sys.executable, "-m", "torture", "--folder", folder.name, *words]
    environment = {**os.environ, "PYTHONPATH": search}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=environment, cwd=folder.parent
    )


@pytest.mark.parametrize("damage", [mutations.raw, mutations.text, mutations.json_text, mutations.yaml_text])
def test_a_seed_does_the_same_damage_again(damage: mutations.Mutation) -> None:
    content = json.dumps({"a": [1, 2, {"b": "text"}], "c": None}).encode()
    first, again = (
        [mutations.mutated(content, random.Random(f"kind/0/{n}"), (damage,)) for n in range(50)] for _ in "12"
    )
    assert first == again
    assert content not in first
    assert len(set(first)) > 25


@pytest.mark.nightly
def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    done = _run(tmp_path, "--kind", "jsonl", "scores", "--cases", "40", "--seed", "7")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "jsonl, seed 7: 40 cases" in done.stdout
    first = json.loads((tmp_path / "jsonl/state.json").read_text())
    assert (first["seed"], first["done"]) == (7, 40)
    assert 0 < first["refused"] < 40
    assert "60 cases" in _run(tmp_path, "--kind", "jsonl", "--cases", "60", "--seed", "7").stdout
    assert State.read(tmp_path / "jsonl/state.json", seed=7).done == 60
    assert State.read(tmp_path / "jsonl/state.json", seed=8).done == 0


@pytest.mark.skipif(os.name != "posix", reason="forks, and sends POSIX signals")
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("cases", "kills", "kinds"), [(20, 2, SOME), (300, 12, [*SOME, *MORE])], ids=["seconds", "minute"]
)
def test_a_part_of_it(tmp_path: Path, cases: int, kills: int, kinds: list[str]) -> None:
    """Of each sort of file that is read quickly, and kills and full disks while one is saved."""
    much = ["--cases", f"{cases}", "--kills", f"{kills}", "--seconds", "45"]
    done = _run(tmp_path, "--kind", *kinds, *much, "--seed", "1")
    # What was found is told with its seed and its number.
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("seed 1\n")
    told = done.stdout.splitlines()[1 : 1 + len(kinds)]
    assert [line.partition(", seed 1: ")[0] for line in told] == kinds
    assert not [line for line in told if " 0 cases" in line]


_FAULTY = """
import os, signal, sys, time
from pathlib import Path
from torture.kinds import Kind
from torture.runner import run_kind
from torture import kinds, runner
from quantizer.errors import QuantizerError

def read(folder):
    content = (folder / "a").read_bytes()
    if content != b"good":
        match len(content) % 5:
            case 0: os.kill(os.getpid(), signal.SIGSEGV)
            case 1: raise KeyError("a traceback")
            case 2: raise QuantizerError("refused")
            case 3: time.sleep(60)
    return content

def longer(content, pick):
    return content + bytes(pick.randrange(1, 6))

runner._CASE_SECONDS = 1
kinds.kind(Kind(name="faulty", make=lambda folder: (folder / "a").write_bytes(b"good"), files=("a",), how=(longer,),
                read=read, exact=True))
state = run_kind("faulty", 20, 0, Path(sys.argv[1]), None)
print(state.done, state.refused)
"""


@pytest.mark.nightly
def test_what_it_is_for_is_found(tmp_path: Path) -> None:
    """A crash, a traceback, an endless read and other outputs, each with its seed and its files."""
    search = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    done = subprocess.run(
        [sys.executable, "-c", _FAULTY, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env={**os.environ, "PYTHONPATH": search},
    )
    crash, late = "the process died, exit code -11", "_TooLong 'more than 1 s'"
    other = "was read, and gives other outputs"
    for words in (crash, "KeyError", late, other):
        assert f": {words}" in done.stdout, done.stdout
    told = done.stdout.splitlines()
    assert told[-1].split()[0] == "20"
    found = sorted(path.name for path in (tmp_path / "faulty").glob("found-0-*"))
    assert len(found) == len(told) - 1
    assert all((tmp_path / "faulty" / name / "a").is_file() for name in found)


_CARELESS = """
import os, shutil, sys, time
from pathlib import Path
from torture import faults, victims

def careless(inputs, out, former):
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    for name in ("a", "b"):
        time.sleep(0.02)
        (out / name).write_text(f"{former} {name}" * 100)
    return 0

def interrupted(inputs, out, former):
    try:
        out.with_name("left").mkdir(exist_ok=True)
        return careless(inputs, out, former)
    finally:
        if "b" in os.listdir(out):
            out.with_name("left").rmdir()

def result(out):
    return {name: (out / name).read_text() for name in ("a", "b")}

for name, act in (("careless", careless), ("interrupted", interrupted)):
    victim = victims.Victim(lambda folder: None, act, result)
    faults.FAULTS[f"kill-{name}"] = victim, faults._kill
    faults.FAULTS[f"full-disk-{name}"] = victim, faults._full_disk
for name in ("kill-careless", "kill-interrupted", "full-disk-careless"):
    first = faults.run_fault(name, 6, 0, Path(sys.argv[1]), None)
    again = faults.run_fault(name, 12, 0, Path(sys.argv[1]), None)
    assert (first.done, again.done) == (6, 12)
    print(name, len(again.failures))
"""


@pytest.mark.skipif(os.name != "posix", reason="forks, and sends POSIX signals")
@pytest.mark.nightly
def test_a_command_that_is_careless_is_found(tmp_path: Path) -> None:
    """A folder that is half-written, one that stays, and an error of the system that nobody explains."""
    search = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    done = subprocess.run(
        [sys.executable, "-c", _CARELESS, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": search},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("the folder cannot be read: ", "and left ['left']", "OSError: [Errno 27]"):
        assert words in done.stdout, done.stdout
    counts = dict(line.split() for line in done.stdout.splitlines() if line.count(" ") == 1 and line[-1].isdigit())
    assert sorted(counts) == ["full-disk-careless", "kill-careless", "kill-interrupted"]
    assert all(int(count) > 2 for count in counts.values())
