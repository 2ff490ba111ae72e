"""Comparison of an engine's outputs with PyTorch, on real samples and at several sizes.

The reference for a quantized engine is the frozen proxy, which rounds like the graph; for a float engine it is the
float model. The distance from the float model shows the cost of quantization.

No engine sums in the same order as PyTorch. In a quantized model, a tiny difference of a sum may round to the next
integer, and later layers amplify it. In DINOv2, any other order of sums moves the logits as much as quantization does.
So an engine also passes if it is hardly further from the float model than the proxy, also with simulated noise of float
sums. See ``Tolerance``.

Shapes in this file: B samples, S tokens, D width.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from quantizer.proxy.build import quantizers_of
from quantizer.proxy.restored_state import untouched
from quantizer.proxy.site import Site
from quantizer.report.record import ALIKE_DB, FURTHER_DB, OutputDistance, is_no_further
from quantizer.tasks import Batch, Feed, batch_shape, rows_at
from quantizer.tasks.inputs import TextInputs
from quantizer.tasks.metrics import mean_cosine, sqnr_db
from quantizer.utils.cpu import saturates
from quantizer.utils.dimension_names import PRESENT
from quantizer.utils.sizes import BATCH
from quantizer.utils.structure import exported, fields_of, leaves

HALF_DB = 30.0
"""Minimum SQNR of float16 engines. One rounding to 11 bits has 66 dB, but a network has hundreds."""
FLOAT_DB = 60.0
"""Minimum SQNR of float32 engines. One rounding to 24 bits has 144 dB."""


@dataclass(frozen=True, kw_only=True)
class OutputCheck:
    """Comparison of one output of an engine at one size.

    Attributes:
        batch: samples per batch.
        sequence: tokens per text, or values per recording; None for images.
        output: the name of the output.
        sqnr_db: the SQNR relative to the reference output in dB. None if they are equal; ``NOTHING_DB`` if the
            reference is all zeros.
        float_db: the SQNR relative to the float model's output in dB.
        proxy_float_db: the SQNR of the reference relative to the float model in dB: the error of quantization itself.
        cosine: the mean cosine similarity to the float model's vectors.
        noise_float_db: the lowest SQNR of the reference with simulated noise of float sums, relative to the float
            model, in dB. Simulations end when they explain the engine's distance. None if none was needed.
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
        """The size in words."""
        return shape_words(self.batch, self.sequence)

    def is_no_further(self, decibels: float) -> bool:
        """Return whether the engine is at most this many dB further from the float model than PyTorch."""
        return is_no_further(self.float_db, (self.proxy_float_db, self.noise_float_db), decibels)


@dataclass(frozen=True)
class Tolerance:
    """The condition that an engine's outputs must meet.

    Attributes:
        decibels: an SQNR in dB relative to the reference that always passes.
        beyond_db: an engine also passes if it is at most this many dB further from the float model than the reference,
            with or without simulated noise of float sums. None: it does not.
    """

    decibels: float
    beyond_db: float | None = None

    def __str__(self) -> str:
        minimum = f"SQNR of {self.decibels:g} dB or more"
        if self.beyond_db is None:
            return minimum
        return f"{minimum}, or at most {self.beyond_db:g} dB further from the float model than PyTorch"

    def holds(self, distance: OutputCheck) -> bool:
        """Return whether an output passes."""
        if distance.sqnr_db is None or distance.sqnr_db >= self.decibels:
            return True
        return self.beyond_db is not None and distance.is_no_further(self.beyond_db)


def far_from_float(checks: Iterable[OutputCheck]) -> float | None:
    """Return the lowest SQNR of outputs relative to the float model in dB; None if all are equal."""
    return min((check.float_db for check in checks if check.float_db is not None), default=None)


def shape_words(batch: int, sequence: int | None) -> str:
    """Return a size in words: ``batch 8``, or ``batch 8 x sequence 128``."""
    return f"batch {batch}{'' if sequence is None else f' x sequence {sequence}'}"


def tolerance(minimum_db: float | None, quantized: bool, float_dtype: torch.dtype) -> Tolerance:
    """Return the tolerance with the configured SQNR in dB, or the default for the types of the engine."""
    if minimum_db is not None:
        return Tolerance(minimum_db)
    if quantized:
        return Tolerance(ALIKE_DB, FURTHER_DB)
    return Tolerance(FLOAT_DB if float_dtype == torch.float32 else HALF_DB)


