"""One process of a sweep: it reads its runs from stdin, and writes what became of each to stdout.

``python -m quantizer.pipeline.sweep_worker`` is started by ``sweep.py``. It reads one JSON document, and writes a line
of JSON for each run. What libraries print goes to stderr.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from quantizer.config import RunConfig


def main() -> int:
    """Carry out the runs; 0 also where it was ended, which the process that started this one says."""
    # Ctrl-C reaches all processes of a terminal; the one that started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end)
    try:
        with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
            os.dup2(2, 1)
            _carry_out(json.load(sys.stdin), out)
    except KeyboardInterrupt:
        return 0
    return 0


def plain_config(config: RunConfig) -> dict[str, Any]:
    """Return a configuration as plain values; ``config_of`` makes an equal one of them, of the same fields set."""
    return config.model_dump(mode="json", exclude_unset=True)


def config_of(plain: dict[str, Any]) -> RunConfig:
    """Return the configuration of plain values."""
    from quantizer.config import RunConfig

    return RunConfig.model_validate(plain)


def _carry_out(asked: dict[str, Any], out: TextIO) -> None:
    # Imported here, so that a signal in the seconds that these imports take ends the process quietly.
    from dataclasses import asdict
    from pathlib import Path

    import torch

    from quantizer.config.sweep import SweepRun
    from quantizer.pipeline.sweep import logged_runs

    torch.set_num_threads(asked["threads"])
    runs = [SweepRun(name, config_of(plain)) for name, plain in asked["runs"]]
    for outcome in logged_runs(runs, Path(asked["folder"]), asked["force"]):
        print(json.dumps(asdict(outcome)), file=out, flush=True)


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
