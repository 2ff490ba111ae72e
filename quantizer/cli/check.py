"""``quantizer check``: checks a Q/DQ ONNX file against the rules of a target."""

from __future__ import annotations

import textwrap
from argparse import ArgumentParser, Namespace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from quantizer.check import Finding


_SHOWN = 3


class Check:
    """Command that reports what a target rejects, runs slowly or runs inaccurately, and how to fix it."""

    name = "check"
    help = "check a quantized ONNX file of any tool against the rules of a backend"
    list_argument: str | None = None
    epilog = """\
example:
  quantizer check model.onnx --target tensorrt
  error [unconverted-float32] 1 place
      all 49 MatMul, Gemm and Conv nodes have float32 tensors: tensorrt uses the types of the graph, so
      non-quantized operations run in float32
    -> convert the model to float16 before export, scales included
  model.onnx: 1 error, 0 warnings

The exit code is 1 if there is an error, and 0 if there are only warnings. docs/check.md explains the rules."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("file", metavar="FILE", type=Path, help="ONNX file")
        parser.add_argument("--target", metavar="NAME", required=True, help="backend of the file: tensorrt, ...")
        parser.add_argument("--all", action="store_true", help=f"list all places, not only the first {_SHOWN} per rule")

    def __call__(self, args: Namespace, console: Console) -> int:
        # Imported here because the other commands do not need numpy.
        from quantizer.check import check_file

        findings = check_file(args.file, args.target)
        for _, group in groupby(findings, key=lambda finding: (finding.severity, finding.rule)):
            _print(list(group), args.all, console)
        errors = sum(finding.severity == "error" for finding in findings)
        summary = (
            f"{_counted(errors, 'error')}, {_counted(len(findings) - errors, 'warning')}" if findings else "no finding"
        )
        console.print(f"{args.file}: {summary}", markup=False, highlight=False, soft_wrap=True)
        return 1 if errors else 0


def _print(findings: list[Finding], show_all: bool, console: Console) -> None:
    """Print the findings of one rule with their places and the advice."""
    first = findings[0]
    style = "red" if first.severity == "error" else "yellow"
    head = f"{first.severity} [{first.rule}] {_counted(len(findings), 'place')}"
    console.print(head, style=style, markup=False, highlight=False)
    listed = findings if show_all else findings[:_SHOWN]
    # Advice that all findings share is printed once.
    advices = list(dict.fromkeys(finding.advice for finding in listed))
    for finding in listed:
        if finding.node:
            console.print(f"  {finding.node}", style="bold", markup=False, highlight=False, soft_wrap=True)
        _say(finding.problem, 4, console)
        if len(advices) > 1:
            _say(f"-> {finding.advice}", 4, console)
    if len(findings) > len(listed):
        console.print(f"  ... and {len(findings) - len(listed)} more", markup=False, highlight=False)
    if len(advices) == 1:
        _say(f"-> {advices[0]}", 2, console)


def _say(text: str, indent: int, console: Console) -> None:
    """Print a text wrapped to the terminal; long words are not broken, so that they can be copied."""
    space = " " * indent
    lines = textwrap.wrap(
        text,
        console.width,
        initial_indent=space,
        subsequent_indent=space,
        break_long_words=False,
        break_on_hyphens=False,
    )
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
