"""Print what each case reaches: ``python -m outsiders [WORD ...]`` runs the cases whose names hold a word."""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

from outsiders.case import reach
from outsiders.test_outsiders import all_cases


def main(words: list[str]) -> None:
    """Print a line for each case and backend: SQNR at each number of samples, share in integers, seconds."""
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
            engine = " ".join(f"{rows}:{value:.1f}" for rows, value in found.engine.items())
            frozen = min(found.frozen.values())
            share = "-" if found.integer is None else f"{found.integer:.2f}"
            least_db, least_share = (case.least(backend, figure) for figure in ("sqnr", "integer"))
            met = min(found.engine.values()) >= least_db and (found.integer or 0) >= least_share
            seconds = time.perf_counter() - begun
            print(
                f"{name:40s} {backend:12s} {'ok  ' if met else 'LOW '} frozen {frozen:5.1f} dB, engine {engine} dB, "
                f"integers {share} {' '.join(found.findings)[:80]} ({seconds:.1f} s)",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
