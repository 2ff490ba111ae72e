"""The comparison of an engine's outputs with PyTorch's, at the least, the usual and the largest shape.

Each output has figures and a condition on them.

The noise of float sums, added to the products of a quantized model: how far it alone moves the outputs.

No engine adds up in the order of PyTorch. In a model that rounds, a sum that differs in its last bits is now and then
rounded to the neighbouring step, that moves sums of later layers by more, and so on: DINOv2's logits move by as much as
quantization itself moves them, with any order of sums. Where PyTorch's own output happens to be closer to that of the
float model, no engine is wrong for not being so.

The reference for the engine of a quantized model is the frozen proxy, which rounds as the graph does; for that of a
float model it is this model. The cosine to the float model shows the cost of quantization; it is reported, not checked.

Shapes: B rows, S tokens, D width.

An engine that is right at every size that it takes: as it was built, or with models for fixed sizes alone.

The batches on which an engine's outputs are compared with PyTorch's: real samples, at several sizes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from quantizer.config import RunConfig
from quantizer.engines import BuildResult, Engine
from quantizer.engines.base import MOST_COPIED_BYTES
from quantizer.errors import EngineError
from quantizer.pipeline.context import as_predictor, engine_inputs
from quantizer.pipeline.module_feed import ModuleFeed
from quantizer.plan.targets import profile
from quantizer.proxy.restored_state import untouched
from quantizer.proxy.site import Site
from quantizer.report.record import ALIKE_DB, FURTHER_DB, OutputDistance, is_no_further
from quantizer.tasks import Batch, Feed, batch_shape, rows_at
from quantizer.tasks.inputs import TextInputs
from quantizer.tasks.metrics import mean_cosine, sqnr_db
from quantizer.utils.dimension_names import PRESENT
from quantizer.utils.sizes import BATCH
from quantizer.utils.structure import fields_of, leaves

HALF_DB = 30.0
"""Float16 has 11 bits: 66 dB for one rounding, and a network has hundreds."""
FLOAT_DB = 60.0
"""Float32 has 24 bits: 144 dB for one rounding."""


@dataclass(frozen=True, kw_only=True)
class OutputCheck:
    """One output of an engine at one shape.

    Attributes:
        batch: the rows of the shape.
        sequence: its tokens; None: rows are images.
        output: the name of the output.
        sqnr_db: the SQNR against the reference output, in dB; None: no difference; ``NOTHING_DB``: the reference is
            all zeros and has no power.
        float_db: the same against the float model's output.
        proxy_float_db: the SQNR of the reference output against the float model's: the error of quantization itself.
        cosine: the mean cosine of its vectors to the float model's.
        noise_float_db: the least SQNR of the reference against the float model with the noise of float sums; None: it
            was not needed.
    """

    batch: int
    sequence: int | None
    output: str
    sqnr_db: float | None
    float_db: float | None
    proxy_float_db: float | None
    cosine: float
    noise_float_db: float | None = None

    @property
    def size(self) -> str:
        """The shape in words."""
        return shape_words(self.batch, self.sequence)

    def is_no_further(self, decibels: float) -> bool:
        """Return whether the engine is at most so much further from the float model than PyTorch is."""
        return is_no_further(self.float_db, (self.proxy_float_db, self.noise_float_db), decibels)


@dataclass(frozen=True)
class Tolerance:
    """The condition on an engine's outputs.

    Attributes:
        decibels: the SQNR against the reference that is always enough, in dB.
        beyond_db: an engine also passes if it is at most this much further from the float model than the reference
            is, with the noise of float sums or without, in dB; None: it does not.
    """

    decibels: float
    beyond_db: float | None = None

    def __str__(self) -> str:
        least = f"SQNR of {self.decibels:g} dB or more"
        if self.beyond_db is None:
            return least
        return f"{least}, or at most {self.beyond_db:g} dB further from the float model than PyTorch"

    def holds(self, distance: OutputCheck) -> bool:
        """Return whether an output of an engine passes."""
        if distance.sqnr_db is None or distance.sqnr_db >= self.decibels:
            return True
        return self.beyond_db is not None and distance.is_no_further(self.beyond_db)


def far_from_float(checks: Iterable[OutputCheck]) -> float | None:
    """Return the least SQNR of outputs against the float model's, in dB; None: they are equal."""
    return min((check.float_db for check in checks if check.float_db is not None), default=None)


