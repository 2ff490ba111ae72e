"""A calibration session: the proxy that observes a model, and the plan from the statistics of all processes."""

from __future__ import annotations

import logging
import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from quantizer import __version__
from quantizer.algorithms.algorithm import Proxied, Work, algorithms, proxied_copy
from quantizer.algorithms.bias_correction import BiasCorrection
from quantizer.algorithms.make_plan import make_observation, make_plan, needs_batches, replays_batches
from quantizer.algorithms.replay import other_attention_error
from quantizer.algorithms.settings import Settings
from quantizer.algorithms.smoothquant import fit_migrations
from quantizer.errors import CalibrationError
from quantizer.observe.completeness import CountedProduct
from quantizer.observe.float16_modules import Float32Modules
from quantizer.observe.observation import Observation
from quantizer.observe.replay_batches import Batch, DealtBatches, ReplayBatches, batch_hash, in_types
from quantizer.observe.snapshot import restored, snapshot
from quantizer.observe.statistics import Seen
from quantizer.plan.site_plan import Plan
from quantizer.proxy.build import source_diff
from quantizer.proxy.model_sharing import LocalHook, OwnBuffers
from quantizer.proxy.weight import named_tensors
from quantizer.utils.batches import arguments, copied, doubts_of_batch, warn_user
from quantizer.utils.content import content_digest
from quantizer.utils.distributed import all_gather_bytes, get_rank, get_world_size
from quantizer.utils.files import NO_STORE, Store
from quantizer.utils.fingerprint import Fingerprint, changed_types, tensor_version, warn_of_other_weights
from quantizer.utils.sizes import input_shapes
from quantizer.utils.torch_modes import as_ordinary

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Decided:
    """A plan with its statistics, and torch's version counters of its ranges and scales.

    ``corrected`` caches the plan with biases corrected while some groups are in float, by these groups.
    """

    seen: Seen
    batches: int
    plan: Plan
    versions: tuple[int, ...]
    corrected: dict[frozenset[str], Plan] = field(default_factory=dict)

    @classmethod
    def of(cls, seen: Seen, plan: Plan) -> _Decided:
        return cls(seen, seen.batches, plan, _versions(plan))

    def is_of(self, seen: Seen) -> bool:
        return self.seen is seen and self.batches == seen.batches


_SHOWN = 3
"""The number of operands that a warning names."""

_STATISTICS = ("statistics",)
"""The key of the statistics in a store."""

Tell = Callable[[str], None]
"""A callback with a line for the user."""


