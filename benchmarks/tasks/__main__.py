"""Each task end to end, by ``quantizer run`` and ``quantizer convert``: scores of float and engine.

``make tasks`` writes ``docs/tasks.md``. What ended well is kept in ``runs/tasks``: a second call goes on from there.
Samples that ``runs/tasks`` lacks, as those of another machine, stay as the page has them with ``--page``.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import yaml
from cases import CASES, Case
from common import SHARED
from page import Result, page

from quantizer.report import read_record
from quantizer.utils.child_process import child_environment, python_command

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "tasks.md"
_BACKENDS = {"run": "openvino", "convert": "onnxruntime"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/tasks"), help="folder of checkpoints and runs")
    parser.add_argument("--page", action="store_true", help="write the page of what was measured, and measure nothing")
    parser.add_argument("--only", nargs="+", choices=[case.task for case in CASES], help="these tasks, and no page")
    asked = parser.parse_args()
    (asked.work / "data").mkdir(parents=True, exist_ok=True)
    work = asked.work.resolve()
    cases = [case for case in CASES if asked.only is None or case.task in asked.only]
    missing = [case.task for case in cases if case.real and not SHARED.is_dir()]
    if missing:
        print(f"{SHARED} is missing, with the models and data of {', '.join(missing)}: these are left out")
    results = [_measured(case, work, asked.page) for case in cases if case.task not in missing]
    if asked.only is None:
        _PAGE.write_text(page(results, _PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"wrote {_PAGE}")


def _measured(case: Case, work: Path, there: bool) -> Result:
    """The records of both ways, taken from their folders where they are there; nothing else if so asked."""
    folders = {verb: work / verb / case.task for verb in _BACKENDS}
    reports = {"run": folders["run"] / "report.json"}
    reports["convert"] = folders["convert"] / _BACKENDS["convert"] / "report.json"
    if there:
        return Result(case=case, **{verb: read_record(path) for verb, path in reports.items() if path.exists()})
    source = _checkpoint(case, work)
    result = Result(case=case)
    if case.evaluation is not None:
        if not reports["run"].exists():
            config = work / f"{case.task}.yaml"
            config.write_text(yaml.safe_dump(_config(case, source, work), sort_keys=False), encoding="utf-8")
            _quantizer("run", str(config), "--output", str(folders["run"]), "--force")
        result = replace(result, run=read_record(reports["run"]))
    if case.convertible:
        if not reports["convert"].exists():
            _quantizer("convert", *_words(case, source, work), "--output", str(folders["convert"]), "--force")
        result = replace(result, convert=read_record(reports["convert"]))
    return result


def _checkpoint(case: Case, work: Path) -> str:
    """The source of the model, made first where it has to be."""
    if isinstance(case.source, str):
        return case.source
    made = work / "data" / case.task
    if not made.is_dir():
        print(f"{case.task}: the checkpoint ({case.model})", flush=True)
        unfinished = work / "data" / f"{case.task}.part"
        shutil.rmtree(unfinished, ignore_errors=True)
        torch.manual_seed(0)
        case.source(unfinished)
        unfinished.rename(made)
    return str(made)


def _config(case: Case, source: str, work: Path) -> dict[str, object]:
    batch, sequence = case.shape
    assert case.evaluation is not None
    model: dict[str, object] = {"source": source, "task": case.task}
    model |= {"max_length": case.max_length} if sequence else {}
    model |= {"labels": list(case.labels)} if case.labels else {}
    model |= {"seconds": case.seconds} if case.seconds is not None else {}
    model |= {"new_tokens": case.new_tokens} if case.new_tokens is not None else {}
    return {
        "model": model,
        "data": {
            "calibration": case.calibration(work / "data"),
            "evaluation": case.evaluation(work / "data"),
            **case.data(work / "data"),
        },
        "quantizer": {"backend": _BACKENDS["run"]},
        "engine": {"threads": 1},
        "report": {"latency_batch": batch, **({"latency_sequence": sequence} if sequence else {})},
    }


def _words(case: Case, source: str, work: Path) -> list[str]:
    batch, sequence = case.shape
    rows = case.calibration(work / "data")
    words = ["-m", source, "--task", case.task, "--quantization", "--backend", _BACKENDS["convert"]]
    words += ["--calibration", f"{rows['name']}:{rows['path']}", "--samples", str(rows.get("samples", 32))]
    words += ["--batch-size", "1", str(batch), str(2 * batch)]
    words += ["--seq-len", "8", str(sequence), str(max(sequence, case.max_length))] if sequence else []
    words += ["--labels", *case.labels] if case.labels else []
    words += ["--seconds", str(case.seconds)] if case.seconds is not None else []
    words += ["--new-tokens", str(case.new_tokens)] if case.new_tokens is not None else []
    if case.evaluation is not None:
        scored = case.evaluation(work / "data")
        words += ["--evaluation", f"{scored['name']}:{scored['path']}"]
    return words


def _quantizer(*words: Sequence[str] | str) -> None:
    print(f"quantizer {' '.join(map(str, words))}", flush=True)
    subprocess.run(python_command("quantizer", *words), check=True, env=child_environment())


if __name__ == "__main__":
    main()