def shape_words(batch: int, sequence: int | None) -> str:
    """Return a shape in words: ``batch 8``, or ``batch 8 x sequence 128``."""
    return f"batch {batch}{'' if sequence is None else f' x sequence {sequence}'}"


def tolerance(asked: float | None, quantized: bool, float_dtype: torch.dtype) -> Tolerance:
    """Return the tolerance that was asked for, in dB, or the default for the engine's types."""
    if asked is not None:
        return Tolerance(asked)
    if quantized:
        return Tolerance(ALIKE_DB, FURTHER_DB)
    return Tolerance(FLOAT_DB if float_dtype == torch.float32 else HALF_DB)


_SUM = 1e-6
"""Relative error of a sum of some hundred products in float32."""


def rounds(model: nn.Module) -> bool:
    """Return whether a model is a proxy that rounds operands."""
    return bool(_rounding_sites(model))


@contextmanager
def float_noise(proxy: nn.Module, seed: int) -> Iterator[None]:
    """Multiply each result of the sites that round by 1 + e; e is normal, its deviation that of a sum's error."""
    generator = torch.Generator().manual_seed(seed)

    def add(site: Site, _: Any, result: Any) -> Any:
        # Results in place are the caller's own tensors.
        if site.source.in_place or not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        relative = _SUM if result.dtype == torch.float32 else torch.finfo(result.dtype).eps
        noise = torch.randn(result.shape, generator=generator)
        return result * (1 + relative * noise).to(result)

    hooks = [site.register_forward_hook(add) for site in _rounding_sites(proxy)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _rounding_sites(model: nn.Module) -> list[Site]:
    return [module for module in model.modules() if isinstance(module, Site) and module.active]


NOTHING_DB = -1000.0
"""The SQNR against an output of zeros: lower than any other, and a number that JSON can represent."""

_EDGE_ROWS = 16
"""Of a larger batch, so many of the first and of the last samples are compared."""
_MOST_VALUES = 2**26
"""Further batches of a shape are left out where those before have so many values: 256 MiB in float32, of each model."""
_NOISES = 8
"""How often the noise of float sums is drawn."""

Floats: TypeAlias = npt.NDArray[np.float32]
Outputs = dict[str, Floats]


class WrongEngineError(EngineError):
    """An engine computes something else than PyTorch.

    Attributes:
        found: how wrong it is and where, in few words.
        decibels: the SQNR of its worst output against PyTorch's; ``NOTHING_DB``: it holds NaN, or the engine fails.
        checks: all outputs at all shapes; none if one could not be compared.
    """

    def __init__(
        self, message: str, found: str, decibels: float = NOTHING_DB, checks: Sequence[OutputCheck] = ()
    ) -> None:
        super().__init__(message)
        self.found = found
        self.decibels = decibels
        self.checks = tuple(checks)


@dataclass(frozen=True)
class Reference:
    """PyTorch's outputs for some rows of a batch.

    Attributes:
        inputs: the whole batch.
        rows: the rows that were run: of a large batch only the first and the last ones; None: the batch as a whole.
        outputs: the outputs of these rows, by name.
        noisy: the same with the noise of float sums, a few times; there are none if the model does not round.
    """

    inputs: Batch
    rows: tuple[int, ...] | None
    outputs: Outputs
    noisy: Callable[[], Sequence[Outputs]] = tuple

    def of_rows(self, values: Any) -> Any:
        """Return those rows of an output of the whole batch that were run."""
        return values if self.rows is None else values[list(self.rows)]


def reference_outputs(
    model: nn.Module, batches: Iterable[Batch], names: Sequence[str], *, apart: bool = True
) -> list[Reference]:
    """Return a model's outputs for the first and the last rows of each batch; those in between are computed alike."""
    references = []
    values: Counter[Any] = Counter()
    for batch in batches:
        shape = _shape(batch)
        if values[shape] > _MOST_VALUES:
            continue
        count = len(next(iter(batch.values())))
        ends = tuple(sorted({*range(min(_EDGE_ROWS, count)), *range(max(0, count - _EDGE_ROWS), count)}))
        part = rows_at(batch, ends) if apart else batch
        with torch.no_grad(), untouched(model):
            result = model(**part)
        noisy = cache(partial(_noisy, model, part, names))
        references.append(Reference(batch, ends if apart else None, _by_name(result, names), noisy))
        values[shape] += sum(one.size for one in references[-1].outputs.values())
    return references


class References:
    """PyTorch's outputs for some batches, computed once for each model: several engines are made of one."""

    def __init__(self, batches: Sequence[Batch], *, apart: bool = True) -> None:
        self._batches = batches
        self._apart = apart
        self._found: dict[tuple[nn.Module, tuple[str, ...]], list[Reference]] = {}

    def of(self, model: nn.Module, names: Sequence[str]) -> list[Reference]:
        """Return the outputs of a model, named as those of its engines."""
        key = model, tuple(names)
        if key not in self._found:
            self._found[key] = reference_outputs(model, self._batches, names, apart=self._apart)
        return self._found[key]


def _noisy(model: nn.Module, batch: Batch, names: Sequence[str]) -> list[Outputs]:
    found = []
    for seed in range(_NOISES if rounds(model) else 0):
        with float_noise(model, seed), torch.no_grad(), untouched(model):
            found.append(_by_name(model(**batch), names))
    return found


def check_engine(
    engine: Engine, expected: Sequence[Reference], of_float: Sequence[Reference], bound: Tolerance
) -> list[OutputCheck]:
    """Compare an engine's outputs with the reference, except at masked tokens."""
    what = f"{engine.name} engine"
    compared = [check for check, _ in _all_compared(what, engine, expected, of_float)]
    checks = [check for check in compared if not is_cache(check.output)]
    if wrong := [check for check in compared if not bound.holds(check)]:
        worst = min(wrong, key=lambda one: NOTHING_DB if one.sqnr_db is None else one.sqnr_db)
        assert worst.sqnr_db is not None
        raise WrongEngineError(
            f"{_where(what, worst)}: SQNR {worst.sqnr_db:.1f} dB against PyTorch{_to_float(worst, bound)}; expected an "
            f"{bound}: the engine does not compute what the model computes{_elsewhere(compared, wrong)}",
            f"SQNR {worst.sqnr_db:.1f} dB at {worst.size}",
            worst.sqnr_db,
            checks,
        )
    return checks


def _elsewhere(compared: Sequence[OutputCheck], wrong: Sequence[OutputCheck]) -> str:
    """Return at which sizes an engine is wrong, and at which it is right; empty if there is one size."""
    bad = list(dict.fromkeys(check.size for check in wrong))
    good = list(dict.fromkeys(check.size for check in compared if check.size not in bad))
    if len(bad) + len(good) == 1:
        return ""
    right = f", and does at {', '.join(good)}" if good else ""
    return f" at {', '.join(bad)}{right}"


def _all_compared(
    what: str, engine: Engine | None, expected: Sequence[Reference], of_float: Sequence[Reference]
) -> Iterator[tuple[OutputCheck, Reference]]:
    """Yield the check of each output at each shape, with all batches of this shape, and a reference of it."""
    of_tokens = token_outputs(expected)
    shapes: dict[Any, list[tuple[Reference, Reference]]] = {}
    for pair in zip(expected, of_float, strict=True):
        shapes.setdefault(_shape(pair[0].inputs), []).append(pair)
    for pairs in shapes.values():
        given = [_given(what, engine, reference) for reference, _ in pairs]
        for name in pairs[0][0].outputs:
            yield _compared(what, name, [one[name] for one in given], pairs, name in of_tokens), pairs[0][0]


def _shape(batch: Batch) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(value.shape)) for name, value in batch.items())