_SUM = 1e-6
"""Relative error of a float32 sum of a few hundred terms."""


def rounds(model: nn.Module) -> bool:
    """Return whether a model is a proxy with active quantizers."""
    return bool(_rounding_sites(model))


@contextmanager
def float_noise(proxy: nn.Module, seed: int) -> Iterator[None]:
    """Simulate the rounding error of float sums: multiply the result of each quantized site by 1 + e, e normal."""
    generator = torch.Generator().manual_seed(seed)

    def add(site: Site, _: Any, result: Any) -> Any:
        # In-place results are the caller's own tensors.
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
"""SQNR in dB relative to an output of zeros: lower than any real value, and valid JSON."""

_EDGE_ROWS, _FEWEST_EDGE_ROWS = 16, 2
"""Largest and smallest number of first and of last samples that are compared in a larger batch."""
_EDGE_TOKENS = 2**11
"""Number of tokens of these samples, which limits them in long batches, because PyTorch takes seconds for each."""
_MOST_VALUES = 2**26
"""Maximum number of output values per size; further batches are skipped. Equals 256 MiB per model in float32."""
_NOISES = 8
"""Maximum number of simulations of float noise."""

Floats: TypeAlias = npt.NDArray[np.float32]
Outputs = dict[str, Floats]


class WrongEngineError(EngineError):
    """The outputs of an engine differ too much from PyTorch.

    Attributes:
        found: a short description of the error and its size.
        decibels: the SQNR of the worst output relative to PyTorch in dB; ``NOTHING_DB`` for NaN or a failing engine.
        checks: all comparisons; empty if an output could not be compared.
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
    """PyTorch's outputs for some samples of a batch.

    Attributes:
        inputs: the full batch.
        rows: indices of the samples that ran; None for the full batch. Of a large batch, only the first and last run.
        outputs: the outputs of these samples, by name.
        noisy: the outputs with simulated noise of float sums, several times, computed when they are iterated; empty if
            the model does not round.
    """

    inputs: Batch
    rows: tuple[int, ...] | None
    outputs: Outputs
    noisy: Iterable[Outputs] = ()

    def of_rows(self, values: Any) -> Any:
        """Select the samples that ran from an output of the full batch."""
        return values if self.rows is None else values[list(self.rows)]


def reference_outputs(
    model: nn.Module,
    batches: Iterable[Batch],
    names: Sequence[str],
    *,
    apart: bool = True,
    simulation: nn.Module | None = None,
) -> list[Reference]:
    """Return a model's outputs for the first and last samples of each batch; the engine computes the others alike.

    Samples that do not influence each other (``apart``) run once, also if batches of other sizes contain them. Dynamic
    ranges depend on all samples of a batch, so that every batch runs then. ``simulation`` simulates the rounding of a
    model with integer kernels, which take no noise.
    """
    references = []
    values: Counter[Any] = Counter()
    known: dict[bytes, tuple[Outputs, int]] = {}
    is_shared = apart and not any(quantizer.dynamic for quantizer in quantizers_of(model))
    for batch in batches:
        shape = _shape(batch)
        if values[shape] > _MOST_VALUES:
            continue
        count, tokens = batch_shape(batch)
        edge = max(_FEWEST_EDGE_ROWS, min(_EDGE_ROWS, _EDGE_TOKENS // (tokens or 1)))
        ends = tuple(sorted({*range(min(edge, count)), *range(max(0, count - edge), count)}))
        part = rows_at(batch, ends) if apart else batch
        samples = [_digest(part, row) for row in range(len(ends))] if is_shared else []
        # A model may treat a sample alone differently, so that the first one runs.
        if samples and all(sample in known for sample in samples) and (len(samples) > 1 or shape in values):
            outputs = _stacked([known[sample] for sample in samples])
        else:
            with torch.no_grad(), untouched(model):
                outputs = _by_name(model(**part), names)
            if all(value.ndim and len(value) == len(samples) for value in outputs.values()):
                known |= {sample: (outputs, row) for row, sample in enumerate(samples) if sample not in known}
        noisy = _Noisy(model if simulation is None else simulation, part, names)
        references.append(Reference(batch, ends if apart else None, outputs, noisy))
        values[shape] += sum(item.size for item in outputs.values())
    return references


def _digest(batch: Batch, row: int) -> bytes:
    """Return a checksum of one sample of a batch."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in rows_at(batch, [row]).items():
        array = value.detach().cpu().contiguous()
        digest.update(f"{name} {array.dtype} {tuple(array.shape)} ".encode())
        digest.update(array.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()


def _stacked(samples: Sequence[tuple[Outputs, int]]) -> Outputs:
    """Return the outputs of samples that ran in other batches, given as (outputs, row), as those of one batch."""
    return {name: np.stack([outputs[name][row] for outputs, row in samples]) for name in samples[0][0]}


class References:
    """PyTorch's outputs for some batches, cached by model, because several engines use them."""

    def __init__(self, batches: Sequence[Batch], *, apart: bool = True) -> None:
        self._batches = batches
        self._apart = apart
        self._found: dict[tuple[nn.Module, tuple[str, ...]], list[Reference]] = {}

    def of_one(self, model: nn.Module) -> References:
        """Return references on the same batches that keep the known outputs of one model only, to free the others."""
        other = References(self._batches, apart=self._apart)
        other._found = {key: found for key, found in self._found.items() if key[0] is model}
        return other

    def of(self, model: nn.Module, names: Sequence[str], simulation: nn.Module | None = None) -> list[Reference]:
        """Return the outputs of a model, with the output names of its engines; see ``reference_outputs``."""
        key = model, tuple(names)
        if key not in self._found:
            self._found[key] = reference_outputs(model, self._batches, names, apart=self._apart, simulation=simulation)
        return self._found[key]


def first_of_sizes(references: Iterable[Reference]) -> list[Reference]:
    """Return one reference of each size."""
    found: dict[Any, Reference] = {}
    for reference in references:
        found.setdefault(_shape(reference.inputs), reference)
    return list(found.values())


class _Noisy:
    """A model's outputs for a batch with simulated noise of float sums; each simulation runs once, when it is needed.

    Args:
        model: the model; nothing is simulated if it does not round.
        batch: the batch.
        names: the names of the outputs.
    """

    def __init__(self, model: nn.Module, batch: Batch, names: Sequence[str]) -> None:
        self._model = model
        self._batch = batch
        self._names = names
        self._draws: list[Outputs] = []

    def __iter__(self) -> Iterator[Outputs]:
        for seed in range(_NOISES if rounds(self._model) else 0):
            if seed == len(self._draws):
                with float_noise(self._model, seed), torch.no_grad(), untouched(self._model):
                    self._draws.append(_by_name(self._model(**self._batch), self._names))
            yield self._draws[seed]


def check_engine(
    engine: Engine, expected: Sequence[Reference], of_float: Sequence[Reference], bound: Tolerance
) -> list[OutputCheck]:
    """Compare the outputs of an engine with the reference, ignoring masked tokens; raise if any is out of tolerance."""
    what = f"{engine.name} engine"
    compared = [check for check, _ in _all_compared(what, engine, expected, of_float)]
    checks = [check for check in compared if not is_cache(check.output)]
    if wrong := [check for check in compared if not bound.holds(check)]:
        worst = min(wrong, key=lambda item: NOTHING_DB if item.sqnr_db is None else item.sqnr_db)
        assert worst.sqnr_db is not None
        raise WrongEngineError(
            f"{_place(what, worst)}: SQNR {worst.sqnr_db:.1f} dB against PyTorch{_to_float(worst, bound)}; expected an "
            f"{bound}: the engine does not compute the same as the model{_elsewhere(compared, wrong)}",
            f"SQNR {worst.sqnr_db:.1f} dB at {worst.size}",
            worst.sqnr_db,
            checks,
        )
    return checks


def _elsewhere(compared: Sequence[OutputCheck], wrong: Sequence[OutputCheck]) -> str:
    """Return words on the wrong and the correct sizes; empty if there is only one size."""
    bad = list(dict.fromkeys(check.size for check in wrong))
    good = list(dict.fromkeys(check.size for check in compared if check.size not in bad))
    if len(bad) + len(good) == 1:
        return ""
    right = f", but does at {', '.join(good)}" if good else ""
    return f" at {', '.join(bad)}{right}"


def _all_compared(
    what: str, engine: Engine | None, expected: Sequence[Reference], of_float: Sequence[Reference]
) -> Iterator[tuple[OutputCheck, Reference]]:
    """Yield the check of each output at each size, over all batches of the size, with a reference."""
    of_tokens = token_outputs(expected)
    shapes: dict[Any, list[tuple[Reference, Reference]]] = {}
    for pair in zip(expected, of_float, strict=True):
        shapes.setdefault(_shape(pair[0].inputs), []).append(pair)
    for pairs in shapes.values():
        outputs = [_engine_outputs(what, engine, reference) for reference, _ in pairs]
        for name in pairs[0][0].outputs:
            yield (
                _compared(what, name, [batch_outputs[name] for batch_outputs in outputs], pairs, name in of_tokens),
                pairs[0][0],
            )


def _shape(batch: Batch) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(value.shape)) for name, value in batch.items())


