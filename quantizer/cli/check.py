"""``quantizer check``: a Q/DQ file against the rules of a target."""

from __future__ import annotations

import textwrap
from argparse import ArgumentParser
from argparse import Namespace
from itertools import groupby
from pathlib import Path

from rich.console import Console

from quantizer.export.check import Finding
from quantizer.export.check import check_file

__all__ = ["Check"]

_SHOWN = 3


class Check:
    """Say what a target would refuse, or run slower or less exactly than it could, and what to change."""

    name = "check"
    help = "hold a quantized ONNX file, of any tool, to a target's rules"
    rest: str | None = None
    epilog = """\
example:
  quantizer check model.onnx --target tensorrt
  error [float32-rest] 1 place
    all 49 products have float32 tensors: tensorrt builds what the graph says, so everything that is not quantized
    runs in float32, without a word
    -> convert the model to float16 before export, scales included
  model.onnx: 1 error, 0 warnings

The exit code is 1 where there is an error, and 0 where there are warnings at most. docs/check.md explains the rules."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("file", metavar="FILE", type=Path, help="ONNX file")
        parser.add_argument(
            "--target", metavar="NAME", required=True, help="backend that it is meant for: tensorrt, ..."
        )
        parser.add_argument("--all", action="store_true", help=f"list every place, not the first {_SHOWN} of a rule")

    def __call__(self, args: Namespace, console: Console) -> int:
        findings = check_file(args.file, args.target)
        for _, group in groupby(findings, key=lambda finding: (finding.severity, finding.rule)):
            _print(list(group), args.all, console)
        errors = sum(finding.severity == "error" for finding in findings)
        said = (
            f"{_counted(errors, 'error')}, {_counted(len(findings) - errors, 'warning')}" if findings else "no finding"
        )
        console.print(f"{args.file}: {said}", markup=False, highlight=False)
        return 1 if errors else 0


def _print(findings: list[Finding], every: bool, console: Console) -> None:
    """One rule: its name, and the places where it is broken."""
    first = findings[0]
    style = "red" if first.severity == "error" else "yellow"
    head = f"{first.severity} [{first.rule}] {_counted(len(findings), 'place')}"
    console.print(head, style=style, markup=False, highlight=False)
    shown = findings if every else findings[:_SHOWN]
    for finding in shown:
        where = f"{finding.node}: " if finding.node else ""
        for line in (f"{where}{finding.problem}", f"-> {finding.advice}"):
            for text in _wrapped(line, console.width - 2):
                console.print(f"  {text}", markup=False, highlight=False, soft_wrap=True)
    if len(findings) > len(shown):
        console.print(f"  ... and {len(findings) - len(shown)} more", markup=False, highlight=False)


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of a terminal; a name that is longer than a line stays whole, so that it can be copied."""

    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False, subsequent_indent="  ")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
