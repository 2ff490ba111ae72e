"""The command line: which kinds, how many cases, from which seed, for how long."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

from torture.kinds import KINDS
from torture.runner import run_kind

_READERS = ("configs", "plans", "engines", "onnx_files", "reports", "data_files", "checkpoints")


def main() -> int:
    """0 where nothing was found."""
    parser = argparse.ArgumentParser(prog="torture", description="Damage every kind of file that is read, and read it.")
    parser.add_argument("--kind", nargs="*", help="kinds (default: all)")
    parser.add_argument("--cases", type=int, default=2000, help="damaged files of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="for all kinds together, shared equally")
    parser.add_argument("--folder", type=Path, default=Path("runs/torture"), help="files, findings and state")
    args = parser.parse_args()
    for name in _READERS:
        importlib.import_module(f"torture.readers_{name}")
    chosen = args.kind or list(KINDS)
    if unknown := set(chosen) - set(KINDS):
        parser.error(f"unknown kinds {', '.join(sorted(unknown))}; known: {', '.join(KINDS)}")
    found = 0
    for name in chosen:
        started = time.monotonic()
        state = run_kind(name, args.cases, args.seed, args.folder, args.seconds and args.seconds / len(chosen))
        found += len(state.failures)
        print(
            f"{name}, seed {state.seed}: {state.done} cases, {state.refused} refused, {len(state.failures)} found, "
            f"{time.monotonic() - started:.0f} s",
            flush=True,
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