def _engine_outputs(what: str, engine: Engine | None, reference: Reference) -> Outputs:
    """Return the outputs of an engine for the samples of a reference; without an engine, the reference's outputs."""
    if engine is None:
        return reference.outputs
    try:
        result = as_predictor(engine)(reference.inputs)
    except EngineError as error:
        size = shape_words(*batch_shape(reference.inputs))
        problem = f"it does not run at {size}"
        raise WrongEngineError(f"{what}: {problem}, but PyTorch does: {error}", problem) from error
    outputs = _by_name(result, engine.output_names)
    return {name: reference.of_rows(outputs[name]) for name in reference.outputs}


def is_cache(name: str) -> bool:
    """Return whether an output is a key or value cache; reports omit them, because there are dozens."""
    return name.startswith(f"{PRESENT}.")


def _compared(
    what: str,
    name: str,
    values: Sequence[Floats],
    pairs: Sequence[tuple[Reference, Reference]],
    of_tokens: bool,
) -> OutputCheck:
    """Return the distance of an output from the reference and from the float model.

    Args:
        what: the compared engine, in words.
        name: the output.
        values: the engine's values for each batch.
        pairs: the reference and the float model's outputs for each batch, all of one size.
        of_tokens: the output has an axis of tokens.
    """
    first = pairs[0][0]

    def read(arrays: Iterable[Floats]) -> Floats:
        return np.concatenate([_read(value, pair[0], of_tokens) for value, pair in zip(arrays, pairs, strict=True)])

    right_values, float_values = ([value.outputs[name] for value in column] for column in zip(*pairs, strict=True))
    batch, sequence = batch_shape(first.inputs)
    place = f"{what}, {shape_words(batch, sequence)}, output {name!r}"
    actual, expected, float_expected = _finite(place, read(values), read(right_values), read(float_values))
    check = OutputCheck(
        batch=batch,
        sequence=sequence,
        output=name,
        sqnr_db=_decibels(expected, actual),
        float_db=_decibels(float_expected, actual),
        proxy_float_db=_decibels(float_expected, expected),
        cosine=mean_cosine(float_expected, actual),
    )
    draws = zip(*(reference.noisy for reference, _ in pairs), strict=True)
    while not Tolerance(ALIKE_DB, FURTHER_DB).holds(check) and (draw := next(draws, None)) is not None:
        noisy = _decibels(float_expected, read(value[name] for value in draw))
        lowest = min((value for value in (check.noise_float_db, noisy) if value is not None), default=None)
        check = replace(check, noise_float_db=lowest)
    return check


