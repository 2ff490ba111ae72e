"""The state behind a ``Quantizer``: one model with its plan, sensitivity session, fallback and QAT session."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from quantizer.algorithms.bias_correction import BiasCorrection
from quantizer.algorithms.calibration_session import CalibrationSession
from quantizer.algorithms.qat import Scales
from quantizer.algorithms.qat.session import QatSession
from quantizer.algorithms.sensitivity import Fallback, Loss, Metric, fallback_for_target, operands_of
from quantizer.algorithms.sensitivity.latency_costs import LatencyCosts
from quantizer.algorithms.sensitivity.session import Sensitivity, SensitivitySession, unranked
from quantizer.algorithms.settings import tell_where_nothing_is_quantized, warn_of_float32
from quantizer.config import QuantizerConfig
from quantizer.errors import CalibrationError, ProxyError, SensitivityError
from quantizer.observe.completeness import CountedProduct
from quantizer.observe.float16_modules import Float32Modules
from quantizer.observe.float16_simulation import is_simulation
from quantizer.observe.replay_batches import ReplayBatches
from quantizer.observe.snapshot import seen_inputs
from quantizer.plan.apply import frozen_proxy, require_scales_of
from quantizer.plan.coverage import Coverage
from quantizer.plan.site_plan import Plan, with_biases_of
from quantizer.plan.site_plan import with_fallback as without_groups
from quantizer.plan.targets import AUTO
from quantizer.plan.weight_scales import changed_buffers, with_scales_of_weights, without_codes, without_former_codes
from quantizer.proxy.build import UnrewrittenSource, applied_patches, exportable, is_proxy, skipped_sources
from quantizer.proxy.lower import is_lowered
from quantizer.rewrite.operator_patches import OperatorPatch
from quantizer.settings import settings_of
from quantizer.utils.distributed import get_world_size
from quantizer.utils.fingerprint import Fingerprint, changed_parameters, refuse_other_shapes, warn_of_other_weights
from quantizer.utils.sizes import DataSizes
from quantizer.utils.torch_modes import ordinary_tensors


def for_this_machine(config: QuantizerConfig) -> QuantizerConfig:
    """Return the configuration with a backend in place of ``auto``: for this CPU, or the first of the candidates.

    Unlike ``quantizer run`` and ``quantizer convert``, a ``Quantizer`` does not compare engines.
    """
    if config.backend != AUTO:
        return config
    from quantizer.engines.candidates import usable_backends

    return config.model_copy(update={"backend": usable_backends(config.candidates)[0][0], "candidates": ()})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FixedPlan:
    """A fixed plan, loaded from a folder or with loaded scales, which is valid until the next calibration.

    Attributes:
        plan: the plan.
        products: the matrix multiplications that torch computed in calibration.
        regions: the modules whose values in calibration exceed float16.
        fingerprint: the checksum of the weights in calibration; None for a model that was quantized in place.
        scales_replaced: whether the scales were loaded instead of calibrated.
        until_new: whether the plan ends with the first new batch of the resumed calibration.
    """

    plan: Plan
    products: tuple[CountedProduct, ...]
    regions: Float32Modules
    fingerprint: Fingerprint | None
    scales_replaced: bool
    until_new: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Inherited:
    """The statistics and saved batches of another quantizer; the plan is made when ``bind`` supplies the model."""

    snapshot: bytes
    kept: ReplayBatches | None
    fingerprint: Fingerprint | None
    products: tuple[CountedProduct, ...] = ()
    regions: Float32Modules = field(default_factory=Float32Modules)


class ModelSession:
    """The state of one model across the stages.

    Attributes:
        calibration: the calibration session; None before any, and in a loaded quantizer until it is resumed.
        fixed: the plan that replaces that of calibration.
        inherited: statistics of another quantizer, which become the calibration once the model is known.
        amp: the sensitivity session; None before ``Quantizer.amp``.
        fallback: the groups that fall back to float; None: no group does.
        trainable: the QAT session; None before ``Quantizer.qat``.
    """

    def __init__(self, config: QuantizerConfig) -> None:
        self.calibration: CalibrationSession | None = None
        self.fixed: FixedPlan | None = None
        self.inherited: Inherited | None = None
        self._saved: bytes | None = None  # the statistics of a loaded folder, to resume from
        self._settings = settings_of(config)
        self.amp: SensitivitySession | None = None
        self.fallback: Fallback | None = None
        self.trainable: QatSession | None = None
        self._config = config
        self._target = config.target
        self._model: weakref.ref[nn.Module] | None = None
        self._skipped: list[UnrewrittenSource] = []
        self._patches: tuple[OperatorPatch, ...] = ()
        self._carried: tuple[Fallback, Plan, str] | None = None
        self._chosen_in: Plan = {}  # the plan whose groups the fallback names

    def bind(self, model: nn.Module) -> None:
        """Bind the session to a model, and make the inherited calibration of it."""
        if isinstance(model, nn.Module) and is_proxy(model):
            raise ProxyError("the model is already a proxy; pass the float model that it was made from")
        if self._model is not None and (bound := self._model()) not in (None, model):
            raise ProxyError(
                f"this Quantizer is bound to another {type(bound).__name__}; make one Quantizer for each model"
            )
        if isinstance(model, nn.Module):
            self._model = weakref.ref(model)
            self.scan_source(model)
        if (other := self.inherited) is not None:
            self._use_calibration(
                CalibrationSession(
                    self._settings, model, other.snapshot, anew=True, kept=other.kept, fingerprint=other.fingerprint
                )
            )
            if self._carried is not None:
                plan = self.plan()
                self.use_fallback(fallback_for_target(*self._carried, plan), plan)

    def _use_calibration(self, session: CalibrationSession | None) -> None:
        self.calibration, self.fixed, self.inherited, self._saved = session, None, None, None

    def scan_source(self, model: nn.Module) -> None:
        """Store the problems of rewriting and the operator patches of a model, for the coverage report."""
        self._skipped, self._patches = list(skipped_sources(model)), applied_patches(model)

    def inherit_from(self, other: ModelSession, backend: str, *, share: bool = False) -> None:
        """Take the calibration, the fallback and the model of another session."""
        decided = other.decided()
        if other.scales_replaced:
            raise CalibrationError(
                "for_backend() copies the calibration, but the scales of this Quantizer come from load_scales() or "
                "qat(): call for_backend() first, then load the scales into both"
            )
        if share and other._settings == self._settings and other.calibration is not None and other.fixed is None:
            self._use_calibration(other.calibration)
            self.amp = other.amp
        else:
            snapshot = other.seen()
            if snapshot is None:
                raise CalibrationError(
                    "for_backend() needs the statistics of calibration, which the folder of this Quantizer does not "
                    "contain; calibrate again"
                )
            batches = None if other.calibration is None else other.calibration.observation().kept
            self._use_calibration(None)
            self.inherited, self.amp = Inherited(snapshot, batches, other.fingerprint), None
        if other.fallback is not None:
            self._carried = other.fallback, decided, backend
        if other._model is not None and (model := other._model()) is not None:
            self.bind(model)

    def calibration_proxy(self, model: nn.Module, *, resume: bool) -> nn.Module:
        """Return the proxy of a new or resumed calibration; see ``Quantizer.calib``."""
        self.bind(model)
        if resume:
            return self._resumed(model).proxy
        session = CalibrationSession(self._settings, model)
        self._use_calibration(session)
        self.amp = self.fallback = self.trainable = self._carried = None
        return session.proxy

    def _resumed(self, model: nn.Module) -> CalibrationSession:
        """Return the session that continues the calibration, of this quantizer or of the loaded folder."""
        session, fixed, saved = self.calibration, self.fixed, self._saved
        if session is not None:
            if session.has_weights_of(model):
                session.resume()
            else:
                # The proxy of the session computes with former parameters of the model.
                statistics, batches = session.seen(), session.observation().kept
                session = CalibrationSession(
                    self._settings, model, statistics, anew=True, kept=batches, fingerprint=session.fingerprint
                )
            self._use_calibration(session)
        elif fixed is not None and saved is not None:
            session = CalibrationSession(self._settings, model, saved, fingerprint=fixed.fingerprint)
            self._use_calibration(session)
            self.fixed = replace(fixed, until_new=True)
        else:
            raise CalibrationError(
                "calib(resume=True) needs an earlier calib() of this Quantizer, or a loaded folder with the "
                "statistics of calibration"
            )
        return session

    @contextmanager
    def restored_on_failure(self) -> Iterator[None]:
        """Restore the earlier calibration if the one inside the block fails or is interrupted."""
        is_pending = self.fixed is not None or self.inherited is not None
        has_calibration = is_pending or (self.calibration is not None and self.calibration.has_begun)
        before = vars(self).copy()
        try:
            yield
        except BaseException:
            # A first calibration keeps its complete batches, so that it can be resumed.
            if has_calibration:
                vars(self).update(before)
            raise

    def train(self, model: nn.Module, scales: Scales, *, own: bool) -> nn.Module:
        """Return the proxy to train; see ``Quantizer.qat``."""
        self.bind(model)
        if self.trainable is not None or self.has_plan:
            groups = {} if self.fallback is None else self.fallback.reasons()
            # The scales of an earlier training may belong to the weights of a copy, so start from calibrated scales.
            # After a training, changed weights are expected and need no warning.
            plan = self._scaled_for(model, self._plan_to_train(self.fallback), warn=self.trainable is None)
            self.trainable = QatSession(model, plan, groups, scales, self._target.torch_dtype, own=own)
            return self.trainable.proxy
        trainable = QatSession(model, None, {}, scales, self._target.torch_dtype, own=own)
        trainable.calibrate_first(self.calibration_proxy(model, resume=False), self._plan_to_train)
        self.trainable = trainable
        return trainable.proxy

    def _plan_to_train(self, fallback: Fallback | None = None) -> Plan:
        """Return the calibrated plan without integer weights: training rounds the float weights, which change."""
        plan = self.plan(None if fallback is None else fallback.reasons())
        return without_codes(plan, "qat() trains the float weights")

    def trained(self, model: nn.Module) -> nn.Module:
        """Return the trained copy of the model if there is one, otherwise the model."""
        return model if self.trainable is None else self.trainable.model

    def frozen(self, model: nn.Module, *, fused: bool = False) -> nn.Module:
        """Return the frozen proxy of a model or of its trained copy; ``fused`` as in ``frozen_proxy``."""
        self.bind(model)
        plan = self.fitted(model, self.effective_plan())
        tell_where_nothing_is_quantized(plan)
        return frozen_proxy(self.trained(model), plan, fused=fused)

    def fitted(self, model: nn.Module, plan: Plan) -> Plan:
        """Return the plan with scales of weights computed from the current weights of ``model``.

        After a training the plan stays as it is: its scales belong to the trained weights.
        """
        if self.trainable is None:
            return self._scaled_for(model, plan, warn=True)
        self.trainable.require_weights_of(self.trained(model))
        return plan

    def _scaled_for(self, model: nn.Module, plan: Plan, *, warn: bool) -> Plan:
        """Return the plan with scales from the model's weights; with ``warn``, warn if these changed."""
        before = self.fingerprint
        if before is not None:
            now = Fingerprint.of(model, before)
            refuse_other_shapes(before, now)
            buffers = changed_buffers(plan, model)
            if warn:
                warn_of_other_weights(before, now, buffers)
            plan = without_former_codes(plan, {*changed_parameters(before, now), *buffers})
        target, weights = self._target, None if self.calibration is None else self.calibration.weights
        return with_scales_of_weights(plan, model, target.torch_dtype, target.weight_qmax, weights)

    def decided(self, fallback: Fallback | None = None) -> Plan:
        """Return the plan of all groups: trained scales after QAT, and biases corrected for a fallback."""
        if self.trainable is not None:
            return self.trainable.learned_plan()
        return self.plan(None if fallback is None else fallback.reasons())

    def measure(
        self, model: nn.Module, measure: str, granularity: str, loss: Loss | None, metric: Metric | None
    ) -> nn.Module:
        """Return the proxy that measures sensitivity; see ``Quantizer.amp``."""
        self.bind(model)
        plan, untrained = self.fitted(model, self.decided()), self.trainable is None
        deciding = self._plan_source
        alone = deciding.of_single_sites(plan) if untrained and isinstance(deciding, CalibrationSession) else None
        tries = self._plan_search(plan) if untrained else None
        self.amp = SensitivitySession(
            self.trained(model), plan, measure, granularity, loss, metric, alone=alone, tries=tries
        )
        return self.amp.proxy

    def _plan_search(self, plan: Plan) -> Callable[[], Callable[[Mapping[str, str]], Plan]]:
        """Return a function that begins a search; its result maps groups kept in float to the frozen plan."""

        def begin() -> Callable[[Mapping[str, str]], Plan]:
            deciding = self._plan_source
            correction = deciding.correction() if isinstance(deciding, CalibrationSession) else None

            def with_groups(groups: Mapping[str, str]) -> Plan:
                return without_groups(with_biases_of(plan, self.plan(groups, correction)), groups)

            return with_groups

        return begin

    def replace(self, plan: Plan) -> None:
        """Use a plan with other scales from now on; ``quantize`` still returns a trained model."""
        fingerprint, products, regions = self.fingerprint, self.products(), self.regions()
        self.fixed = FixedPlan(
            plan=plan, products=products, regions=regions, fingerprint=fingerprint, scales_replaced=True
        )
        if self.trainable is not None:
            self.trainable.replace(plan)
        self.amp = None

    @property
    def scales_replaced(self) -> bool:
        """True if scales were loaded or trained, so that they may differ from calibration."""
        deciding = self._plan_source
        return self.trainable is not None or (isinstance(deciding, FixedPlan) and deciding.scales_replaced)

    def effective_plan(self) -> Plan:
        return self._after_fallback(self.refitted())

    def _after_fallback(self, plan: Plan) -> Plan:
        return plan if self.fallback is None else without_groups(plan, self.fallback.reasons())

    def refitted(self) -> Plan:
        """Return the plan of all groups, with biases corrected for the fallback."""
        plan = self.decided()
        if self.fallback is None:
            return plan
        if not {*self.fallback.groups, *self.fallback.slower} <= set(operands_of(plan)):
            # With more data, other operands may share a range, which changes the groups.
            self.use_fallback(fallback_for_target(self.fallback, self._chosen_in, None, plan), plan)
        return self.decided(self.fallback)

    def choose(
        self,
        amp: nn.Module | None,
        choice: Mapping[str, Any],
        *,
        latency_costs: LatencyCosts | None,
        **options: Any,
    ) -> Fallback:
        """Choose groups to keep in float; see ``Quantizer.fallback``.

        Args:
            amp: the proxy with the ranking; None: choose by name or by latency costs.
            choice: ``num``, ``ratio``, ``names``, ``max_drop`` and ``min_speedup``, of which one is not None.
            latency_costs: the latency cost of each group; None if not measured.
            options: the other arguments of ``SensitivitySession.fallback``.
        """
        if amp is None:
            plan = self.decided()
            return self.use_fallback(unranked(plan, choice, latency_costs), plan)
        if self.amp is None or amp is not self.amp.proxy:
            raise ProxyError("fallback() expects the proxy that the last amp() of this Quantizer returned")
        chosen = self.amp.fallback(latency_costs=latency_costs, **choice, **options)
        return self.use_fallback(chosen, self.amp.measured_plan)

    def use_fallback(self, fallback: Fallback, plan: Plan | None = None) -> Fallback:
        """Use a fallback of ``plan`` (None: the calibrated plan) from now on, and return it."""
        self.fallback, self._chosen_in = fallback, self.decided() if plan is None else plan
        if get_world_size() > 1:
            # All ranks call this now. Later, one rank alone may need the plan, which takes passes of all ranks.
            self.refitted()
        return fallback

    def clear_fallback(self) -> None:
        """Quantize all groups again, including those that another quantizer kept in float."""
        self.fallback = self._carried = None

    def is_working_proxy(self, proxy: nn.Module) -> bool:
        """Return whether ``proxy`` is the current proxy of ``calib``, ``amp`` or ``qat``."""
        stages = (self.calibration, self.amp, self.trainable)
        return any(stage is not None and proxy is stage.proxy for stage in stages)

    def export(
        self,
        quant_model: nn.Module,
        path: Path,
        example: Any,
        opset: int | None,
        axes: Mapping[str, Mapping[int, str]] | DataSizes | None,
    ) -> Path:
        """Write a frozen proxy as ONNX for the target; see ``Quantizer.export``."""
        from quantizer.export.exporter import export_onnx, least_opset

        if is_simulation(quant_model) or is_lowered(quant_model) or self.is_working_proxy(quant_model):
            raise ProxyError("export() expects the model that quantize() returned, or a float model")
        target, regions = self._target, self.regions()
        require_scales_of(quant_model, target.torch_dtype, target.name)
        warn_of_float32(target, regions)
        return export_onnx(
            exportable(quant_model),
            path,
            example,
            opset=opset or max(target.opset, least_opset(quant_model)),
            dtype=target.torch_dtype,
            regions=regions,
            axes=axes,
            data=self._sizes(),
            target=target,
        )

    def document(self) -> dict[str, Any]:
        """Return the state as plain values, which are saved beside the plan and the matrix multiplications."""
        return {
            "config": self._config.model_dump(mode="json"),
            "scales_replaced": self.scales_replaced,
            "fallback": None if self.fallback is None else self.fallback.document(),
            "regions": self.regions().plain(),
            "fingerprint": None if (known := self._fingerprint()) is None else known.plain(),
        }

    def _fingerprint(self) -> Fingerprint | None:
        """Return the checksum of the calibrated weights, or of the trained weights after a training."""
        return self.fingerprint if self.trainable is None else Fingerprint.of(self.trainable.model)

    def load(
        self,
        plan: Plan,
        products: tuple[CountedProduct, ...],
        document: Mapping[str, Any],
        observed: bytes | None = None,
    ) -> None:
        """Restore a saved state; see ``document`` for the plain values."""
        self._use_calibration(None)
        self._saved = observed
        self.fixed = FixedPlan(
            plan=plan,
            products=products,
            regions=Float32Modules.from_plain(document["regions"]),
            fingerprint=Fingerprint.from_plain(document["fingerprint"]),
            scales_replaced=document["scales_replaced"],
        )
        if document["fallback"] is not None:
            self.use_fallback(Fallback.from_document(document["fallback"]), plan)

    def coverage(self) -> Coverage:
        """Return the coverage: all sites, and the matrix multiplications that torch computed in calibration."""
        full_plan = self.refitted()
        final = self._after_fallback(full_plan)
        fallback_sites = [path for path, entry in full_plan.items() if entry.quantized and not final[path].quantized]
        regions = self.regions()
        return Coverage(final, self._skipped, self.products(), fallback_sites, self._patches, regions)

    def sensitivity(self) -> Sensitivity:
        if self.amp is None:
            raise SensitivityError("nothing was measured yet: run the proxy that amp() returns on data first")
        return Sensitivity(self.amp.ranking(), self.fallback, self.amp.measure)

    # -- properties of the state ----------------------------------------------------------------------------------

    def plan(self, in_float: Mapping[str, str] | None = None, correction: BiasCorrection | None = None) -> Plan:
        """Return the plan of all groups; ``in_float`` as in ``CalibrationSession.decide``."""
        match deciding := self._plan_source:
            case FixedPlan():
                return deciding.plan
            case CalibrationSession():
                with ordinary_tensors():
                    return deciding.decide(in_float, correction)
            case Inherited():
                raise CalibrationError(
                    "this Quantizer has no plan yet, because it does not know the model: call quantize(model) first"
                )
            case None:
                raise CalibrationError(
                    "nothing was calibrated yet: run data through calib(model), or call calibrate(model, batches)"
                )

    def passes(self) -> float:
        """Return how often all calibration data ran through the model, for the statistics and for the last plan."""
        if self.calibration is None:
            return 0.0
        statistics = self.calibration.observation()
        return 1 + statistics.replayed / statistics.batches if statistics.batches else 0.0

    def products(self) -> tuple[CountedProduct, ...]:
        """Return the matrix multiplications that torch computed in calibration."""
        return () if (deciding := self._plan_source) is None else deciding.products

    def regions(self) -> Float32Modules:
        """Return the modules whose values exceed float16; none for a model quantized in place."""
        return Float32Modules() if (deciding := self._plan_source) is None else deciding.regions

    @property
    def fingerprint(self) -> Fingerprint | None:
        """The checksum of the weights in calibration; None without a calibration."""
        return None if (deciding := self._plan_source) is None else deciding.fingerprint

    @property
    def has_plan(self) -> bool:
        return self.fixed is not None or (self.calibration is not None and self.calibration.has_any)

    def described(self) -> str:
        """Return the state in a few words, without making a plan and without communication between ranks."""
        match deciding := self._plan_source:
            case CalibrationSession() if deciding.has_begun:
                batches, rows, sites = deciding.extent()
                return f"calibrated on {f'{rows} samples' if rows else f'{batches} batches'}, {sites} sites"
            case FixedPlan():
                return f"{'scales loaded' if deciding.scales_replaced else 'calibrated'}, {len(deciding.plan)} sites"
            case Inherited():
                return "calibrated for another backend, no model yet"
            case _:
                return "not calibrated"

    def seen(self) -> bytes | None:
        """Return the statistics of calibration as the bytes of a folder; None if there are none."""
        if self.calibration is not None:
            return self.calibration.seen()
        return self._saved if self.inherited is None else self.inherited.snapshot

    def _sizes(self) -> DataSizes | None:
        """Return the dynamic axes and the sizes in the calibration data; None without data."""
        if self.calibration is not None:
            return DataSizes.of_shapes(self.calibration.observation().inputs)
        return None if (snapshot := self.seen()) is None else DataSizes.of_shapes(seen_inputs(snapshot))

    @property
    def _plan_source(self) -> FixedPlan | CalibrationSession | Inherited | None:
        fixed, session = self.fixed, self.calibration
        if fixed is not None and not (fixed.until_new and session is not None and session.has_new):
            return fixed
        return self.inherited if session is None else session
