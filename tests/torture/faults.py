"""Kills and full disks: the folder is the former one or the new one, whole, and the same command then ends well."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from quantizer.utils.files import restore_folder
from torture.apart import Stop, apart, preload
from torture.runner import State
from torture.victims import VICTIMS, Result, Victim

_SIGNALS = (signal.SIGKILL,) * 4 + (signal.SIGTERM, signal.SIGINT)
_BESIDE = {"notes.txt": b"mine", "out.txt": b"mine, too", ".out.hidden/mine": b"and this"}


@dataclass
class Facts:
    """Of an uninterrupted command.

    Attributes:
        modules: what it imports.
        seconds: how long it takes.
        events: its accesses to files.
        sizes: of its files, in bytes.
        result: what comes of it.
        former: the digest of the folder that it replaces.
    """

    modules: list[str] = field(default_factory=list)
    seconds: float = 0.0
    events: int = 0
    sizes: list[int] = field(default_factory=list)
    result: Result = field(default_factory=dict)
    former: str = ""


def _kill(pick: random.Random, facts: Facts) -> Stop:
    number = pick.choice(_SIGNALS)
    # A moment in time is most often one of computing; what is written is as much in danger, and takes no time.
    if pick.random() < 0.5:
        return Stop(number, after=pick.uniform(0, facts.seconds))
    return Stop(number, event=pick.randint(1, facts.events))


def _full_disk(pick: random.Random, facts: Facts) -> Stop:
    # A disk that has no byte left is found before the work.
    size = pick.choice((pick.randrange(max(facts.sizes)), pick.choice(facts.sizes) + pick.choice((-1, 0, 1))))
    return Stop(size=max(size, 0))


FAULTS: dict[str, tuple[Victim, Callable[[random.Random, Facts], Stop]]] = {
    **{f"kill-{name}": (victim, _kill) for name, victim in VICTIMS.items()},
    **{f"full-disk-{name}": (victim, _full_disk) for name, victim in VICTIMS.items()},
}


def run_fault(name: str, cases: int, seed: int, folder: Path, seconds: float | None) -> State:
    """Run the cases of one fault that were not run yet; the arguments are those of ``run_kind``."""
    # Commands follow links and go by absolute paths: so are their accesses counted.
    folder = folder.resolve()
    place = folder / name
    state = State.read(place / "state.json", seed)
    if state.done >= cases:
        return state
    good = folder / f"of-{name.rpartition('-')[2]}"
    facts = _facts(good, FAULTS[name][0])
    place.mkdir(parents=True, exist_ok=True)
    ends = None if seconds is None else time.monotonic() + seconds
    first = state.done
    while state.done < cases and (ends is None or time.monotonic() < ends or state.done == first):
        case = _Case(name, seed, state.done, place / "case", good, facts)
        problem = case.carry_out()
        if problem is not None:
            line = f"{name}, seed {seed}, case {state.done}: {problem}"
            print(line, flush=True)
            state.failures.append(line)
            shutil.copytree(case.folder, place / f"found-{seed}-{state.done}", symlinks=True, dirs_exist_ok=True)
        state.refused += case.interrupted
        state.done += 1
        state.write(place / "state.json")
    return state


class _Case:
    """One command that is interrupted, once or twice, and then ends well.

    Attributes:
        folder: where it writes ``out``, beside what is not its own.
        interrupted: it did not end well before it was let alone.
    """

    def __init__(self, name: str, seed: int, number: int, folder: Path, good: Path, facts: Facts) -> None:
        self.folder, self.interrupted = folder, False
        self._victim, self._stop = FAULTS[name]
        self._pick = random.Random(f"{name}/{seed}/{number}")
        self._good, self._facts = good, facts

    def carry_out(self) -> str | None:
        """What went wrong; None: nothing."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        for name, content in _BESIDE.items():
            (self.folder / name).parent.mkdir(exist_ok=True)
            (self.folder / name).write_bytes(content)
        before = self._pick.choice(("absent", "former"))
        if before == "former":
            shutil.copytree(self._good / "former" / "out", self.folder / "out")
        stops = [self._stop(self._pick, self._facts) for _ in range(self._pick.choice((1, 1, 1, 2)))]
        told = ""
        for stop in (*stops, Stop()):
            told += f"{', then ' if told else ''}{stop}"
            before, problem = self._once(stop, before)
            if problem is not None:
                return f"{told}: {problem}"
        return None

    def _once(self, stop: Stop, before: str) -> tuple[str, str | None]:
        """What is there after one attempt, and what is wrong with it."""
        out, there = self.folder / "out", {*os.listdir(self.folder)}
        end = apart(partial(self._victim.act, self._good, out, False), self.folder, stop)
        if end.crash:
            return before, end.crash
        self.interrupted |= end.code != 0
        if stop == Stop() and end.code != 0:
            return before, f"ended with {end.code}: {end.said[-300:]}"
        if stop.size is not None and end.code and "error: " not in end.said:
            return before, f"ended with {end.code}, and says {end.said[-300:]!r}"
        # The times of engines stay for a run that repeats this one.
        allowed = {"out", "out.times", *(name.partition("/")[0] for name in _BESIDE)}
        if end.code != 0:
            # What an earlier kill left may stay as long as no process comes to write.
            allowed |= self._victim.keeps | there
        # A process that got no time leaves what the next one removes.
        if end.code is not None and (left := sorted({*os.listdir(self.folder)} - allowed)):
            return before, f"ended with {end.code}, and left {left}"
        if any((self.folder / name).read_bytes() != content for name, content in _BESIDE.items()):
            return before, "what lies beside the folder is another"
        restore_folder(out)
        found, problem = self._found(out)
        if problem is None and found not in ({"new"} if end.code == 0 else {before, "new"}):
            problem = f"ended with {end.code}, and the folder that was {before} is {found}"
        return found, problem

    def _found(self, out: Path) -> tuple[str, str | None]:
        if not out.exists():
            return "absent", None
        if _digest(out) == self._facts.former:
            return "former", None
        end = apart(partial(self._victim.result, out), self.folder)
        if end.crash or end.value is None:
            return "broken", f"the folder cannot be read: {end.crash or end.said}"
        wrong = sorted(name for name, _ in {*end.value.items()} ^ {*self._facts.result.items()})
        return "new", f"the folder has other {', '.join(dict.fromkeys(wrong))}" if wrong else None