def _place(what: str, check: OutputCheck) -> str:
    return f"{what}, {check.size}, output {check.output!r}"


def output_distances(
    model: nn.Module, proxy: nn.Module, engine: Engine | None, batches: Sequence[Batch], *, apart: bool = True
) -> tuple[OutputDistance, ...]:
    """Return the distance of each output of an engine, or of its proxy, from the float model.

    Args:
        model: the float model.
        proxy: the frozen proxy.
        engine: the engine; None if it does not run on this machine.
        batches: the batches; all batches of one size are compared as one.
        apart: samples do not influence each other; see ``reference_outputs``.
    """
    names = _names_of(model, batches[0]) if engine is None else engine.output_names
    expected, plain = (reference_outputs(item, batches, names, apart=apart) for item in (proxy, model))
    checks = [check for check, _ in _all_compared("the output", engine, expected, plain) if not is_cache(check.output)]
    return distances_of(checks, engine=engine is not None)


def distances_of(checks: Sequence[OutputCheck], *, engine: bool) -> tuple[OutputDistance, ...]:
    """Return output checks as report records.

    Args:
        checks: the checks, at one size or several.
        engine: they compare an engine; otherwise its proxy.
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
    """Return the output names of a model without an engine: field names, or numbers."""
    with torch.no_grad(), untouched(model):
        result = exported(model, model(**batch))
    fields = fields_of(result)
    if fields is not None:
        return tuple(name for name, value in fields.items() if isinstance(value, torch.Tensor))
    return tuple(f"output_{place}" for place in range(len(leaves(result))))


def _to_float(check: OutputCheck, bound: Tolerance) -> str:
    if bound.beyond_db is None or check.float_db is None or check.proxy_float_db is None:
        return ""
    noise = "" if check.noise_float_db is None else f", or {check.noise_float_db:.1f} dB with the noise of float sums"
    return f", and {check.float_db:.1f} dB against the float model; PyTorch has {check.proxy_float_db:.1f} dB{noise}"


def _finite(where: str, actual: Floats, expected: Floats, float_expected: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the outputs with infinite values replaced by zeros; engine and reference must agree on them."""
    if np.isnan(expected).any() or np.isnan(float_expected).any():
        raise EngineError(
            f"{where}: PyTorch's own output contains NaN, so that no engine can be compared; check the checkpoint"
        )
    infinite = np.isinf(actual) | np.isinf(expected)
    if np.isnan(actual).any() or not np.array_equal(actual[infinite], expected[infinite]):
        problem = "its NaN or infinite values differ from PyTorch's"
        raise WrongEngineError(f"{where}: {problem}", problem)
    infinite |= np.isinf(float_expected)
    finite = [np.where(infinite, np.float32(0), values) for values in (actual, expected, float_expected)]
    return finite[0], finite[1], finite[2]


