"""The check that each rule of a configuration matches something in the model, before the model is scored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from quantizer.config import FallbackConfig
from quantizer.errors import ConfigError
from quantizer.plan.selection import hint_of, matched, matches
from quantizer.quantizer import Quantizer
from quantizer.settings import settings_of


def check_rules(quantizer: Quantizer, model: nn.Module, fallback: FallbackConfig | None) -> None:
    """Raise ``ConfigError`` if a rule of a quantizer's configuration, or a name to keep in float, matches nothing.

    The names and classes of modules are enough for most rules. Rules on sites need the rewritten source.
    """
    config, settings = quantizer.config, settings_of(quantizer.config)
    problems: list[str] = []
    for section, rules in (("exclude", settings.exclude), ("include", settings.include)):
        matched(model, (), replace(rules, sites=()), section, problems)
    if not problems and (config.formats or settings.exclude.sites or settings.include.sites):
        quantizer.inspect(model)
    problems += _unmatched(quantizer, model, () if fallback is None else fallback.names or ())
    if problems:
        raise ConfigError(problems)


def _unmatched(quantizer: Quantizer, model: nn.Module, names: Sequence[str]) -> Iterator[str]:
    """Yield a problem for each name that is no module, site or operand; only the plan knows the groups with braces."""
    modules = [path for path, _ in model.named_modules() if path]
    others = [name for name in names if "{" not in name and not any(matches(name, path) for path in modules)]
    sites = [row.name for row in quantizer.inspect(model)] if others else []
    for name in others:
        site, _, operand = name.rpartition(".")
        if not any(matches(name, path) or (operand and matches(site, path)) for path in sites):
            problem = f"{name!r} matches nothing: no module, site or operand of this name in the model"
            yield f"fallback.names: {problem}{hint_of(name, [*modules, *sites])}"