def _given(what: str, engine: Engine | None, reference: Reference) -> Outputs:
    """Return an engine's outputs for the rows of a reference; those of the reference without one."""
    if engine is None:
        return reference.outputs
    try:
        result = as_predictor(engine)(reference.inputs)
    except EngineError as error:
        size = shape_words(*batch_shape(reference.inputs))
        found = f"it does not run at {size}"
        raise WrongEngineError(f"{what}: {found}, where PyTorch does: {error}", found) from error
    whole = _by_name(result, engine.output_names)
    return {name: reference.of_rows(whole[name]) for name in reference.outputs}


def is_cache(name: str) -> bool:
    """Return whether an output holds keys or values for the next token: dozens of those would hide the others."""
    return name.startswith(f"{PRESENT}.")


def _compared(
    what: str,
    name: str,
    values: Sequence[Floats],
    pairs: Sequence[tuple[Reference, Reference]],
    of_tokens: bool,
) -> OutputCheck:
    """Return how far the values of one output are from those of the reference, and from those of the float model.

    Args:
        what: what is compared, in words.
        name: the output.
        values: its values for each batch.
        pairs: the reference and the float model's outputs for each batch; all have one shape.
        of_tokens: whether the output has an axis of tokens.
    """
    first = pairs[0][0]

    def read(arrays: Iterable[Floats]) -> Floats:
        return np.concatenate([_read(one, pair[0], of_tokens) for one, pair in zip(arrays, pairs, strict=True)])

    right_values, float_values = ([one.outputs[name] for one in column] for column in zip(*pairs, strict=True))
    batch, sequence = batch_shape(first.inputs)
    place = f"{what}, {shape_words(batch, sequence)}, output {name!r}"
    got, right, float_right = _finite(place, read(values), read(right_values), read(float_values))
    check = OutputCheck(
        batch=batch,
        sequence=sequence,
        output=name,
        sqnr_db=_decibels(right, got),
        float_db=_decibels(float_right, got),
        proxy_float_db=_decibels(float_right, right),
        cosine=mean_cosine(float_right, got),
    )
    if Tolerance(ALIKE_DB, FURTHER_DB).holds(check):
        return check
    draws = zip(*(reference.noisy() for reference, _ in pairs), strict=True)
    noisy = (_decibels(float_right, read(one[name] for one in draw)) for draw in draws)
    return replace(check, noise_float_db=min((one for one in noisy if one is not None), default=None))