def _decibels(expected: Floats, actual: Floats) -> float | None:
    """Return the SQNR in dB, at least ``NOTHING_DB``; None if both are equal."""
    sqnr = sqnr_db(expected, actual)
    return None if sqnr == math.inf else max(sqnr, NOTHING_DB)


def token_outputs(references: Sequence[Reference]) -> set[str]:
    """Return the names of outputs with an axis of tokens, [B x S] or [B x S x ...], whose padding must be ignored.

    The length of the axis equals the number of tokens at every size. If all sizes have the same number of tokens, [B x
    S] does not count, because it may be logits of S classes.
    """
    lengths = {batch_shape(reference.inputs)[1] for reference in references}

    def follows(name: str) -> bool:
        with_output = [reference for reference in references if name in reference.outputs]
        shapes = [(reference.outputs[name].shape, batch_shape(reference.inputs)[1]) for reference in with_output]
        several = len(lengths) > 1 or all(len(shape) > 2 for shape, _ in shapes)
        return several and all(len(shape) > 1 and shape[1] == length for shape, length in shapes)

    return {name for name in (references[0].outputs if references else ()) if follows(name)}


def _read(values: Floats, reference: Reference, of_tokens: bool) -> Floats:
    """Return the vectors [N x D] of an output without masked tokens."""
    mask = reference.inputs.get("attention_mask")
    if mask is not None and of_tokens:
        unmasked = reference.of_rows(mask).numpy().astype(bool)
        return np.asarray(values[unmasked].reshape(int(unmasked.sum()), -1))
    # One number for the full batch, such as a loss, is a vector of length 1.
    return values.reshape(len(values), -1) if values.ndim else values.reshape(1, 1)


def _by_name(result: Any, names: Sequence[str]) -> Outputs:
    """Return outputs as float32 arrays by name; unnamed outputs get the names of the graph, in order."""
    if isinstance(result, torch.Tensor):
        result = (result,)
    fields = fields_of(result)
    if fields is not None and any(name in fields for name in names):
        values: Mapping[str, Any] = fields
    else:
        # The exporter names the tensors of nested outputs in this order.
        tensors = leaves(result if fields is None else list(fields.values()))
        values = dict(zip(names, [leaf for leaf in tensors if hasattr(leaf, "shape")], strict=False))
    return {name: _array(values[name]) for name in names if name in values}


