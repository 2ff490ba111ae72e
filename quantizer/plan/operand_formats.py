"""The formats of each site's operands: those of the last rule that matches, else a default."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from quantizer.errors import ConfigError
from quantizer.operations.catalogue import Kind
from quantizer.plan.selection import Selection
from quantizer.plan.selection import matched
from quantizer.proxy.site import Site
from quantizer.targets import TargetProfile
from quantizer.targets.formats import Format
from quantizer.targets.formats import impossible

__all__ = ["FormatRule", "Formats", "formats_for"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatRule:
    """A format for sites of ``kinds`` (empty: all kinds) that match ``sites`` (empty: all sites)."""

    format: Format
    kinds: tuple[Kind, ...]
    sites: Selection


class Formats:
    """The format of each site: that of the last rule that matches, else the default."""

    def __init__(self, default: Format, rules: Sequence[tuple[FormatRule, frozenset[str] | None]] = ()) -> None:
        """``rules``: each with the names of the sites that it matches (None: all)."""
        self.default = default
        self._rules = tuple(rules)

    def of(self, site: str, kind: Kind) -> Format:
        """Return the format of a site; its kind is known once its operands were observed."""
        for rule, sites in reversed(self._rules):
            if (not rule.kinds or kind in rule.kinds) and (sites is None or site in sites):
                return rule.format
        return self.default


def formats_for(
    proxy: nn.Module, sites: Iterable[Site], default: Format, rules: Sequence[FormatRule], target: TargetProfile
) -> Formats:
    """Return the formats of a proxy's sites by the rules.

    Raises:
        ConfigError: a pattern matches nothing in the model, or the target cannot compute in a format; all are listed.
    """
    sites = list(sites)
    problems: list[str] = []
    found: list[tuple[FormatRule, frozenset[str] | None]] = []
    for number, rule in enumerate(rules):
        section = f"formats[{number}]"
        names = frozenset(matched(proxy, sites, rule.sites, section, problems)) if rule.sites else None
        found.append((rule, names))
    problems += impossible(default, [rule.format for rule in rules], target)
    if problems:
        raise ConfigError(problems)
    return Formats(default, found)
