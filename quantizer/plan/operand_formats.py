"""The formats of each site's operands: those of the last rule that matches, else a default."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace

from torch import nn

from quantizer.errors import ConfigError
from quantizer.numerics.qtype import INT8, UINT8
from quantizer.operations.catalogue import Kind
from quantizer.plan.selection import Selection, matched
from quantizer.proxy.site import Site
from quantizer.targets import TargetProfile
from quantizer.targets.formats import Format, impossible


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatRule:
    """A format for sites of ``kinds`` (empty: all kinds) that match ``sites`` (empty: all sites)."""

    format: Format
    kinds: tuple[Kind, ...]
    sites: Selection


class Formats:
    """The format of each site: that of the last rule that matches, else the default.

    Args:
        default: the format where no rule matches.
        rules: each with the names of the sites that it matches (None: all).
        zero_points: the kinds of site whose default INT8 is UINT8 with a zero point: the same codes, all of which are
            used where values are not symmetric around 0.
    """

    def __init__(
        self,
        default: Format,
        rules: Sequence[tuple[FormatRule, frozenset[str] | None]] = (),
        zero_points: Set[Kind] = frozenset(),
    ) -> None:
        self.default = default
        self._rules = tuple(rules)
        self._zero_points = zero_points

    def of(self, site: str, kind: Kind) -> Format:
        """Return the format of a site; its kind is known once its operands were observed."""
        for rule, sites in reversed(self._rules):
            if (not rule.kinds or kind in rule.kinds) and (sites is None or site in sites):
                return rule.format
        static = self.default.activations == INT8 and not self.default.dynamic
        asymmetric = static and kind in self._zero_points
        return replace(self.default, activations=UINT8) if asymmetric else self.default


def formats_for(
    proxy: nn.Module,
    sites: Iterable[Site],
    default: Format,
    rules: Sequence[FormatRule],
    target: TargetProfile,
    *,
    zero_point: bool,
) -> Formats:
    """Return the formats of a proxy's sites by the rules.

    Args:
        proxy: the proxy.
        sites: its sites.
        default: the format where no rule matches.
        rules: formats for some sites.
        target: the target.
        zero_point: whether the default INT8 activations have a zero point where the target's kernels take one.

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
    asymmetric: Set[Kind] = target.zero_points if zero_point else frozenset()
    if target.quantizes_outputs and "conv" in asymmetric:
        # What is between convolutions has their formats.
        asymmetric = {*asymmetric, "output", "residual_add"}
    return Formats(default, found, asymmetric)
