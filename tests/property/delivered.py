"""Engines of random models on every backend, counted: ``make delivered``, or ``python -m delivered --seed 1``.

A model that fails is written to a folder, with the rule it breaks; ``--again FILE`` runs one of these once more.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import pickle
import random
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch
from drawn_models import DrawnModel, drawn_models
from hypothesis import HealthCheck, Phase, given, seed, settings
from invariants import ENGINES, engine_follows, has_engines, is_finite

_QUIET = settings(database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))

_DRAWN_FOR_EACH = 10


def main() -> int:
    """Draw models, and return 1 if an engine of one of them breaks a rule."""
    parser = argparse.ArgumentParser(prog="delivered", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the draws; the same seed draws the same models")
    parser.add_argument("--models", type=int, default=300, help="how many models are drawn (300)")
    parser.add_argument("--failed", type=Path, default=Path("failed-models"), help="where failing models are written")
    parser.add_argument("--again", type=Path, nargs="*", help="files of that folder to run again, in place of draws")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    held: collections.Counter[str] = collections.Counter()
    begun = time.perf_counter()
    models = _drawn(asked.seed, asked.models) if asked.again is None else [*map(_read, asked.again)]
    for number, drawn in enumerate(models):
        for backend in ENGINES:
            held[backend] += _holds(drawn, backend, asked.failed / f"{asked.seed}-{number}-{backend}.pickle")
    counts = ", ".join(f"{backend} {held[backend]}" for backend in ENGINES)
    print(f"{len(models)} models; engines that held: {counts} ({time.perf_counter() - begun:.0f} s)")
    return int(any(held[backend] != len(models) for backend in ENGINES))


def _drawn(number: int, count: int) -> list[DrawnModel]:
    """Return models that differ: Hypothesis draws many in a row that are nearly alike, of which few are taken."""
    every: dict[str, DrawnModel] = {}

    @seed(number)
    @settings(_QUIET, max_examples=_DRAWN_FOR_EACH * count)
    @given(drawn_models())
    def draw(drawn: DrawnModel) -> None:
        every[drawn.text] = drawn

    draw()
    models = list(every.values())
    random.Random(number).shuffle(models)
    return list(itertools.islice((one for one in models if has_engines(one) and is_finite(one)), count))


def _read(path: Path) -> DrawnModel:
    drawn: DrawnModel = pickle.loads(path.read_bytes())
    return drawn


def _holds(drawn: DrawnModel, backend: str, file: Path) -> bool:
    """Return whether the engine of a backend keeps the rule, and write the model to a file if it does not."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            engine_follows(drawn, backend, Path(folder))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is counted, and the others go on
        print(f"{file.stem}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(pickle.dumps(dataclasses.replace(drawn)))
        file.with_suffix(".txt").write_text(f"{drawn!r}\n\n{traceback.format_exc()}", encoding="utf-8")
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
