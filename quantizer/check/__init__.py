"""Check of a quantized ONNX file against the rules of a backend."""

from __future__ import annotations

import os
from pathlib import Path

from quantizer.check import rules as _rules
from quantizer.check.checked_file import Finding, read_subject, rules
from quantizer.errors import ExportError
from quantizer.export.qdq.onnx_file import unreadable_is
from quantizer.plan.targets.base import profile

__all__ = ["Finding", "check_file"]

# Importing the files of rules registers them.
del _rules


def check_file(path: str | os.PathLike[str], target: str) -> list[Finding]:
    """Check a quantized ONNX file, from any tool, against the rules of a backend.

    Args:
        path: the file. External data is read from its own folder only.
        target: name of a backend, such as ``tensorrt``.

    Returns:
        One finding for each node that breaks a rule, errors first. The list is empty if no rule is broken.

    Raises:
        ConfigError: the backend does not exist.
        ExportError: the file cannot be read as ONNX.
        MissingDependencyError: onnx or onnx-ir is not installed.
    """
    limits = profile(target)
    with unreadable_is(ExportError, Path(path)):
        subject = read_subject(Path(path), limits)
        findings = [
            Finding(name, severity, fault.node, fault.problem, fault.advice)
            for name, severity in subject.limits.severities.items()
            for fault in rules[name](subject)
        ]
    return sorted(findings, key=lambda finding: finding.severity)
