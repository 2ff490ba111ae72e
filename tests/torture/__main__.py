"""The command line: which kinds, how many cases, from which seed, for how long.

A run that is ended, or whose time is over, goes on with the same command.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

from torture.faults import FAULTS, run_fault
from torture.kinds import KINDS
from torture.runner import run_kind

_READERS = ("configs", "plans", "engines", "hostile_folders", "onnx_files", "reports", "data_files", "checkpoints")


def main() -> int:
    """0 where nothing was found."""
    args = _parsed()
    seed = _seed(args.folder, args.seed)
    ends = None if args.seconds is None else time.monotonic() + args.seconds
    complete, found, rest = True, 0, _cases(args)
    while rest:
        started = time.monotonic()
        share = None if ends is None else (ends - started) / sum(weight for _, weight in rest.values())
        name = next(iter(rest))
        cases, weight = rest.pop(name)
        run = run_fault if name in FAULTS else run_kind
        state = run(name, cases, seed, args.folder, share and share * weight)
        found += len(state.failures)
        complete &= state.done >= cases
        print(
            f"{name}, seed {state.seed}: {state.done} cases, {state.refused} refused, {len(state.failures)} found, "
            f"{time.monotonic() - started:.0f} s",
            flush=True,
        )
    if complete:
        (args.folder / "seed").unlink()
    else:
        print(f"not complete: the same command goes on, with seed {seed}")
    return 1 if found else 0


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="torture", description="Damage files and read them; kill commands.")
    parser.add_argument("--kind", nargs="*", help="kinds; files or faults for all of these (default: all)")
    parser.add_argument("--cases", type=int, default=2000, help="damaged files of each kind (default: 2000)")
    parser.add_argument("--kills", type=int, default=50, help="of each command, and a quarter so many full disks")
    parser.add_argument("--seed", type=int, help="of all damage (default: that of the run to go on with, or a new one)")
    parser.add_argument("--seconds", type=float, help="for all kinds together: each gets its share of the rest")
    parser.add_argument("--folder", type=Path, default=Path("runs/torture"), help="files, findings and state")
    args = parser.parse_args()
    for name in _READERS:
        importlib.import_module(f"torture.readers_{name}")
    groups = {"files": [*KINDS], "faults": [*FAULTS]}
    args.kind = [name for asked in args.kind or groups for name in groups.get(asked, [asked])]
    if unknown := set(args.kind) - {*KINDS, *FAULTS}:
        parser.error(f"unknown kinds {', '.join(sorted(unknown))}; known: {', '.join((*KINDS, *FAULTS))}")
    return args


def _cases(args: argparse.Namespace) -> dict[str, tuple[int, float]]:
    """Of each kind that was chosen, the number of cases and its weight when time is shared."""
    found = {}
    for name in args.kind:
        if name in KINDS:
            found[name] = args.cases, 1.0
        elif name.startswith("kill"):
            found[name] = args.kills, 1.0
        else:
            found[name] = -(-args.kills // 4), 0.25
    return found


def _seed(folder: Path, asked: int | None) -> int:
    """The seed that was asked for, that of the run in the folder that is not complete, or a new one."""
    file = folder / "seed"
    if asked is None:
        asked = int(file.read_text()) if file.exists() else int(time.time())
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{asked}\n")
    print(f"seed {asked}", flush=True)
    return asked


if __name__ == "__main__":
    sys.exit(main())
