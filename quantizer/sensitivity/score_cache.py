"""Scores in a file, so that a search that was interrupted continues from there."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType

from quantizer.common.fingerprint import Fingerprint
from quantizer.common.paths import regular_file
from quantizer.common.plain_values import decoded, json_values
from quantizer.errors import SensitivityError
from quantizer.files import checked_file, whole_file
from quantizer.plan.site_plan import SitePlan, plan_digest


@dataclass(frozen=True)
class _Document:
    """The content of the file: scores by search and float groups."""

    scores: Mapping[str, float]


class ScoreCache:
    """Scores of a search by the groups that were float.

    Attributes:
        known: the number of scores of this search.
    """

    def __init__(self, path: str | os.PathLike[str] | None, search: str) -> None:
        self._path = None if path is None else Path(path)
        self._search = search
        self._scores: dict[str, float] = {}
        if self._path is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise SensitivityError(f"{path} cannot be written: {error.strerror}; name another file") from error
            self._scores = check_scores(self._path)

    @property
    def known(self) -> int:
        return sum(key.startswith(f"{self._search}/") for key in self._scores)

    def taken(self, groups: tuple[str, ...] | None) -> float | None:
        """Return the score that was taken with ``groups`` float (None: of the user's own model); None: none was."""
        return self._scores.get(self._key(groups))

    def score(self, groups: tuple[str, ...] | None, take: Callable[[], float]) -> float:
        """Return the score with ``groups`` float (None: the user's own model), measured at the first call only."""
        key = self._key(groups)
        if key not in self._scores:
            self._scores[key] = take()
            if self._path is not None:
                with whole_file(self._path, SensitivityError) as part:
                    part.write_text(json.dumps({"scores": self._scores}, indent=1), encoding="utf-8")
        return self._scores[key]

    def _key(self, groups: tuple[str, ...] | None) -> str:
        return f"{self._search}/" + _digest(["float model"] if groups is None else ["groups", *sorted(groups)])


def check_scores(path: Path) -> dict[str, float]:
    """Return the scores of all searches that use a file; none if there is no such file."""
    if path.parent.is_dir():
        checked_file(path, SensitivityError)
    return _read(path) if path.exists() else {}


def fingerprint(plan: Mapping[str, SitePlan], metric: Callable[..., object], weights: Fingerprint) -> str:
    """Return a checksum of what a plan computes and of its groups, of the weights and of the metric's code.

    The data that a metric reads is not part of it: another data set needs another file, unless the metric names its
    data in an attribute ``reads`` (a text).
    """
    groups = [str(operand.group) for site in plan.values() for operand in site.operands]
    return _digest([*_of_function(metric), json.dumps(weights.plain()), plan_digest(plan), *groups])


def _of_function(function: Callable[..., object]) -> list[str]:
    if isinstance(function, partial):
        return ["partial", *_of_function(function.func), repr(function.args), repr(sorted(function.keywords.items()))]
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    defaults = repr(getattr(function, "__defaults__", None))
    wrapped = getattr(function, "__wrapped__", None)
    inner = [] if wrapped is None else _of_function(wrapped)
    return [name, str(getattr(function, "reads", "")), defaults, *([] if code is None else _of_code(code)), *inner]


def _of_code(code: CodeType) -> list[str]:
    inner = [part for const in code.co_consts if isinstance(const, CodeType) for part in _of_code(const)]
    constants = [repr(const) for const in code.co_consts if not isinstance(const, CodeType)]
    return [code.co_code.hex(), repr(code.co_names), *constants, *inner]


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _read(path: Path) -> dict[str, float]:
    try:
        document: _Document = decoded(_Document, json_values(regular_file(path).read_bytes()), "the file")
    except (OSError, ValueError) as error:
        raise SensitivityError(
            f"{path} holds no scores of a search ({error}); remove it, or name another file"
        ) from error
    return dict(document.scores)