class CalibrationSession:
    """The statistics of all batches that went through ``proxy``, and the plan from them.

    Under ``torch.distributed`` every rank calibrates on its own data. The first call that needs the result gathers the
    statistics of all ranks, so every rank must make it. They are gathered again after ``resume()``, and after more data
    on every rank. Each rank then has the plan that one process would make from all data.

    Attributes:
        proxy: the proxy, which returns float outputs and observes.
        weights: the cached scales of weights.
        fingerprint: the checksum of the weights in calibration; None before the first batch.
    """

    def __init__(
        self,
        settings: Settings,
        model: nn.Module,
        earlier: bytes | None = None,
        *,
        anew: bool = False,
        kept: ReplayBatches | None = None,
        fingerprint: Fingerprint | None = None,
    ) -> None:
        """
        Args:
            settings: the settings of the quantizer.
            model: the float model.
            earlier: the statistics to continue from, as ``seen`` returns them.
            anew: whether to repeat choices made by running batches, for another target or other parameters.
            kept: the batches for these choices; without any, the former choices remain if possible.
            fingerprint: the checksum of the weights with which ``earlier`` was observed.

        Raises:
            ConfigError: a rule matches nothing in the model.
            CalibrationError: ``earlier`` belongs to another model.
        """
        self._proxied = proxied_copy(settings, model)
        self.proxy, self.weights = self._proxied.module, self._proxied.weights
        self._model = weakref.ref(model)
        self.fingerprint = fingerprint
        self._weights_noted = False
        self._pending: Fingerprint | None = None
        self._first: Batch | None = None
        self.proxy.register_forward_pre_hook(LocalHook(self._look_at_first), with_kwargs=True)
        self.proxy.register_forward_hook(LocalHook(self._note_weights))
        self._observation = make_observation(self._proxied)
        # Every rank read the same folder, whose statistics must count once.
        if earlier is not None and get_rank() == 0:
            self._observation.seen.add(_restored(earlier, self.proxy, self._observation))
        if anew:
            self._choose_anew(kept)
            self._observation.seen.separate_groups()
        self._began_with = self._observation.seen.batches
        # The model may be trained between batches: the proxy copies its current buffers.
        self._buffers = OwnBuffers(self.proxy, model)
        self._observation.attach(self.proxy, self._buffers.refresh)
        self._store = NO_STORE
        self._gathered: tuple[int, Seen] | None = None
        self._decided: _Decided | None = None
        self._warned = False
        self._warned_constants: set[str] = set()

    def _choose_anew(self, kept: ReplayBatches | None) -> None:
        statistics, settings = self._observation.seen, self._proxied.settings
        # This rank's part may be empty although that of another is not.
        has_batches = kept is not None and kept.everywhere > 0
        if kept is not None and has_batches:
            statistics.kept = kept.copy()
        if has_batches or needs_batches(settings) or not replays_batches(settings):
            statistics.forget_choices()
            return
        logger.warning(
            "ranges are not chosen again for %s because a saved folder has no batches; the saved choice is used",
            settings.backend,
        )
        fit_migrations(statistics, settings.target.torch_dtype)

    def dealt(self) -> DealtBatches:
        """Return the object that distributes batches which all ranks receive alike."""
        return DealtBatches(lambda: self._observation.seen.kept)

    def restore_from(self, cache: Store, batches: Sequence[Any], tell: Tell | None) -> bool:
        """Take the statistics of earlier passes of all batches from a store; return False if it has none.

        From now on, the choices of all plans of this calibration are read from the store and written to it, also those
        of other backends.
        """
        self._store = cache.under(*self._key(batches))
        seen = self._observation.seen
        if seen.kept is not None:
            seen.kept.known = replace(seen.kept.known, store=self._store)
        if not batches or (statistics := self._store.find_bytes(_STATISTICS)) is None:
            return False
        if tell is not None:
            plans = self._store.count - 1
            tell(f"calibration, {plans} plan{'' if plans == 1 else 's'}")
        seen.add(_restored(statistics, self.proxy, self._observation))
        calls = [arguments(as_ordinary(batch)) for batch in batches]
        if (kept := seen.kept) is not None:
            for call in calls:
                if (new_batch := kept.wanted(*call)) is not None:
                    kept.keep(*new_batch)
        args, keywords = calls[0]
        seen.inputs = seen.inputs or (input_shapes(self.proxy.forward, args, keywords),)
        self._first = copied(args, keywords)
        self.fingerprint, self._weights_noted = Fingerprint.of(self.proxy), True
        warn_user(doubts_of_batch(batches[0]))
        return True

    def store_statistics(self) -> None:
        """Write the statistics to the store of ``restore_from``, if it was called."""
        if self.has_begun and self._store.folder is not None:
            self._store.put_bytes(_STATISTICS, self.seen())

    def _key(self, batches: Sequence[Any]) -> list[object]:
        """Return all that statistics and plans depend on: versions, settings, weights, code and batches."""
        settings, model = self._proxied.settings, self._model()
        assert model is not None
        added = [(name, algorithms[name]) for name in algorithms]
        code = content_digest(model, type(settings.make_calibrator()), added)
        # The rewriting of the source also depends on registered operations and patches.
        changes = source_diff(model)
        hashes = [batch_hash(arguments(as_ordinary(batch))).hex() for batch in batches]
        return ["calibration", __version__, torch.__version__, settings.text, code, changes, *hashes]

    @property
    def has_new(self) -> bool:
        """True if this or another rank may have new batches since the session began."""
        return get_world_size() > 1 or self._observation.seen.batches > self._began_with

    @property
    def has_any(self) -> bool:
        """True if any rank has statistics, of this or of the earlier calibration."""
        return self.observation().batches > 0

    @property
    def has_begun(self) -> bool:
        """True if this process has statistics; needs no communication between ranks."""
        return self._gathered is not None or self._observation.seen.batches > 0

    def resume(self) -> None:
        """Prepare for more data, on one rank or on all of them."""
        self._gathered = None
        self._weights_noted = False

    def has_weights_of(self, model: nn.Module) -> bool:
        now = dict(model.named_parameters(remove_duplicate=False))
        mine = self.proxy.named_parameters(remove_duplicate=False)
        return all(now.get(path) is parameter for path, parameter in mine)

    def _look_at_first(self, proxy: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Store a copy of the first batch and the checksum of the weights, which costs a pass over them."""
        if not self._weights_noted:
            self._pending, self._first = Fingerprint.of(proxy), copied(args, keywords)

    def _note_weights(self, proxy: nn.Module, args: Any, result: Any) -> None:
        """Store the checksum of the weights after a complete batch, and warn if it changed."""
        if self._pending is None:
            return
        now, self._pending, self._weights_noted = self._pending, None, True
        if self.fingerprint is not None:
            warn_of_other_weights(self.fingerprint, now)
        self.fingerprint = now

    def _compare_attention(self) -> None:
        """Warn if the model's own attention computes another function; pause the observation first."""
        (batch, self._first), model = (self._first, None), self._model()
        if batch is None or model is None:
            return
        error = other_attention_error(model, self.proxy, batch)
        if error is not None:
            decibels = -10 * math.log10(error)
            warnings.warn(
                f"{type(model).__name__} gives other outputs with eager attention than with its configured attention "
                f"(SQNR {decibels:.1f} dB on the first batch), because one of them ignores a mask. Quantization uses "
                "eager attention; check the outputs after set_attn_implementation('eager'), and report a wrong mask to "
                "the authors of the model",
                stacklevel=4,
            )

    def _renew_weights(self, statistics: Seen) -> None:
        """Update the recorded weights if parameters of the model were replaced."""
        model = self._model()
        if model is None:
            return
        now = named_tensors(model)
        for path, record in statistics.records.items():
            for operand in record.operands.values():
                known = operand.weight
                if known is None or all(now.get(n) is p for n, p in zip(known.paths, known.parameters, strict=False)):
                    continue
                for name, former in zip(known.paths, known.parameters, strict=True):
                    tensor = now.get(name)
                    if tensor is None or tensor.shape != former.shape:
                        raise CalibrationError(
                            f"the model changed since its calibration: {name} of {path} had the shape "
                            f"{list(former.shape)}, and "
                            + ("is missing" if tensor is None else f"has {list(tensor.shape)} now")
                            + "; calibrate again"
                        )
                operand.weight = replace(known, parameters=tuple(now[name] for name in known.paths))

    def decide(self, in_float: Mapping[str, str] | None = None, correction: BiasCorrection | None = None) -> Plan:
        """Return the plan for all sites, which is made again only for new batches and changed weights.

        With ``in_float``, biases are corrected for a model with these groups in float; ``correction`` caches the common
        part of several such plans.
        """
        plan = self._decide()
        if not in_float:
            return dict(plan)
        assert self._decided is not None
        known, key = self._decided.corrected, frozenset(in_float)
        if key not in known:
            correction = correction or self.correction()
            if correction is None:
                return dict(plan)
            with self._observation.paused(), torch.no_grad():
                known[key] = correction.with_fallback(plan, in_float)
        return dict(known[key])

    def of_single_sites(self, plan: Plan) -> Plan:
        """Return a plan with biases corrected as if each site alone were quantized."""
        correction = self.correction()
        if correction is None:
            return plan
        with self._observation.paused():
            return correction.of_single_sites(plan)

    def correction(self) -> BiasCorrection | None:
        """Return the bias correction on the stored batches; None if there is none."""
        statistics, settings = self.observation(), self._proxied.settings
        if not settings.bias_correction or statistics.kept is None or not statistics.kept.everywhere:
            return None
        return BiasCorrection(Work.of(self._proxied, statistics))

    def _decide(self) -> Plan:
        statistics = self.observation()
        if statistics.batches == 0:
            raise CalibrationError(
                "nothing was calibrated yet: run data through calib(model), or call calibrate(model, batches)"
            )
        if statistics.only_zeros and not self._warned:
            self._warned = True
            warnings.warn(
                f"all inputs of all {statistics.batches} calibration batches are zero, so the ranges do not fit real "
                "data; calibrate with real data",
                stacklevel=3,
            )
        self.warn_of_constants()
        needed = needs_batches(self._proxied.settings) and statistics.chosen_at != statistics.batches
        if needed and get_world_size() == 1 and not statistics.kept:
            raise CalibrationError(
                "several percentiles, calibrator 'auto', a fixed smoothquant_alpha and rounding by data need batches "
                "for each backend, but a saved folder has none; call for_backend() before save(), or calibrate(model, "
                "batches, resume=True) with a few batches"
            )
        self._renew_weights(statistics)
        known, same = self._decided, self.weights.look_at(_weights(statistics))
        if known is not None and _versions(known.plan) != known.versions:
            self.weights.forget()
        elif known is not None and same and known.is_of(statistics):
            return known.plan
        self._decided = None
        self._follow_types(statistics)
        # This runs the proxy, which must not observe these passes.
        with self._observation.paused():
            self._compare_attention()
            plan = make_plan(self._proxied, statistics)
        self._decided = _Decided.of(statistics, plan)
        return plan

    def _follow_types(self, statistics: Seen) -> None:
        """Cast the stored batches if the model was cast after calibration."""
        if self.fingerprint is None or statistics.kept is None:
            return
        types = changed_types(self.fingerprint, Fingerprint.of(self.proxy, self.fingerprint))
        statistics.kept.set_types(types)
        if types:
            self._buffers.refresh()
            self._first = None if self._first is None else in_types(self._first, types)

    def warn_of_constants(self) -> None:
        """Warn once about each constant activation of all batches; all ranks must call this."""
        statistics = self.observation()
        if statistics.only_zeros:
            return
        for value, names in sorted(statistics.constant_operands().items()):
            new = [name for name in names if name not in self._warned_constants]
            self._warned_constants.update(new)
            if new:
                warn_user([_constants_warning(value, new)])

    def extent(self) -> tuple[int, int, int]:
        """Return the numbers of batches and samples that this process observed, and of sites."""
        statistics = self._observation.seen
        return statistics.batches, statistics.rows, len(statistics.records)

    @property
    def products(self) -> tuple[CountedProduct, ...]:
        """The matrix multiplications and convolutions that torch computed."""
        return self.observation().counted()

    @property
    def regions(self) -> Float32Modules:
        """The modules whose values exceed float16."""
        return self.observation().regions

    def seen(self) -> bytes:
        """Return the statistics of all ranks as bytes, to be saved."""
        return snapshot(self.observation())

    def observation(self) -> Seen:
        batches = self._observation.seen.batches
        if self._gathered is None or self._gathered[0] != batches:
            statistics = merge_across_ranks(self._proxied, self._observation)
            self._gathered = (batches, statistics)
        return self._gathered[1]


def _constants_warning(value: float, names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    if value == 0:
        return (
            f"all values of {shown} were 0 in calibration, so the range is unknown and it is not quantized; calibrate "
            "with data that uses this part of the model"
        )
    return (
        f"all values of {shown} were {value:g} in calibration, so other values will be clipped; calibrate with data "
        "that covers the values in use"
    )


def merge_across_ranks(proxy: Proxied, observation: Observation) -> Seen:
    """Return the merged statistics of all ranks, which must all call this."""
    mine = observation.seen
    if get_world_size() == 1:
        return mine
    configs = all_gather_bytes(proxy.settings.text.encode())
    for rank, other in enumerate(configs):
        if other != configs[0]:
            raise CalibrationError(
                f"rank {rank} calibrates with another configuration than rank 0; use the same one on all ranks"
            )
    merged = Seen.of_sites(mine.records, None if mine.kept is None else mine.kept.shared())
    for data in all_gather_bytes(snapshot(mine)):
        merged.add(_restored(data, proxy.module, observation))
    return merged


def _weights(seen: Seen) -> list[Tensor]:
    """Return the parameters that operands are made of, each once, in the order of the sites."""
    operands = (operand for record in seen.records.values() for operand in record.operands.values())
    weights = (operand.weight for operand in operands if operand.weight is not None)
    return list(dict.fromkeys(parameter for weight in weights for parameter in weight.parameters))


def _versions(plan: Plan) -> tuple[int, ...]:
    operands = (operand for entry in plan.values() for operand in entry.operands)
    tensors = (tensor for operand in operands for tensor in (operand.amax, operand.scale) if tensor is not None)
    return tuple(map(tensor_version, tensors))


def _restored(data: bytes, proxy: nn.Module, observation: Observation) -> Seen:
    return restored(data, proxy, observation.seen.records.keys(), observation.watched.make)
