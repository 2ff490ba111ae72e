"""Print what each case reaches: ``python -m outsiders [WORD ...]`` runs the cases whose names hold a word."""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

from outsiders.case import faults_of, reach
from outsiders.pairs import all_cases


def main(words: list[str]) -> None:
    """Print a line for each case and backend: what it reaches at each size, the seconds, and what falls short."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name, case in all_cases():
        for backend in case.backends:
            if words and not any(word in f"{name}-{backend}" for word in words):
                continue
            begun = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found = reach(case, backend, Path(folder))
                except Exception as error:  # noqa: BLE001 - whatever it is, it is printed, and the others go on
                    print(f"{name:40s} {backend:12s} {type(error).__name__}: {str(error)[:200]!r}", flush=True)
                    continue
            short = faults_of(case, backend, found)
            engine = " ".join(f"{size}:{value:.1f}" for size, value in found.engine.items())
            share = "-" if found.integer is None else f"{found.integer:.2f}"
            print(
                f"{name:40s} {backend:12s} {'LOW ' if short else 'ok  '} frozen {min(found.frozen.values()):5.1f} dB, "
                f"engine {engine} dB, integers {share}, {found.conversions} conversions for {found.products} products "
                f"({time.perf_counter() - begun:.1f} s) {'; '.join(short)}",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