def _where(what: str, check: OutputCheck) -> str:
    return f"{what}, {check.size}, output {check.output!r}"


def output_distances(
    model: nn.Module, proxy: nn.Module, engine: Engine | None, batches: Sequence[Batch], *, apart: bool = True
) -> tuple[OutputDistance, ...]:
    """Return how far each output of an engine, or of its proxy, is from that of the float model, however far.

    Args:
        model: the float model.
        proxy: the frozen proxy.
        engine: its engine; None: it does not run here.
        batches: what all run on; those of one shape count as one.
        apart: whether each row is computed for itself; see ``reference_outputs``.
    """
    names = _names_of(model, batches[0]) if engine is None else engine.output_names
    expected, plain = (reference_outputs(one, batches, names, apart=apart) for one in (proxy, model))
    checks = [check for check, _ in _all_compared("the output", engine, expected, plain) if not is_cache(check.output)]
    return distances_of(checks, engine=engine is not None)


def distances_of(checks: Sequence[OutputCheck], *, engine: bool) -> tuple[OutputDistance, ...]:
    """Return the record of compared outputs.

    Args:
        checks: the outputs, at one shape or several.
        engine: whether they are an engine's; if not, they are its proxy's.
    """
    return tuple(
        OutputDistance(
            output=check.output,
            batch=check.batch,
            sequence=check.sequence,
            sqnr_db=check.float_db,
            cosine=check.cosine,
            proxy_sqnr_db=check.proxy_float_db,
            engine_to_proxy_db=check.sqnr_db,
            noise_sqnr_db=check.noise_float_db,
            engine=engine,
        )
        for check in checks
    )


def _names_of(model: nn.Module, batch: Batch) -> tuple[str, ...]:
    """Return names for the outputs of a model without an engine: its own, or their places."""
    with torch.no_grad(), untouched(model):
        result = model(**batch)
    fields = fields_of(result)
    if fields is not None:
        return tuple(name for name, value in fields.items() if isinstance(value, torch.Tensor))
    return tuple(f"output_{place}" for place in range(len(leaves(result))))


def _to_float(check: OutputCheck, bound: Tolerance) -> str:
    if bound.beyond_db is None or check.float_db is None or check.proxy_float_db is None:
        return ""
    noise = "" if check.noise_float_db is None else f", or {check.noise_float_db:.1f} with the noise of float sums"
    return f", and {check.float_db:.1f} dB against the float model where PyTorch has {check.proxy_float_db:.1f}{noise}"


