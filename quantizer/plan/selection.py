"""Rules that include and exclude sites by module type, by module name and by site.

A *type* matches a module if its class or any base class has that name: ``BertPooler``, or any longer part of its dotted
path (``torch.nn.Linear``). A *name* is a pattern over whole segments of a module's path: ``*`` matches one segment or
part of one, ``**`` any number of segments. A type or name covers everything below the modules that it matches,
functional calls included. A *site* is a pattern over a site's name (``**.attention.self.*.matmul_1``); for an add, an
operand's name may follow (``.lhs``). Exclude has precedence over include.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from quantizer.errors import ConfigError
from quantizer.plan.reasons import RuleKind
from quantizer.proxy.generated_classes import original_class
from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.proxy.site import Site, SourceCall
from quantizer.rewrite.operations import Kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The patterns of ``include`` or ``exclude``."""

    module_types: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    sites: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.module_types or self.names or self.sites)


def matches(pattern: str, path: str) -> bool:
    """Return whether a dotted pattern matches a whole dotted path.

    ``layer.1`` does not match ``layer.10``; ``**.dense`` matches ``dense`` and ``a.b.dense``.
    """
    return _segments_match(pattern.split("."), path.split("."))


def _segments_match(pattern: Sequence[str], path: Sequence[str]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(_segments_match(pattern[1:], path[start:]) for start in range(len(path) + 1))
    return bool(path) and fnmatch.fnmatchcase(path[0], pattern[0]) and _segments_match(pattern[1:], path[1:])


def exclusions(proxy: nn.Module, sites: Iterable[Site], include: Selection, exclude: Selection) -> dict[str, str]:
    """Return the rule that excludes each excluded site and operand, by site name or ``SITE.OPERAND``."""
    sites = list(sites)
    problems: list[str] = []
    excluded = {
        name: RuleKind.EXCLUDE.text(key=key, value=pattern)
        for name, (key, pattern) in matched(proxy, sites, exclude, "exclude", problems).items()
    }
    included = matched(proxy, sites, include, "include", problems)
    if problems:
        raise ConfigError(problems)
    if include:
        for site in sites:
            names = _operand_names(site)
            chosen = [name for name in names if name in included]
            if site.path not in included:
                left_out = set(names) - set(chosen) if chosen else {site.path}
                for name in left_out:
                    excluded.setdefault(name, RuleKind.INCLUDE.text())
    return excluded


def matched(
    proxy: nn.Module, sites: Sequence[Site], rules: Selection, section: str, problems: list[str]
) -> dict[str, tuple[str, str]]:
    """Return the key and pattern that match each site or operand; append unmatched patterns to ``problems``."""
    rule_of: dict[str, tuple[str, str]] = {}
    modules = {
        path: module for path, module in proxy.named_modules() if not isinstance(module, SourceCall | OperandQuantizer)
    }
    for pattern in rules.module_types:
        hosts = [path for path, module in modules.items() if _is_a(module, pattern)]
        if not hosts:
            known = {cls.__name__ for module in modules.values() for cls in original_class(module).__mro__}
            problems.append(_no_match(f"{section}.module_types", pattern, "no module of this type", known))
        _cover(rule_of, sites, hosts, ("module_types", pattern))
    for pattern in rules.names:
        hosts = [path for path in modules if path and matches(pattern, path)]
        if not hosts:
            problems.append(_no_match(f"{section}.names", pattern, "no module of this name", modules))
        _cover(rule_of, sites, hosts, ("names", pattern))
    for pattern in rules.sites:
        hits = [name for site in sites for name in _site_names(site) if matches(pattern, name)]
        for name in hits:
            rule_of.setdefault(name, ("sites", pattern))
        if not hits:
            names = [site.path for site in sites]
            below = [name for name in names if matches(f"{pattern}.**", name)]
            problem = _no_match(f"{section}.sites", pattern, "no site of this name", () if below else names)
            if below:
                others = f" and {len(below) - 1} more" if len(below) > 1 else ""
                problem += f"; it is a module, for {section}.names, with the site {below[0]!r}{others}"
            problems.append(problem)
    return rule_of


def _site_names(site: Site) -> list[str]:
    return [site.path, *_operand_names(site)]


def _operand_names(site: Site) -> list[str]:
    """Return the operands that rules can select, which only adds have."""
    if site.operation.kind != "residual_add":
        return []
    return [f"{site.path}.{operand.name}" for operand in site.operation.operands]


def _cover(
    rule_of: dict[str, tuple[str, str]], sites: Sequence[Site], hosts: Sequence[str], rule: tuple[str, str]
) -> None:
    for site in sites:
        if any(not host or site.path.startswith(host + ".") for host in hosts):
            rule_of.setdefault(site.path, rule)


def _is_a(module: nn.Module, pattern: str) -> bool:
    *qualifiers, name = pattern.split(".")
    for cls in original_class(module).__mro__:
        remaining = iter([*cls.__module__.split("."), *cls.__qualname__.split(".")[:-1]])
        if cls.__name__ == name and all(part in remaining for part in qualifiers):
            return True
    return False


def _no_match(place: str, pattern: str, problem: str, known: Iterable[str]) -> str:
    return f"quantizer.{place}: {pattern!r} matches nothing: {problem} in the model{hint_of(pattern, known)}"


def hint_of(pattern: str, known: Iterable[str]) -> str:
    """Return a question with the known name that a pattern may mean; empty if none is similar."""
    near = difflib.get_close_matches(pattern, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def by_kind(switches: Mapping[str, bool | str], kind: Kind) -> str | None:
    """Return the ``sites:`` rule that turns off a kind of site; None if the kind is on."""
    # Output sites have no switch: they follow their convolution.
    return RuleKind.SWITCH.text(key=kind, value="false") if switches.get(kind) is False else None
