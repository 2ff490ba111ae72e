"""The views of a ``Quantizer``: coverage, ranges, histograms and sensitivity of its model, and the lowered model."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from quantizer.calibration.choose_ranges import make_plan
from quantizer.calibration.proxied import proxied_copy
from quantizer.calibration.settings import make_observation
from quantizer.common.data.batches_of import batches_of
from quantizer.common.data.exported_program import Model, module_of
from quantizer.common.torch_modes import ordinary_tensors
from quantizer.config import QuantizerConfig
from quantizer.errors import CalibrationError, SensitivityError
from quantizer.float16.simulate import simulate
from quantizer.plan.replace_scales import scales_of
from quantizer.plan.site_plan import Plan, plan_digest
from quantizer.proxy.build import source_diff
from quantizer.proxy.lowered.choose import Lowering
from quantizer.proxy.lowered.lower import kernels_of, lower
from quantizer.sensitivity import Fallback
from quantizer.views.causes import Causes, find_causes
from quantizer.views.coverage import Coverage, Ranges
from quantizer.views.histogram_view import HistogramView
from quantizer.views.histograms import histogram_of
from quantizer.views.kernels_view import Kernels
from quantizer.views.layers_view import Layers
from quantizer.views.sensitivity_view import Sensitivity

if TYPE_CHECKING:
    from quantizer.model_session import ModelSession


logger = logging.getLogger(__name__)


class QuantizerViews:
    """The part of ``Quantizer`` that changes neither the statistics nor the plan.

    Attributes:
        ranked: the ranking of a run that saved this quantizer, shown until it measures or calibrates itself; None: it
            comes from no run, or the run measured none.
    """

    config: QuantizerConfig
    ranked: Sensitivity | None = None
    _session: ModelSession

    def __repr__(self) -> str:
        fallback = self._session.fallback
        groups = 0 if fallback is None else len(fallback.groups)
        kept = f", {groups} {'group' if groups == 1 else 'groups'} in float" if groups else ""
        return f"Quantizer(backend={self.config.backend!r}, {self._session.decisions.described()}{kept})"

    def inspect(self, model: Model) -> Coverage:
        """Return the coverage of a model before calibration: its sites, and which of them rules leave out."""
        proxy = proxied_copy(self.config, module_of(model))
        plan = make_plan(proxy, make_observation(proxy).seen)
        return Coverage.from_plan(plan, proxy.skipped, patches=proxy.patches)

    def diff(self, model: Model) -> str:
        """Return the changes of the model's source by the rewriting, as a unified diff."""
        return source_diff(module_of(model))

    def lower(self, model: Model) -> nn.Module:
        """Return a model that computes with the integers of ``quantize(model)``, by kernels of torch, for inference.

        The name is the compilers' word for this step: operations are replaced by those that a machine has. What is not
        a site stays the model's own Python, with its control flow and its caches, so models that do not export are
        lowered, too. On a CPU, INT8 linears and convolutions run in oneDNN's kernels; on a GPU, linears in
        ``torch._int_mm``, and FP8 ones in ``torch._scaled_mm``, and ``torch.compile`` fuses what lies between. Sites
        without a kernel keep the rounding of ``quantize(model)``; ``kernels`` says which, and why. Attention whose
        products stay float is the model's own, fused or not.

        To save it, save this quantizer; after ``Quantizer.load`` lower the model again.
        """
        with ordinary_tensors():
            # Not at the top: nothing else of a quantizer needs the engines.
            from quantizer.engines.candidates import EXACT_QMAX, saturates

            widest = EXACT_QMAX if saturates() else None
            lowered = lower(self._session.frozen(module_of(model), fused=True), Lowering(widest=widest))
            found = self.kernels(lowered)
            if len(found) and not any(row.kernel for row in found):
                logger.warning("lower() finds no kernel, so it gives what quantize() gives: %s", found[0].reason)
            return lowered

    def kernels(self, lowered: nn.Module) -> Kernels:
        """Return which kernel of torch computes each quantized site of a model that ``lower`` returned."""
        return Kernels(kernels_of(lowered))

    def simulate(self, model: Model) -> nn.Module:
        """Return the frozen proxy as the target runs it: its float part in half precision if the target's is.

        Its scores predict those of the engine; it cannot be exported. In float32 targets it is the frozen proxy.
        """
        with ordinary_tensors():
            return simulate(
                self._session.frozen(module_of(model)),
                self.config.target.torch_dtype,
                self._session.decisions.regions(),
            )

    def scales(self) -> dict[str, Tensor]:
        """Return the scale of every quantized operand, float32 [] or [C], by ``SITE.OPERAND``."""
        with ordinary_tensors():
            return scales_of(self._session.effective_plan())

    @property
    def coverage(self) -> Coverage:
        """All sites, quantized or with the reason, and all matrix products that torch computed in calibration."""
        return self._session.coverage()

    @property
    def layers(self) -> Layers:
        """One line for each layer that ran: formats, range, SQNR, share of the multiply-adds, and its sensitivity.

        ``layers.timed(prices)`` has the times of ``measured_prices`` too, and what each group would cost in float.
        """
        try:
            sensitivity = self.sensitivity
        except SensitivityError:  # nothing was measured yet
            sensitivity = None
        return Layers(self._session.coverage(), sensitivity)

    @property
    def ranges(self) -> Ranges:
        """The range of every operand."""
        return Ranges.from_plan(self._session.effective_plan())

    def histogram(self, operand: str) -> HistogramView:
        """Return the histogram of an operand (``SITE.OPERAND``) in calibration, with candidates for its range."""
        calibration = self._session.decisions.calibration
        seen = calibration.observation() if calibration is not None else None
        return HistogramView(histogram_of(operand, self._session.effective_plan(), seen))

    @property
    def sensitivity(self) -> Sensitivity:
        """The groups, ranked by their errors."""
        session = self._session
        if self.ranked is not None and session.amp is None and session.decisions.calibration is None:
            return self.ranked
        try:
            return session.sensitivity()
        except SensitivityError as error:
            if session.amp is not None or session.decisions.calibration is not None or not session.decisions.decided:
                raise
            where = "this quantizer was loaded, and its folder holds no ranking; report.json holds that of a run"
            raise SensitivityError(f"{error}; {where}") from error

    def causes(self, model: Model, batches: Any, *, num: int = 3) -> Causes:
        """Return the groups that cost most, why, and the setting that mends each.

        A cost is the SQNR of the model's output with that group alone quantized. A gain is measured too: the model is
        calibrated on ``batches`` with each setting that the configuration did not let it search by itself. The groups
        that are looked at are the first of the ranking by ``amp()``, if that was measured by the output and for the
        plan and the weights of now; otherwise they are ranked on ``batches``.
        """
        with ordinary_tensors():
            model = module_of(model)
            given = list(batches_of(model, batches))
            if not given:
                raise CalibrationError("causes() measures on data: give a few calibration batches")
            plan = self._session.fitted(model, self._session.effective_plan())
            amp = self._session.amp
            # A ranking of another plan, or of other weights, tells nothing of this one.
            holds = amp is not None and plan_digest(self._session.after_fallback(amp.measured_plan)) == plan_digest(
                plan
            )
            ranked = [entry.group for entry in amp.by_output] if amp is not None and holds else []
            return Causes(find_causes(self.config, self._session.trained(model), plan, given, num, ranked))

    @property
    def chosen_fallback(self) -> Fallback | None:
        """The current fallback; None before ``fallback`` and after ``clear_fallback``."""
        return self._session.fallback

    @property
    def plan(self) -> Plan:
        """The plan after the fallback: the decision for each site, by its name."""
        return self._session.effective_plan()
