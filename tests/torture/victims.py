"""Commands that write folders, as small as they can be, and what of such a folder is the same each time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import yaml
from tiny_run import tiny_run, write_rows
from translated import translate_once

from quantizer import Quantizer
from quantizer.cli.main import main
from torture.readers_plans import data, model

Result = dict[str, str]
_OF_THE_MOMENT = frozenset({"created", "latency", "memory", "stages", "machine", "time_us", "time_share"})
_OF_THE_MOMENT |= {"build_seconds"}


@dataclass(frozen=True)
class Victim:
    """A command that writes a folder.

    Attributes:
        make: writes what it reads into a folder.
        act: the command, with that folder and where to write; the last says whether it is the former or the new one.
        result: what of the folder must come out again, by name.
        keeps: what may stay beside the folder after an interruption.
    """

    make: Callable[[Path], object]
    act: Callable[[Path, Path, bool], int]
    result: Callable[[Path], Result]
    keeps: frozenset[str] = frozenset()


def _saved(_: Path, out: Path, former: bool) -> int:
    q, small = Quantizer(preset="plain", backend="openvino", activations={"calibrator": "percentile"}), model()
    q.calibrate(small, [data() * (2 if former else 1)], progress=False)
    q.save(out)
    return 0


def _what_it_loads(out: Path) -> Result:
    q = Quantizer.load(out)
    with torch.no_grad():
        outputs = q.quantize(model())(data())
    return {"outputs": str(outputs.flatten().tolist()), "scales": str(q.scales())}


def _make_run(folder: Path, **more: Any) -> None:
    run = tiny_run(folder)
    write_rows(folder / "training.csv", 24, seed=3)
    if more:
        run["data"]["training"] = {"name": "text-csv", "path": str(folder / "training.csv")}
        run["data"]["tuning"] = {"name": "text-csv", "path": str(folder / "calibration.csv")}
    (folder / "run.yaml").write_text(yaml.safe_dump({**run, **more}))


def _make_training(folder: Path) -> None:
    _make_run(folder, qat={"epochs": 6.0, "learning_rate": 0.0001, "tolerance": 0.0, "evaluations": 6})


def _run(inputs: Path, out: Path, former: bool) -> int:
    import quantizer.pipeline.benchmark as benchmark

    translate_once(inputs).__enter__()
    # Seconds each, and no part of what is compared.
    memory = SimpleNamespace(peak_mib=2.0, baseline_mib=1.0)
    mock.patch.multiple(benchmark, peak_memory_mib=lambda *_, **__: memory, LATENCY_ROUNDS=1).start()
    words = ["run", str(inputs / "run.yaml"), "--output", str(out), "--force"]
    return main([*words, "quantizer.activations.percentile=99.0"] if former else words)


def _convert(inputs: Path, out: Path, former: bool) -> int:
    import quantizer.pipeline.benchmark as benchmark

    translate_once(inputs).__enter__()
    mock.patch.object(benchmark, "_LATENCY_SECONDS", 0.01).start()
    words = [
        "convert",
        "-m",
        str(inputs / "model"),
        "--backend",
        "openvino",
        "--quantization",
        "--samples",
        "8" if former else "12",
    ]
    words += ["--calibration", f"text-csv:{inputs / 'calibration.csv'}", "--tolerance", "1"]
    sizes = ["--batch-size", "1", "2", "4", "--seq-len", "16", "24", "32"]
    return main([*words, *sizes, "-o", str(out), "--force"])


def _files(out: Path) -> Result:
    """All files by name, each by its digest or, where it holds times, by what else it holds."""
    found = {}
    for path in sorted(out.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            match path.name:
                case "report.json":
                    content = json.dumps(_lasting(json.loads(content)), sort_keys=True).encode()
                case "report.html":
                    content = content[-8:]
            found[str(path.relative_to(out))] = hashlib.sha256(content).hexdigest()
    return found


def _lasting(values: Any) -> Any:
    """What of a document is the same each time."""
    if isinstance(values, dict):
        return {key: _lasting(value) for key, value in values.items() if key not in _OF_THE_MOMENT}
    return [_lasting(value) for value in values] if isinstance(values, list) else values


VICTIMS = {
    "save": Victim(lambda _: None, _saved, _what_it_loads),
    "run": Victim(_make_run, _run, _files),
    "convert": Victim(_make_run, _convert, _files),
    "qat": Victim(_make_training, _run, _files, frozenset({"out.training"})),
}
