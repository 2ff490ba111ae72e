"""The command line: which kinds, how many cases, from which seed, for how long."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

from torture.faults import FAULTS
from torture.faults import run_fault
from torture.kinds import KINDS
from torture.runner import run_kind

_READERS = ("configs", "plans", "engines", "onnx_files", "reports", "data_files", "checkpoints")


def main() -> int:
    """0 where nothing was found."""
    parser = argparse.ArgumentParser(prog="torture", description="Damage files and read them; kill commands.")
    parser.add_argument("--kind", nargs="*", help="kinds (default: all)")
    parser.add_argument("--cases", type=int, default=2000, help="damaged files of each kind (default: 2000)")
    parser.add_argument("--faults", type=int, default=50, help="kills of each command, and full disks (default: 50)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="for all kinds together: each gets its share of the rest")
    parser.add_argument("--folder", type=Path, default=Path("runs/torture"), help="files, findings and state")
    args = parser.parse_args()
    for name in _READERS:
        importlib.import_module(f"torture.readers_{name}")
    known = [*KINDS, *FAULTS]
    chosen = args.kind or known
    if unknown := set(chosen) - set(known):
        parser.error(f"unknown kinds {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    found, ends = 0, None if args.seconds is None else time.monotonic() + args.seconds
    for number, name in enumerate(chosen):
        started = time.monotonic()
        share = None if ends is None else (ends - started) / (len(chosen) - number)
        run, cases = (run_fault, args.faults) if name in FAULTS else (run_kind, args.cases)
        state = run(name, cases, args.seed, args.folder, share)
        found += len(state.failures)
        print(
            f"{name}, seed {state.seed}: {state.done} cases, {state.refused} refused, {len(state.failures)} found, "
            f"{time.monotonic() - started:.0f} s",
            flush=True,
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
