"""The state behind a ``Quantizer``: one model with its plan, sensitivity session, fallback and QAT session."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from quantizer.calibration.plan_source import Held, PlanSource
from quantizer.calibration.settings import tell_where_nothing_is_quantized, warn_of_float32
from quantizer.common.data.sizes import DataSizes
from quantizer.common.distributed import get_world_size
from quantizer.common.fingerprint import Fingerprint, changed_parameters, refuse_other_shapes, warn_of_other_weights
from quantizer.config import QuantizerConfig
from quantizer.errors import CalibrationError, ProxyError, SensitivityError
from quantizer.float16.float32_modules import Float32Modules
from quantizer.float16.simulate import is_simulation
from quantizer.observe.completeness.product_counter import CountedProduct
from quantizer.plan.apply import frozen_proxy, require_scales_of
from quantizer.plan.coverage import Coverage
from quantizer.plan.site_plan import Plan, with_biases_of
from quantizer.plan.site_plan import with_fallback as without_groups
from quantizer.plan.weight_scales import changed_buffers, with_scales_of_weights, without_codes, without_former_codes
from quantizer.proxy.build import UnrewrittenSource, applied_patches, is_proxy, skipped_sources
from quantizer.proxy.lowered.lower import is_lowered
from quantizer.qat import Scales
from quantizer.qat.session import QatSession
from quantizer.rewrite.operator_patches import OperatorPatch
from quantizer.sensitivity import Fallback, Loss, Metric, fallback_for_target, operands_of
from quantizer.sensitivity.prices import Prices
from quantizer.sensitivity.ranking import Sensitivity
from quantizer.sensitivity.session import SensitivitySession
from quantizer.settings import settings_of
from quantizer.targets import AUTO


def for_this_cpu(config: QuantizerConfig) -> QuantizerConfig:
    """Return the configuration with a backend in the place of ``auto``: an installed one, in its variant for this CPU.

    A quantizer alone measures no engines, as ``quantizer run`` and ``quantizer convert`` do.
    """
    if config.backend != AUTO:
        return config
    from quantizer.engines.candidates import cpu_candidates

    return config.model_copy(update={"backend": cpu_candidates(config.candidates)[0][0], "candidates": ()})


class ModelSession:
    """The state of one model across the stages.

    Attributes:
        decisions: the source of the plan, before any fallback.
        amp: the sensitivity session; None before ``Quantizer.amp``.
        fallback: the groups that fall back to float; None: no group does.
        trainable: the QAT session; None before ``Quantizer.qat``.
    """

    def __init__(self, config: QuantizerConfig) -> None:
        self.decisions = PlanSource(settings_of(config))
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
        """Bind the session to a model."""
        if isinstance(model, nn.Module) and is_proxy(model):
            raise ProxyError("this is a proxy already; pass the float model that it was made from")
        if self._model is not None and (bound := self._model()) not in (None, model):
            raise ProxyError(
                f"this Quantizer serves another {type(bound).__name__} already; make one Quantizer for each model"
            )
        if isinstance(model, nn.Module):
            self._model = weakref.ref(model)
            self.scan_source(model)
        if self.decisions.bind(model) and self._carried is not None:
            plan = self.decisions.plan()
            self.put_back(fallback_for_target(*self._carried, plan), plan)

    def scan_source(self, model: nn.Module) -> None:
        """Store the unrewritten sources and the operator patches of a model or proxy, for the coverage."""
        self._skipped, self._patches = list(skipped_sources(model)), applied_patches(model)

    def inherit_from(self, other: ModelSession, backend: str, *, share: bool = False) -> None:
        """Take the calibration, the fallback and the model of another session."""
        decided = other.decided()
        if other.scales_replaced:
            raise CalibrationError(
                "for_backend() gives on what calibration saw, and this Quantizer goes by scales of load_scales() or "
                "qat(): make the Quantizer of the other backend first, and load the scales into both"
            )
        self.decisions.inherit_from(other.decisions, share=share)
        self.amp = other.amp if self.decisions.state is other.decisions.state else None
        if other.fallback is not None:
            self._carried = other.fallback, decided, backend
        if other._model is not None and (model := other._model()) is not None:
            self.bind(model)

    def calibration_proxy(self, model: nn.Module, *, resume: bool) -> nn.Module:
        """Return the proxy of a new calibration, or of one that is resumed; see ``Quantizer.calib``."""
        self.bind(model)
        if resume:
            return self.decisions.resume(model)
        proxy = self.decisions.start(model)
        self.amp = self.fallback = self.trainable = self._carried = None
        return proxy

    @contextmanager
    def replaced_as_a_whole(self) -> Iterator[None]:
        """Restore the earlier calibration if the one inside the block fails or is interrupted."""
        before, state, counts = vars(self).copy(), self.decisions.state, self.decisions.counts
        try:
            yield
        except BaseException:
            # A first calibration keeps its complete batches, so that it can be resumed.
            if counts:
                vars(self).update(before)
                self.decisions.state = state
            raise

    def train(self, model: nn.Module, scales: Scales, *, own: bool) -> nn.Module:
        """Return the proxy to train; see ``Quantizer.qat``."""
        self.bind(model)
        if self.trainable is not None or self.decisions.decided:
            groups = {} if self.fallback is None else self.fallback.reasons()
            # The scales of an earlier training may belong to the weights of a copy: start from those of calibration.
            # After such a training changed weights are expected, and need no warning.
            plan = self._scaled_for(model, self._trained_plan(self.fallback), told=self.trainable is not None)
            self.trainable = QatSession(model, plan, groups, scales, self._target.torch_dtype, own=own)
            return self.trainable.proxy
        trainable = QatSession(model, None, {}, scales, self._target.torch_dtype, own=own)
        trainable.calibrate_first(self.calibration_proxy(model, resume=False), self._trained_plan)
        self.trainable = trainable
        return trainable.proxy

    def _trained_plan(self, fallback: Fallback | None = None) -> Plan:
        """Return the plan of calibration without codes: training rounds the float weights, which move."""
        plan = self.decisions.plan(None if fallback is None else fallback.reasons())
        return without_codes(plan, "qat() trains the float weights")

    def trained(self, model: nn.Module) -> nn.Module:
        """Return the model, or the copy of it that was trained."""
        return model if self.trainable is None else self.trainable.model

    def frozen(self, model: nn.Module, *, fused: bool = False) -> nn.Module:
        """Return the frozen proxy of a model, or of its trained copy; ``fused`` as in ``frozen_proxy``."""
        self.bind(model)
        plan = self.fitted(model, self.effective_plan())
        tell_where_nothing_is_quantized(plan)
        return frozen_proxy(self.trained(model), plan, fused=fused)

    def fitted(self, model: nn.Module, plan: Plan) -> Plan:
        """Return the plan with scales of weights computed from the weights that ``model`` has now.

        After a training the plan stays as it is: its scales belong to the trained weights.
        """
        if self.trainable is None:
            return self._scaled_for(model, plan, told=False)
        self.trainable.require_weights_of(self.trained(model))
        return plan

    def _scaled_for(self, model: nn.Module, plan: Plan, *, told: bool) -> Plan:
        """Return the plan with scales from the model's weights; warn unless ``told`` if these have changed."""
        before = self.decisions.fingerprint
        if before is not None:
            now = Fingerprint.of(model, before)
            refuse_other_shapes(before, now)
            buffers = changed_buffers(plan, model)
            if not told:
                warn_of_other_weights(before, now, buffers)
            plan = without_former_codes(plan, {*changed_parameters(before, now), *buffers})
        target = self._target
        return with_scales_of_weights(plan, model, target.torch_dtype, target.weight_qmax, self.decisions.weights)

    def decided(self, fallback: Fallback | None = None) -> Plan:
        """Return the plan of all groups, with trained scales after a training, and biases corrected for a fallback."""
        if self.trainable is not None:
            return self.trainable.learned_plan()
        return self.decisions.plan(None if fallback is None else fallback.reasons())

    def measure(
        self, model: nn.Module, measure: str, granularity: str, loss: Loss | None, metric: Metric | None
    ) -> nn.Module:
        """Return the proxy that measures; see ``Quantizer.amp``."""
        self.bind(model)
        plan, free = self.fitted(model, self.decided()), self.trainable is None
        alone, tries = (self.decisions.of_single_sites(plan), self._tries(plan)) if free else (None, None)
        self.amp = SensitivitySession(
            self.trained(model), plan, measure, granularity, loss, metric, alone=alone, tries=tries
        )
        return self.amp.proxy

    def _tries(self, plan: Plan) -> Callable[[], Callable[[Mapping[str, str]], Plan]]:
        """Return what begins a search: a function from groups to ``plan`` with these in float, as it is frozen."""

        def begin() -> Callable[[Mapping[str, str]], Plan]:
            correction = self.decisions.correction()

            def with_groups(groups: Mapping[str, str]) -> Plan:
                return without_groups(with_biases_of(plan, self.decisions.plan(groups, correction)), groups)

            return with_groups

        return begin

    def replace(self, plan: Plan) -> None:
        """Use a plan with other scales from now on; a trained model stays the one that is quantized."""
        self.decisions.replace(plan)
        if self.trainable is not None:
            self.trainable.replace(plan)
        self.amp = None

    @property
    def scales_replaced(self) -> bool:
        """True if scales were loaded or ``qat`` was called, so that scales may differ from those of calibration."""
        return self.trainable is not None or self.decisions.scales_replaced

    def effective_plan(self) -> Plan:
        """Return the plan after the fallback."""
        return self._after_fallback(self.refitted())

    def _after_fallback(self, plan: Plan) -> Plan:
        return plan if self.fallback is None else without_groups(plan, self.fallback.reasons())

    def refitted(self) -> Plan:
        """Return the plan of all groups, its biases corrected for the groups that fell back to float."""
        plan = self.decided()
        if self.fallback is None:
            return plan
        if not {*self.fallback.groups, *self.fallback.slower} <= set(operands_of(plan)):
            # After more data other operands may share a range, which changes the groups.
            self.put_back(fallback_for_target(self.fallback, self._chosen_in, None, plan), plan)
        return self.decided(self.fallback)

    def choose(self, amp: nn.Module | None, *, prices: Prices | None, **asked: Any) -> Fallback:
        """Choose groups to put back, by what ``amp`` measured or by ``prices`` alone; see ``Quantizer.fallback``."""
        if amp is None and prices is not None:
            return self.put_back(Fallback(groups=(), asked="prices", slower=prices.slower()))
        if self.amp is None or amp is not self.amp.proxy:
            raise ProxyError("fallback() takes the proxy that amp() of this same Quantizer returned last")
        return self.put_back(self.amp.fallback(prices=prices, **asked), self.amp.measured_plan)

    def put_back(self, fallback: Fallback, plan: Plan | None = None) -> Fallback:
        """Use a fallback of ``plan`` (None: of the plan of calibration) from now on, and return it."""
        self.fallback, self._chosen_in = fallback, self.decided() if plan is None else plan
        if get_world_size() > 1:
            # All ranks are here. Later one alone may ask for the plan, which takes passes of all.
            self.refitted()
        return fallback

    def clear_fallback(self) -> None:
        """Quantize all groups again, those too that another quantizer put back."""
        self.fallback = self._carried = None

    def is_working_proxy(self, proxy: nn.Module) -> bool:
        """Return whether ``proxy`` is the session's proxy of ``calib``, ``amp`` or ``qat``."""
        stages = (self.decisions.calibration, self.amp, self.trainable)
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
        from quantizer.export import export_onnx, least_opset

        if is_simulation(quant_model) or is_lowered(quant_model) or self.is_working_proxy(quant_model):
            raise ProxyError("export() takes the model that quantize() returned, or a float model")
        target, regions = self._target, self.decisions.regions()
        require_scales_of(quant_model, target.torch_dtype, target.name)
        warn_of_float32(target, regions)
        return export_onnx(
            quant_model,
            path,
            example,
            opset=opset or max(target.opset, least_opset(quant_model)),
            dtype=target.torch_dtype,
            regions=regions,
            axes=axes,
            data=self.decisions.sizes(),
            target=target,
        )

    def document(self) -> dict[str, Any]:
        """Return the state that is saved beside the plan and the products, as plain values."""
        return {
            "config": self._config.model_dump(mode="json"),
            "scales_replaced": self.scales_replaced,
            "fallback": None if self.fallback is None else self.fallback.document(),
            "regions": self.decisions.regions().plain(),
            "fingerprint": None if (known := self._fingerprint()) is None else known.plain(),
        }

    def _fingerprint(self) -> Fingerprint | None:
        """Return the checksum of the weights in calibration, or of the trained weights after a training."""
        return self.decisions.fingerprint if self.trainable is None else Fingerprint.of(self.trainable.model)

    def load(
        self,
        plan: Plan,
        products: tuple[CountedProduct, ...],
        document: Mapping[str, Any],
        observed: bytes | None = None,
    ) -> None:
        """Restore a saved state; see ``document`` for the plain values."""
        self.decisions.state = Held(
            plan=plan,
            products=products,
            regions=Float32Modules.from_plain(document["regions"]),
            fingerprint=Fingerprint.from_plain(document["fingerprint"]),
            scales_replaced=document["scales_replaced"],
            observed=observed,
        )
        if document["fallback"] is not None:
            self.put_back(Fallback.from_document(document["fallback"]), plan)

    def coverage(self) -> Coverage:
        """Return the coverage: all sites, and the products that torch computed in calibration."""
        whole = self.refitted()
        final = self._after_fallback(whole)
        back = [path for path, entry in whole.items() if entry.quantized and not final[path].quantized]
        regions = self.decisions.regions()
        return Coverage(final, self._skipped, self.decisions.products(), back, self._patches, regions)

    def sensitivity(self) -> Sensitivity:
        """Return the groups, ranked."""
        if self.amp is None:
            raise SensitivityError("nothing was measured yet: run the proxy that amp() returns on data first")
        return Sensitivity(self.amp.ranking(), self.fallback, self.amp.measure)
