"""Two sections of the zoo's page: files and engines of some architectures, and other tools on the same ones."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import exports
import peers
from choose import Row

__all__ = ["exports_section", "tools_section"]

_FULL, _TENTH = 0.995, 10
_TOOLS = {
    "quantizer": "this package",
    "modelopt": "Model Optimizer",
    "nncf": "NNCF",
    "nncf-transformer": "NNCF, `model_type` TRANSFORMER",
}
_STAGES: Mapping[str, tuple[str, str | None]] = {
    "float_export": ("the float model is exported", "made"),
    "export": ("the quantized model is exported", "float_export"),
    "check": ("`quantizer check` has no error", "export"),
    "onnxruntime": ("ONNX Runtime runs it", "export"),
    "openvino": ("OpenVINO runs it", "export"),
    "float_build": (f"TensorRT-RTX builds the float file ({exports.CAPABILITY})", "float_export"),
    "build": (f"TensorRT-RTX builds the quantized file ({exports.CAPABILITY})", "float_build"),
}
"""What is said of a stage, and the stage whose rows it is counted among."""
_EXPORTS = """
## Exports of {count}

Of the architectures that run, some of each modality: those whose names have the lowest checksums. Texts have 32 tokens,
that a product of attention is as wide as TensorRT wants it. Float and INT8 files have an FP16 rest for TensorRT-RTX,
whose engines are built ahead of time and not run, and the INT8 plan has a file with an FP32 rest for ONNX Runtime and
OpenVINO. SQNR is that of the worst output against the frozen proxy, on a batch that calibration has not seen: where a
value lies between two codes, a last bit decides, and a random model amplifies what follows.
"""
_PEERS = """
## Other tools

The same {count} architectures, with 8 tokens, and the same two batches through each tool's front end for torch models,
with its own INT8 defaults, Model Optimizer's without the rule that leaves vision branches out by name. A tool takes a
model if what it returns runs and gives finite values. A multiply-add counts as rounded if both of its operands are,
whichever tool rounds them; shares are those of the models that a tool takes.
"""


def exports_section(rows: Sequence[Row]) -> list[str]:
    """Return the section of the rows of ``exports``; nothing without one."""
    if not rows:
        return []
    lines = [_EXPORTS.format(count=len(rows)), "| stage | passed | of |", "|---|---|---|"]
    for stage, (text, among) in _STAGES.items():
        tried = [row for row in rows if row.get(among) == "ok"]
        lines.append(f"| {text} | {sum(row.get(stage) == 'ok' for row in tried)} | {len(tried)} |")
    columns = ["architecture", "modality", "sites", "shapes", "float file", "file", "check", "ONNX Runtime", "OpenVINO"]
    columns += ["float engine", "engine"]
    lines += ["", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for row in sorted(rows, key=_name):
        cells = [f"`{_name(row)}`", row.get("modality", "-"), str(row.get("sites", "-")), row.get("shapes", "-")]
        cells += [_cell(row, stage) for stage in _STAGES]
        lines.append(f"| {' | '.join(cells)} |")
    lines += _reasons("What failed", [(_name(row), _failed(row, exports.STAGES)) for row in rows])
    return lines + _reasons("Warnings of `quantizer check`", [(_name(row), row.get("warnings", [])) for row in rows])


def tools_section(rows: Sequence[Row]) -> list[str]:
    """Return the section of the rows of ``peers``; nothing without one."""
    if not rows:
        return []
    lines = [_PEERS.format(count=len({_name(row) for row in rows}))]
    lines += ["| tool | taken | of | median share | tenth percentile | at 99.5% or more |", "|---|---|---|---|---|---|"]
    for tool, text in _TOOLS.items():
        tried = [row for row in rows if row["tool"] == tool]
        taken = [row for row in tried if row.get("ran") == "ok"]
        shares = sorted(row["share"] for row in taken if row.get("share") is not None)
        if shares:
            middle, tenth = statistics.median(shares), shares[(len(shares) - 1) // _TENTH]
            told = f"{middle:.1%} | {tenth:.1%} | {sum(share >= _FULL for share in shares)}"
        else:
            told = "- | - | -"
        lines.append(f"| {text} | {len(taken)} | {len(tried)} | {told} |")
    failed = [(f"{_TOOLS[row['tool']]}, {_name(row)}", _failed(row, peers.STAGES)) for row in rows]
    return lines + _reasons("What was not taken", failed)


def _name(row: Row) -> str:
    return str(row["name"] if row["library"] == "transformers" else f"{row['library']} {row['name']}")


def _cell(row: Row, stage: str) -> str:
    if row.get(stage) != "ok":
        return "-" if stage not in row else "failed"
    decibels = row.get(f"{stage}_db")
    return "ok" if decibels is None else f"{decibels:.0f} dB"


def _failed(row: Row, stages: Sequence[str]) -> list[str]:
    found = [f"{stage}: {row[stage]}" for stage in stages if row.get(stage, "ok") != "ok"]
    return found + ([f"{row.get('stage', 'start')}: {row['ended']}"] if "ended" in row else [])


def _reasons(title: str, rows: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    told = [(name, " ".join(reason.split()).replace("|", "/")) for name, reasons in sorted(rows) for reason in reasons]
    lines = [f"| {name} | {reason} |" for name, reason in told]
    return [f"\n{title}:\n", "| what | reason |", "|---|---|", *lines] if lines else []