def _facts(good: Path, victim: Victim) -> Facts:
    """Make what the command reads, and see what it does when nothing happens to it."""
    file = good / "facts.json"
    if file.exists():
        facts = Facts(**json.loads(file.read_text()))
        preload(facts.modules)
        return facts
    shutil.rmtree(good, ignore_errors=True)
    good.mkdir(parents=True)
    modules = apart(partial(_first, good, victim), good)
    if modules.value is None:
        sys.exit(f"the command does not run: {modules.crash or modules.said}")
    preload(modules.value)
    new = good / "new" / "out"
    end = apart(partial(victim.act, good, new, False), new.parent)
    result = apart(partial(victim.result, new), good)
    if end.code != 0 or result.value is None:
        sys.exit(f"the command does not run: {end.crash or end.said}{result.crash}")
    sizes = sorted({path.stat().st_size for path in new.rglob("*") if path.is_file()})
    facts = Facts(modules.value, end.seconds, end.events, sizes, result.value, _digest(good / "former" / "out"))
    file.write_text(json.dumps(asdict(facts)))
    return facts


def _first(good: Path, victim: Victim) -> list[str]:
    victim.make(good)
    for name, former in (("former", True), ("new", False)):
        (good / name).mkdir()
        if code := victim.act(good, good / name / "out", former):
            raise RuntimeError(f"ended with {code}")
    return sorted(sys.modules)


def _digest(folder: Path) -> str:
    """Of all names and bytes in a folder."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        found.update(f"{path.relative_to(folder)} {path.is_dir()} ".encode())
        found.update(path.read_bytes() if path.is_file() else b"")
    return found.hexdigest()
