"""Damaging and reading, case by case, in a process of its own: a crash of a library is a finding like others."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from quantizer.errors import QuantizerError
from torture.apart import mute
from torture.kinds import KINDS, Kind
from torture.mutations import mutated

_CASE_SECONDS = 20
_MEMORY = 24 * 2**30
_FORK = multiprocessing.get_context("fork")


@dataclass
class State:
    """How far a kind is; kept in a file, so that the same command goes on.

    Attributes:
        seed: of all its cases.
        done: cases that were run.
        refused: cases that ended with an error of ours.
        failures: the others, as text.
    """

    seed: int
    done: int = 0
    refused: int = 0
    failures: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path, seed: int) -> State:
        """What the file holds of this seed; a new one where it holds none."""
        values = json.loads(path.read_text()) if path.exists() else {}
        return cls(**values) if values.get("seed") == seed else cls(seed)

    def write(self, path: Path) -> None:
        """Keep it."""
        path.write_text(json.dumps(asdict(self), indent=1))


def run_kind(name: str, cases: int, seed: int, folder: Path, seconds: float | None) -> State:
    """Run the cases of one kind that were not run yet.

    Args:
        name: of the kind.
        cases: how many in all.
        seed: of the damage.
        folder: for good files, for damaged ones, for what was found and for the state.
        seconds: no new case is begun after so many, but for the first; None: there is no end.
    """
    kind, place = KINDS[name], folder / name
    state = State.read(place / "state.json", seed)
    good = place / "good"
    if not good.exists():
        _apart(_make, kind, good)
    ends = None if seconds is None else time.monotonic() + seconds
    while state.done < cases and (ends is None or time.monotonic() < ends):
        before = state.done
        for told in _cases(kind, place, state.done, cases, seed, ends):
            _note(state, told, kind, place)
            state.write(place / "state.json")
        if state.done == before:
            break
    return state


def _note(state: State, told: tuple[int, str | None], kind: Kind, place: Path) -> None:
    number, problem = told
    state.done = number + 1
    if problem is None:
        return
    if problem == "refused":
        state.refused += 1
        return
    line = f"{kind.name}, seed {state.seed}, case {number}: {problem}"
    state.failures.append(line)
    print(line, flush=True)


def _cases(
    kind: Kind, place: Path, first: int, last: int, seed: int, ends: float | None
) -> Iterator[tuple[int, str | None]]:
    """Each case after its number: None where it was read, ``refused``, or what went wrong. A crash ends the cases."""
    ours, theirs = _FORK.Pipe()
    worker = _FORK.Process(target=_work, args=(kind, place, range(first, last), seed, ends, theirs))
    worker.start()
    theirs.close()
    number = first
    try:
        while True:
            # Python's own alarm does not reach a library that hangs.
            if not ours.poll(_CASE_SECONDS * 4):
                _keep(place, seed, number)
                yield number, f"hung for {_CASE_SECONDS * 4} s outside of Python"
                return
            told = ours.recv()
            if told is None:
                return
            if told[0] == "baseline":
                raise RuntimeError(f"{kind.name}: the good files cannot be read: {told[1]}")
            yield told
            number = told[0] + 1
    except EOFError:
        worker.join()
        _keep(place, seed, number)
        yield number, f"the process died, exit code {worker.exitcode}"
    finally:
        worker.kill()
        worker.join()


def _work(kind: Kind, place: Path, numbers: range, seed: int, ends: float | None, tell: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _late)
    mute()
    case = place / "case"
    try:
        with _silence():
            expected = kind.read(_fresh(place / "good", case))
    except BaseException:  # noqa: BLE001 - told to the process that asked
        tell.send(("baseline", traceback.format_exc()))
        return
    for number in numbers:
        # Getting here may have taken all of the time, at each attempt.
        if ends is not None and time.monotonic() > ends and number != numbers.start:
            break
        pick = random.Random(f"{kind.name}/{seed}/{number}")
        file = _fresh(place / "good", case) / pick.choice(kind.files)
        file.write_bytes(mutated(file.read_bytes(), pick, kind.how))
        outcome = _outcome(kind, case, expected)
        if outcome not in (None, "refused"):
            _keep(place, seed, number)
        tell.send((number, outcome))
    tell.send(None)


def _keep(place: Path, seed: int, number: int) -> None:
    shutil.copytree(place / "case", place / f"found-{seed}-{number}", dirs_exist_ok=True)


def _outcome(kind: Kind, case: Path, expected: object) -> str | None:
    signal.alarm(_CASE_SECONDS)
    try:
        with _silence():
            got = kind.read(case)
        if kind.exact and got != expected:
            return "was read, and gives other outputs"
    except QuantizerError as error:
        with contextlib.suppress(UnicodeEncodeError):
            str(error).encode()
            return "refused"
        return "its error cannot be printed"
    except BaseException as error:  # noqa: BLE001 - what comes out of a reader is the result
        last = traceback.extract_tb(error.__traceback__)[-1]
        ours = [entry for entry in traceback.extract_tb(error.__traceback__) if "/quantizer/" in entry.filename]
        where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno} " if ours else ""
        return f"{type(error).__name__} {ascii(str(error))[:160]} {where}({Path(last.filename).name}:{last.lineno})"
    finally:
        signal.alarm(0)
    return None


class _TooLong(BaseException):
    """A case that takes longer than it may."""


def _late(number: int, frame: Any) -> None:
    raise _TooLong(f"more than {_CASE_SECONDS} s")


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _fresh(good: Path, case: Path) -> Path:
    shutil.rmtree(case, ignore_errors=True)
    shutil.copytree(good, case)
    return case


def _make(kind: Kind, good: Path) -> None:
    part = good.with_name("part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    kind.make(part)
    part.rename(good)


def _apart(function: Any, *args: Any) -> None:
    """In a process of its own: what a library starts there is gone when others are forked."""
    process = _FORK.Process(target=function, args=args)
    process.start()
    process.join()
    if process.exitcode != 0:
        sys.exit(f"{function.__name__} failed: exit code {process.exitcode}, process {os.getpid()}")
