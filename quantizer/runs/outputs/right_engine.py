"""An engine that is right at every size that it takes: as it was built, or with models for fixed sizes alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

from quantizer.engines import BuildResult, Engine
from quantizer.engines.base import MOST_COPIED_BYTES
from quantizer.errors import EngineError
from quantizer.runs.outputs.compare_outputs import OutputCheck, References, Tolerance, WrongEngineError, check_engine
from quantizer.runs.run_context import engine_inputs
from quantizer.targets import profile
from quantizer.tasks import Batch

OnlySizes: TypeAlias = tuple[Mapping[str, int], ...]
"""Sizes of dynamic dimensions by name, each with a model of its own; see ``BuildOptions.only_sizes``."""


@dataclass(frozen=True)
class RightEngine:
    """An engine whose outputs were compared.

    Attributes:
        engine: the engine.
        built: its file.
        checks: its outputs against PyTorch's.
        only_sizes: the sizes that it takes; empty: all.
        note: these in a sentence, with the reason; None: it takes all.
    """

    engine: Engine
    built: BuildResult
    checks: tuple[OutputCheck, ...]
    only_sizes: OnlySizes = ()
    note: str | None = None


def right_engine(
    engine: Engine,
    built: BuildResult,
    references: References,
    models: tuple[nn.Module, nn.Module],
    bound: Tolerance,
    rebuild: Callable[[OnlySizes], tuple[BuildResult, Engine]] | None = None,
    hint: str = "",
) -> RightEngine:
    """Return an engine whose outputs are right at all sizes that it takes.

    A model for all sizes that is wrong is replaced by models for the sizes that are compared, if these are right.
    """
    expected, plain = (references.of(model, engine.output_names) for model in models)
    try:
        return RightEngine(engine, built, tuple(check_engine(engine, expected, plain, bound, hint)))
    except WrongEngineError as wrong:
        only = _sizes_alone(engine, [one.inputs for one in expected], built)
        if rebuild is None or not only:
            raise
        try:
            built, alone = rebuild(only)
            pairs = [pair for pair in zip(expected, plain, strict=True) if takes(engine, only, pair[0].inputs)]
            checks = check_engine(alone, [one for one, _ in pairs], [other for _, other in pairs], bound)
        except EngineError:
            raise wrong from None
        note = (
            f"{_words(only)} alone, with a model for each: {engine.name}'s model for all sizes is wrong ({wrong.found})"
        )
        return RightEngine(alone, built, tuple(checks), only, note)


def _words(only_sizes: OnlySizes) -> str:
    """Return sizes in words: ``batch 1, 4 or 8``, ``batch 1 x sequence 16 or batch 8 x sequence 128``."""
    first, *others = sorted(" x ".join(f"{name} {size}" for name, size in one.items()) for one in only_sizes)
    if len(only_sizes[0]) == 1:
        ((name, _),) = only_sizes[0].items()
        first, *others = [str(size) for size in sorted(one[name] for one in only_sizes)]
        first = f"{name} {first}"
    return f"{', '.join([first, *others[:-1]])} or {others[-1]}" if others else first


def takes(engine: Engine, only_sizes: OnlySizes, batch: Batch) -> bool:
    """Return whether an engine for some sizes takes a batch."""
    return not only_sizes or _sizes(engine, batch) in only_sizes


def refusal(why: str) -> str:
    """Return the error of an engine that is not delivered: what is wrong, and what to do."""
    return (
        f"the engine is refused: {why}. Take another backend (`auto` takes the fastest that is right), or keep the "
        "layers in float that it computes wrongly (`exclude`)"
    )


def _sizes_alone(engine: Engine, batches: Sequence[Batch], built: BuildResult) -> OnlySizes:
    """Return the sizes of batches, of which each can have a model of its own; empty: the engine has no such models.

    Each model has a copy of the weights in memory: those of a large engine are fewer.
    """
    if not profile(engine.name).fixed_sizes:
        return ()
    found: list[Mapping[str, int]] = []
    for batch in batches:
        sizes = _sizes(engine, batch)
        if sizes is None:
            return ()
        found += [] if sizes in found else [sizes]
    return tuple(found[: 1 + MOST_COPIED_BYTES // max(built.size_bytes, 1)])


def _sizes(engine: Engine, batch: Batch) -> dict[str, int] | None:
    """Return the size of each dynamic dimension in a batch, by name; None: there is none, or one has no name."""
    arrays = engine_inputs(engine, batch)
    sizes = {
        name: size
        for spec in engine.inputs
        for name, fixed, size in zip(
            spec.dimensions or ("",) * len(spec.shape), spec.shape, arrays[spec.name].shape, strict=True
        )
        if fixed is None
    }
    return None if not sizes or "" in sizes else sizes