def _array(value: Any) -> npt.NDArray[np.float32]:
    return np.asarray(value.detach().cpu().float() if isinstance(value, torch.Tensor) else value, dtype=np.float32)


OnlySizes: TypeAlias = tuple[Mapping[str, int], ...]
"""Sizes of dynamic dimensions by name, each with a fixed-shape model; see ``BuildOptions.only_sizes``."""


@dataclass(frozen=True)
class RightEngine:
    """An engine that passed the output comparison.

    Attributes:
        engine: the engine.
        built: its file.
        checks: the comparisons of its outputs.
        only_sizes: the sizes that it accepts; empty for all.
        note: a sentence on these sizes and the reason; None for all.
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
    """Return an engine with correct outputs at all sizes that it accepts.

    If the dynamic-shape engine is wrong, ``rebuild`` builds fixed-shape engines for the compared sizes.
    """
    expected, plain = (references.of(model, engine.output_names) for model in models)
    try:
        return RightEngine(engine, built, tuple(check_engine(engine, expected, plain, bound)))
    except WrongEngineError as wrong:
        only = _sizes_alone(engine, [item.inputs for item in expected], built)
        if rebuild is None or not only:
            raise
        try:
            built, alone = rebuild(only)
            pairs = [pair for pair in zip(expected, plain, strict=True) if takes(engine, only, pair[0].inputs)]
            checks = check_engine(alone, [item for item, _ in pairs], [other for _, other in pairs], bound)
        except EngineError:
            raise wrong from None
        note = (
            f"only {_words(only)}, with a model for each: {engine.name}'s model for all sizes is wrong ({wrong.found})"
        )
        return RightEngine(alone, built, tuple(checks), only, note)


def _words(only_sizes: OnlySizes) -> str:
    """Return sizes in words: ``batch 1, 4 or 8``, ``batch 1 x sequence 16 or batch 8 x sequence 128``."""
    first, *others = sorted(" x ".join(f"{name} {size}" for name, size in item.items()) for item in only_sizes)
    if len(only_sizes[0]) == 1:
        ((name, _),) = only_sizes[0].items()
        first, *others = [str(size) for size in sorted(item[name] for item in only_sizes)]
        first = f"{name} {first}"
    return f"{', '.join([first, *others[:-1]])} or {others[-1]}" if others else first


def takes(engine: Engine, only_sizes: OnlySizes, batch: Batch) -> bool:
    """Return whether an engine for these sizes accepts a batch."""
    return not only_sizes or _sizes(engine, batch) in only_sizes


def refusal(why: str, backend: str) -> str:
    """Return the error message for a rejected engine of a backend."""
    exact = profile(backend).exact_variant if saturates() else None
    if exact is None:
        use = "another backend (`auto` chooses the fastest correct engine)"
    else:
        use = f"the backend {exact}, because this CPU has no VNNI, so that INT8 products saturate on {backend}"
    return f"the engine is refused: {why}. Use {use}, or keep the layers in float that it computes wrongly (`exclude`)"


def _sizes_alone(engine: Engine, batches: Sequence[Batch], built: BuildResult) -> OnlySizes:
    """Return the sizes for fixed-shape engines; empty if the backend has none.

    Each one holds a copy of the weights, so that a large model gets fewer.
    """
    if not profile(engine.name).fixed_sizes:
        return ()
    distinct: list[Mapping[str, int]] = []
    for batch in batches:
        sizes = _sizes(engine, batch)
        if sizes is None:
            return ()
        distinct += [] if sizes in distinct else [sizes]
    return tuple(distinct[: 1 + MOST_COPIED_BYTES // max(built.size_bytes, 1)])


def _sizes(engine: Engine, batch: Batch) -> dict[str, int] | None:
    """Return the size of each dynamic dimension in a batch by name; None without any, or with an unnamed dimension."""
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
"""Minimum number of samples per size; with fewer, chance decides the result. See ``_least`` for large samples."""

_LARGE_SAMPLE, _MANY_TOKENS = 2**14, 2**8
"""Input values of a large sample, such as an image of 128 x 128, and tokens of a long text."""

Sizes = Sequence[int]


def check_shapes(batch: Sizes, sequence: Sizes, usual: tuple[int, int]) -> list[tuple[int, int]]:
    """Return (batch, sequence) sizes to compare: the usual size first, then the extremes and two sizes between.

    OpenVINO's file has fixed-shape models for some sizes and a dynamic one for others; all of them must be compared.
    """
    rows, tokens = (
        [sizes[0], round(math.sqrt(sizes[0] * sizes[1])), round(math.sqrt(sizes[1] * sizes[2])), sizes[2]]
        for sizes in (batch, sequence)
    )
    # A large batch of long texts would take minutes, and runs in the same dynamic-shape model.
    shapes = [usual, (batch[1], sequence[1]), (rows[0], tokens[3]), (rows[3], tokens[0])]
    return list(dict.fromkeys([*shapes, (rows[1] + (rows[1] == rows[0] < batch[1]), tokens[2]), (rows[2], tokens[1])]))


def checked_shapes(config: RunConfig) -> list[tuple[int, int]]:
    """Return the sizes at which the engines of a run are compared; see ``check_shapes``."""
    dynamic, report = config.export.dynamic, config.report
    shapes = check_shapes(dynamic.batch, dynamic.sequence, (report.latency_batch, report.latency_sequence))
    timed = zip(dynamic.batch, dynamic.sequence, strict=True) if report.latency_shapes == "all" else ()
    return list(dict.fromkeys([*shapes, *timed]))


def check_batches(feed: Feed, samples: Sequence[Any], shapes: Sequence[tuple[int, int]]) -> list[Batch]:
    """Return batches of each size, with at least ``LEAST_SAMPLES`` samples per size; see ``_least``.

    Args:
        feed: makes the batches.
        samples: unlabelled samples; for a Python module, its batches.
        shapes: (batch, sequence) sizes. A module keeps the lengths of its own batches. Lengths are limited to the
            positions of the model.
    """
    if isinstance(feed, ModuleFeed):
        return list(
            _of_module(feed, list(samples) or [feed.example()], list(dict.fromkeys(size for size, _ in shapes)))
        )
    if isinstance(feed.inputs, TextInputs) and (longest := feed.inputs.max_positions) is not None:
        shapes = [(size, min(sequence, longest)) for size, sequence in shapes]
    result: list[Batch] = []
    has_lengths = _has_lengths(feed, samples, [sequence for _, sequence in shapes])
    for size, sequence in dict.fromkeys((size, sequence if has_lengths else shapes[0][1]) for size, sequence in shapes):
        least = _least(result, sequence if has_lengths else 0) if samples else 1
        for start in range(0, least, size):
            turn = start % len(samples) if samples else 0
            result.append(feed.compared([*samples[turn:], *samples[:turn]], size, sequence))
    return result


def _least(before: Sequence[Batch], tokens: int = 0) -> int:
    """Return the number of samples to compare at one more size: half as many large ones, such as images.

    The first size is compared in full. Others show whether kernels for other sizes compute the same.
    """
    if not before:
        return LEAST_SAMPLES
    values = sum(value.numel() for value in before[0].values()) / _rows(before[0])
    return LEAST_SAMPLES // 2 if values >= _LARGE_SAMPLE or tokens >= _MANY_TOKENS else LEAST_SAMPLES


def _has_lengths(feed: Feed, samples: Sequence[Any], lengths: Sequence[int]) -> bool:
    """Return whether batches have a variable length; images do not."""
    item, other = (feed.inputs.filled(samples, 1, length) for length in (min(lengths), max(lengths)))
    return any(item[name].shape != other[name].shape for name in item)


def _of_module(feed: ModuleFeed, batches: Sequence[Batch], sizes: Sequence[int]) -> Iterator[Batch]:
    """Yield batches of a module's most frequent shape in ``sizes``, and of its smallest and largest shape in the first
    size.

    A model that mixes samples gets its batches unchanged.
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
        for place, size in enumerate(sizes if group is most else sizes[:1]):
            for start in range(0, _least([pool] if place else []), size):
                yield rows_at(pool, [(start + row) % _rows(pool) for row in range(size)])


def _rows(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def _joined(batches: Sequence[Batch]) -> Batch:
    """Return the samples of all batches as one; an input without a batch axis comes from the first batch."""
    return {
        name: torch.cat([item[name] for item in batches]) if len(value) == _rows(batches[0]) else value
        for name, value in batches[0].items()
    }