def _finite(where: str, got: Floats, right: Floats, float_right: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the outputs with zeros in place of infinite values, on which engine and reference must agree."""
    if np.isnan(right).any() or np.isnan(float_right).any():
        raise EngineError(
            f"{where}: PyTorch's own output holds NaN, so that no engine can be held to it: is the checkpoint sound?"
        )
    infinite = np.isinf(got) | np.isinf(right)
    if np.isnan(got).any() or not np.array_equal(got[infinite], right[infinite]):
        found = "it holds NaN or infinite values where PyTorch's does not, or lacks infinite ones"
        raise WrongEngineError(f"{where}: {found}", found)
    infinite |= np.isinf(float_right)
    without = [np.where(infinite, np.float32(0), values) for values in (got, right, float_right)]
    return without[0], without[1], without[2]


def _decibels(right: Floats, got: Floats) -> float | None:
    """Return the SQNR in dB, at least ``NOTHING_DB``; None only if there is no difference."""
    found = sqnr_db(right, got)
    return None if found == math.inf else max(found, NOTHING_DB)


def token_outputs(references: Sequence[Reference]) -> set[str]:
    """Return the names of outputs with an axis of tokens, [B x S] or [B x S x ...], whose padding nobody reads.

    The axis has the length of the tokens at every shape. If all shapes have the same length, [B x S] may also be logits
    of S classes, and does not count.
    """
    lengths = {batch_shape(reference.inputs)[1] for reference in references}

    def follows(name: str) -> bool:
        there = [reference for reference in references if name in reference.outputs]
        shapes = [(reference.outputs[name].shape, batch_shape(reference.inputs)[1]) for reference in there]
        several = len(lengths) > 1 or all(len(shape) > 2 for shape, _ in shapes)
        return several and all(len(shape) > 1 and shape[1] == length for shape, length in shapes)

    return {name for name in (references[0].outputs if references else ()) if follows(name)}


def _read(values: Floats, reference: Reference, of_tokens: bool) -> Floats:
    """Return the vectors [N x D] of an output, without those of masked tokens."""
    mask = reference.inputs.get("attention_mask")
    if mask is not None and of_tokens:
        kept = reference.of_rows(mask).numpy().astype(bool)
        return np.asarray(values[kept].reshape(int(kept.sum()), -1))
    # A number for the whole batch, such as a loss, is a vector of one.
    return values.reshape(len(values), -1) if values.ndim else values.reshape(1, 1)


def _by_name(result: Any, names: Sequence[str]) -> Outputs:
    """Return the outputs as float32 arrays; outputs without names get those of the graph, in its order."""
    if isinstance(result, torch.Tensor):
        result = (result,)
    fields = fields_of(result)
    if fields is not None and any(name in fields for name in names):
        values: Mapping[str, Any] = fields
    else:
        # The exporter names the tensors of what lies in each other in this order.
        found = leaves(result if fields is None else list(fields.values()))
        values = dict(zip(names, [leaf for leaf in found if hasattr(leaf, "shape")], strict=False))
    return {name: _array(values[name]) for name in names if name in values}


def _array(value: Any) -> npt.NDArray[np.float32]:
    return np.asarray(value.detach().cpu().float() if isinstance(value, torch.Tensor) else value, dtype=np.float32)


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
) -> RightEngine:
    """Return an engine whose outputs are right at all sizes that it takes.

    A model for all sizes that is wrong is replaced by models for the sizes that are compared, if these are right.
    """
    expected, plain = (references.of(model, engine.output_names) for model in models)
    try:
        return RightEngine(engine, built, tuple(check_engine(engine, expected, plain, bound)))
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


LEAST_SAMPLES = 32
"""How many samples are compared at each size: on a few, chance decides whether an engine looks right."""

Sizes = Sequence[int]


def check_shapes(batch: Sizes, sequence: Sizes, usual: tuple[int, int]) -> list[tuple[int, int]]:
    """Return batch sizes with lengths: the usual ones first, the least and the largest of both, and two between.

    OpenVINO's file has models of its own for some sizes, and one for all others: each of them is compared.
    """
    rows, tokens = (
        [sizes[0], round(math.sqrt(sizes[0] * sizes[1])), round(math.sqrt(sizes[1] * sizes[2])), sizes[2]]
        for sizes in (batch, sequence)
    )
    # A large batch of long texts would take minutes, and has the model of the others.
    shapes = [usual, (batch[1], sequence[1]), (rows[0], tokens[3]), (rows[3], tokens[0])]
    return list(dict.fromkeys([*shapes, (rows[1] + (rows[1] == rows[0] < batch[1]), tokens[2]), (rows[2], tokens[1])]))


def checked_shapes(config: RunConfig) -> list[tuple[int, int]]:
    """Return the sizes at which the engines of a run are compared; see ``check_shapes``."""
    dynamic, report = config.export.dynamic, config.report
    shapes = check_shapes(dynamic.batch, dynamic.sequence, (report.latency_batch, report.latency_sequence))
    timed = zip(dynamic.batch, dynamic.sequence, strict=True) if report.latency_shapes == "all" else ()
    return list(dict.fromkeys([*shapes, *timed]))


def check_batches(feed: Feed, samples: Sequence[Any], shapes: Sequence[tuple[int, int]]) -> list[Batch]:
    """Return batches of ``shapes``, as many of each as have ``LEAST_SAMPLES`` samples between them.

    Args:
        feed: makes the batches.
        samples: what they are made of, without labels; the batches of a module that was given in Python.
        shapes: batch sizes with lengths. A module keeps the lengths of its own batches. No length is beyond the
            positions of the model.
    """
    if isinstance(feed, ModuleFeed):
        return list(
            _of_module(feed, list(samples) or [feed.example()], list(dict.fromkeys(size for size, _ in shapes)))
        )
    if isinstance(feed.inputs, TextInputs) and (longest := feed.inputs.max_positions) is not None:
        shapes = [(size, min(sequence, longest)) for size, sequence in shapes]
    made = []
    has_lengths = _has_lengths(feed, samples, [sequence for _, sequence in shapes])
    for size, sequence in dict.fromkeys((size, sequence if has_lengths else shapes[0][1]) for size, sequence in shapes):
        for start in range(0, LEAST_SAMPLES if samples else 1, size):
            turn = start % len(samples) if samples else 0
            made.append(feed.compared([*samples[turn:], *samples[:turn]], size, sequence))
    return made


def _has_lengths(feed: Feed, samples: Sequence[Any], lengths: Sequence[int]) -> bool:
    """Return whether the lengths of batches can be chosen: images have none."""
    one, other = (feed.inputs.filled(samples, 1, length) for length in (min(lengths), max(lengths)))
    return any(one[name].shape != other[name].shape for name in one)


def _of_module(feed: ModuleFeed, batches: Sequence[Batch], sizes: Sequence[int]) -> Iterator[Batch]:
    """Yield the rows of a module's batches: those of the shape that comes most often in ``sizes``, the usual one first.

    Those of the least and of the largest shape come in the usual size. A model that mixes rows gets its batches whole.
    """
    alike: dict[tuple[Any, ...], list[Batch]] = {}
    for batch in batches:
        alike.setdefault(tuple((name, tuple(value.shape[1:])) for name, value in batch.items()), []).append(batch)
    by_size = sorted(alike.values(), key=lambda group: sum(value[0].numel() for value in group[0].values()))
    most = max(by_size, key=len)
    for group in {id(group): group for group in (most, by_size[0], by_size[-1])}.values():
        count = _rows(group[0])
        if not (feed.samples_independent and feed.sizes.is_open(BATCH)):
            yield from group[: math.ceil(LEAST_SAMPLES / count)]
            continue
        pool = _joined(group[:LEAST_SAMPLES])
        for size in sizes if group is most else sizes[:1]:
            for start in range(0, LEAST_SAMPLES, size):
                yield rows_at(pool, [(start + row) % _rows(pool) for row in range(size)])


def _rows(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def _joined(batches: Sequence[Batch]) -> Batch:
    """Return the rows of all batches; an input that has not as many rows is that of the first."""
    return {
        name: torch.cat([one[name] for one in batches]) if len(value) == _rows(batches[0]) else value
        for name, value in batches[0].items()
    }
