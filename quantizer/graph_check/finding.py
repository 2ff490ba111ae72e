"""Findings of the check of a file: one for each place where a rule is broken."""

from __future__ import annotations

from dataclasses import dataclass

from quantizer.targets.graph_rules import Severity


@dataclass(frozen=True, slots=True)
class Fault:
    """Place where a rule is broken, as the rule reports it.

    Attributes:
        node: the name of the node; empty where the file as a whole is meant.
        problem: what is wrong, and what comes of it.
        advice: what to change.
    """

    node: str
    problem: str
    advice: str


@dataclass(frozen=True, slots=True)
class Finding:
    """Broken rule of a target.

    Attributes:
        rule: its name, one of those in ``docs/check.md``.
        severity: ``error`` or ``warning``, see ``Severity``.
        node: the name of the node; empty where the file as a whole is meant.
        problem: what is wrong, and what comes of it.
        advice: what to change.
    """

    rule: str
    severity: Severity
    node: str
    problem: str
    advice: str

    def __str__(self) -> str:
        where = f" at {self.node}" if self.node else ""
        return f"{self.severity} [{self.rule}]{where}: {self.problem}; {self.advice}"
