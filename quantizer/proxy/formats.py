"""Which format each site's operands are held in: a default, and rules of which the last that matches decides."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from quantizer.errors import ConfigError
from quantizer.numerics.qtype import BLOCKS_OPSET
from quantizer.numerics.qtype import QType
from quantizer.proxy.rules import Rules
from quantizer.proxy.rules import matched
from quantizer.proxy.site import Site
from quantizer.source.catalogue import Kind
from quantizer.targets import TargetProfile

__all__ = ["Format", "FormatRule", "Formats", "formats_for", "impossible", "least_opset_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """The formats of one site.

    Attributes:
        activations: None: they stay float, and weights alone are quantized.
        weights: the format of a weight.
        block_size: how many neighbours along a weight's input channels share a scale; None: no blocks.
        rule: the config entry that decided; None: the default did.
    """

    activations: QType | None
    weights: QType
    block_size: int | None = None
    rule: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatRule:
    """A format for the sites of some kinds (none named: all) that some rules match (none given: all)."""

    format: Format
    kinds: tuple[Kind, ...]
    sites: Rules


class Formats:
    """The format of each site: that of the last rule that matches, else the default."""

    def __init__(self, default: Format, rules: Sequence[tuple[FormatRule, frozenset[str] | None]] = ()) -> None:
        """``rules``: each with the names of the sites it matches (None: any)."""
        self.default = default
        self._rules = tuple(rules)

    def of(self, site: str, kind: Kind) -> Format:
        """The format of a site of a kind; the kind is known once its operands were seen."""
        for rule, sites in reversed(self._rules):
            if (not rule.kinds or kind in rule.kinds) and (sites is None or site in sites):
                return rule.format
        return self.default


def least_opset_of(wanted: Format) -> int:
    """The first ONNX opset in which both formats can be written."""
    opsets = [dtype.onnx_opset for dtype in (wanted.activations, wanted.weights) if dtype is not None]
    return max(*opsets, BLOCKS_OPSET if wanted.block_size is not None else 0)


def formats_for(
    proxy: nn.Module, sites: Iterable[Site], default: Format, rules: Sequence[FormatRule], target: TargetProfile
) -> Formats:
    """Match rules against a proxy.

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
    problems += impossible(default, rules, target)
    if problems:
        raise ConfigError(problems)
    return Formats(default, found)


def impossible(default: Format, rules: Sequence[FormatRule], target: TargetProfile) -> list[str]:
    """What of the formats a target cannot compute in, in words."""
    found = [
        problem
        for number, rule in enumerate(rules)
        for problem in _impossible(rule.format, target, f"formats[{number}]")
    ]
    return [*found, *_impossible(default, target, "dtype")]


def _impossible(wanted: Format, target: TargetProfile, place: str) -> list[str]:
    """What of a format a target cannot compute in."""
    problems = []
    for what, dtype, known in (
        ("activations", wanted.activations, target.activation_dtypes),
        ("weights", wanted.weights, target.weight_dtypes),
    ):
        if dtype is not None and dtype.name not in known:
            names = ", ".join(sorted(known))
            problems.append(f"quantizer.{place}: {target.name} has no {what} in {dtype.name}; it takes {names}")
    return problems
