"""Checks of a configuration against a target's profile, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable

from quantizer.config.quantizer_section import QuantizerConfig
from quantizer.config.schema import RunConfig
from quantizer.errors import ConfigError
from quantizer.numerics.qtype import UINT8, QType, qtype
from quantizer.reasons import RuleKind
from quantizer.targets.feasibility import engine_problems
from quantizer.targets.formats import Format, impossible, least_opset_of


def check_formats(config: QuantizerConfig) -> None:
    """Raise if the target does not support all formats.

    Raises:
        ConfigError: a list of all formats that the target does not support.
    """
    problems = impossible(default_format(config), rule_formats(config), config.target)
    if problems:
        raise ConfigError(problems)


def least_opset(config: QuantizerConfig) -> int:
    """Return the first ONNX opset that can represent all formats of a configuration."""
    return _least_opset([default_format(config), *rule_formats(config)])[0]


def _least_opset(formats: Iterable[Format]) -> tuple[int, str]:
    """Return the first opset with all formats, and the key of one that needs it."""
    return max((least_opset_of(entry), entry.rule or "dtype") for entry in formats)


def check_run(config: RunConfig) -> None:
    """Raise if the target of a run does not support its settings, before anything is loaded.

    Raises:
        ConfigError: a list of all formats that the target or the opset lacks, and of an inference precision, a compute
            capability (or its formats) or engines without weights if the target does not support them.
    """
    target = config.quantizer.target
    default, rules = default_format(config.quantizer), rule_formats(config.quantizer)
    formats = [default, *rules]
    problems = impossible(default, rules, target)
    least, which = _least_opset(formats)
    if config.export.opset < least:
        problems.append(
            f"export.opset: got {config.export.opset}; expected {least} or later, the first with the formats of "
            f"quantizer.{which}"
        )
    names = {dtype.name for entry in formats for dtype in (entry.activations, entry.weights) if dtype is not None}
    wanted = config.engine.compute_capability or ()
    found = engine_problems(
        [target],
        formats=names,
        capabilities=[wanted] if isinstance(wanted, str) else wanted,
        precision=config.engine.inference_precision,
        strip_weights=config.engine.strip_weights,
    )
    problems += [f"engine.{problem.place}: {problem.text}" for problem in found]
    if problems:
        raise ConfigError(problems)


def default_format(config: QuantizerConfig) -> Format:
    """Return the format of sites that no rule matches."""
    dynamic = config.activations.ranges == "dynamic"
    return Format(activations=_activations(config, None, dynamic), weights=qtype(config.dtype), dynamic=dynamic)


def rule_formats(config: QuantizerConfig) -> list[Format]:
    """Return the format of each rule of ``formats``, in their order."""
    default = config.activations.ranges if config.activations.ranges == "dynamic" else None
    return [
        Format(
            activations=_activations(config, rule.activations, (rule.activations or default) == "dynamic"),
            weights=qtype(rule.weights or config.dtype),
            dynamic=(rule.activations or default) == "dynamic",
            block_size=rule.block_size,
            rule=RuleKind.FORMAT.text(key=number),
        )
        for number, rule in enumerate(config.formats)
    ]


def _activations(config: QuantizerConfig, wanted: str | None, dynamic: bool) -> QType | None:
    """Return the format of activations, by the name that a rule gives it; None: they stay float."""
    if dynamic:
        kernels = config.target.dynamic
        # Without kernels the format is refused, whatever its codes.
        return UINT8 if kernels is None else qtype(kernels.dtype)
    return None if wanted == "float" else qtype(wanted or config.dtype)
