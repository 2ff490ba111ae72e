"""``Quantizer``: the facade of all stages for one model, configured by YAML."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from quantizer.algorithms.algorithm import proxied_copy
from quantizer.algorithms.make_plan import make_observation, make_plan
from quantizer.algorithms.qat import Scales
from quantizer.algorithms.sensitivity import Fallback, Loss, Metric, Score, Tell
from quantizer.algorithms.sensitivity.latency_costs import LatencyCosts
from quantizer.algorithms.sensitivity.session import Layers, Sensitivity
from quantizer.config import QuantizerConfig, quantizer_config
from quantizer.config.schema import check_formats
from quantizer.diagnose import Diagnoses, diagnose_groups
from quantizer.errors import CalibrationError, QuantizerError, SensitivityError
from quantizer.model_session import ModelSession, for_this_cpu
from quantizer.observe.float16_simulation import simulate
from quantizer.plan.coverage import Coverage, Ranges
from quantizer.plan.histograms import OperandHistogram, histogram_of
from quantizer.plan.replace_scales import scales_of, with_scales
from quantizer.plan.saved_folder import load_state, save_state
from quantizer.plan.site_plan import Plan, plan_digest
from quantizer.proxy.build import Model, build_proxy, module_of, refuse_compiled, source_diff
from quantizer.proxy.lower import Kernels, Lowering, kernels_of, lower
from quantizer.settings import settings_of
from quantizer.utils.batches import batches_of, doubts_of_calibration, run_batches, warn_user
from quantizer.utils.distributed import all_reduce_sum, get_world_size
from quantizer.utils.sizes import DataSizes
from quantizer.utils.torch_modes import ordinary_tensors

if TYPE_CHECKING:
    from quantizer.engines import BuildResult

logger = logging.getLogger(__name__)


class Quantizer:
    """Calibration, sensitivity, training and quantization of one model or ``ExportedProgram``, through proxies of it.

    Args:
        source: a YAML file (of a run, or a ``quantizer:`` section alone), a mapping, a ``QuantizerConfig``, or None.
        keywords: fields of ``QuantizerConfig`` that override those of ``source``:
            ``Quantizer(backend="openvino", exclude={"names": ["classifier"]})``.

    Attributes:
        ranked: the ranking of a run that saved this quantizer, shown until it measures or calibrates itself; None: it
            comes from no run, or the run measured none.

    Raises:
        ConfigError: the configuration has problems; all of them are listed.
    """

    def __init__(
        self, source: str | os.PathLike[str] | Mapping[str, Any] | QuantizerConfig | None = None, **keywords: Any
    ) -> None:
        self.config = for_this_cpu(quantizer_config(source, **keywords))
        self._session = ModelSession(self.config)
        self.ranked: Sensitivity | None = None

    def __repr__(self) -> str:
        fallback = self._session.fallback
        groups = 0 if fallback is None else len(fallback.groups)
        kept = f", {groups} {'group' if groups == 1 else 'groups'} in float" if groups else ""
        return f"Quantizer(backend={self.config.backend!r}, {self._session.described()}{kept})"

    def proxy(self, model: Model) -> nn.Module:
        """Return a proxy with every quantizer off: it equals the model bit for bit, and has its train or eval mode."""
        with ordinary_tensors():
            return build_proxy(module_of(model), eager_attention=False)

    def calib(self, model: Model, *, resume: bool = False) -> nn.Module:
        """Return a proxy that returns the float outputs (with eager attention) and observes all batches.

        It is in eval mode; the mode of the model does not change. A second call starts a new calibration;
        ``resume=True`` continues the last one, also that of the folder from which this quantizer was loaded.

        Under ``torch.distributed`` each rank calibrates on its own data, and all ranks must make the same later calls.

        Raises:
            ProxyError: this quantizer is bound to another model.
            ConfigError: a rule of ``include`` or ``exclude`` matches nothing in the model.
            CalibrationError: ``resume=True`` without an earlier calibration, or with that of another model.
        """
        with ordinary_tensors():
            return self._session.calibration_proxy(module_of(model), resume=resume)

    def calibrate(
        self,
        model: Model,
        batches: Any,
        *,
        samples: int | None = None,
        resume: bool = False,
        progress: bool | None = None,
        split: bool = False,
    ) -> nn.Module:
        """Run all of ``batches`` through ``calib(model)``, without gradients.

        A batch counts as a whole or not at all. If one fails, or the call is interrupted, an earlier calibration stays
        in use; a first one, or one with ``resume=True``, keeps its complete batches and can be resumed.

        Args:
            batches: a loader or iterable of batches, each a mapping (keyword arguments), a tuple or list (positional),
                or one tensor, with or without a label; a ``Dataset``; a tensor or array of samples. See ``batches_of``.
            samples: at most this many samples, of data that has more or no end.
            resume: as in ``calib``.
            progress: whether to show a progress bar; None: only in a terminal.
            split: all ranks of ``torch.distributed`` are given the same batches, and each runs its part of them.

        Raises:
            CalibrationError: there is no data or it fails, a batch does not run through the model, or values are NaN.
        """
        with ordinary_tensors():
            with nullcontext() if resume else self._session.replaced_as_a_whole():
                proxy = self.calib(model, resume=resume)
                calibration = self._session.calibration
                assert calibration is not None
                dealt = calibration.dealt()
                mine = dealt.is_mine if split else lambda batch: True
                count = run_batches(proxy, batches, progress, samples=samples, doubt=True, is_mine=mine)
                # Without ``split`` a rank may have no data, and not call this at all.
                together = split or get_world_size() == 1
                if count == 0 and together:
                    raise CalibrationError("the calibration data is empty: at least one batch is needed")
                if split:
                    dealt.check()
            if together:
                (seen,) = all_reduce_sum([calibration.extent()[1]])
                warn_user(doubts_of_calibration(module_of(model), int(seen)))
                calibration.warn_of_constants()
            return proxy

    def amp(
        self,
        model: Model,
        *,
        measure: str = "gradient",
        granularity: str = "group",
        loss: Loss | None = None,
        metric: Score | None = None,
        higher_is_better: bool = True,
    ) -> nn.Module:
        """Return a proxy that returns the float outputs and measures, at each call, the error of each group of sites.

        Args:
            measure: ``gradient`` (a second-order estimate of the output's divergence: one backward pass), ``output``
                (the divergence itself: a pass for each group), ``local`` (the relative error at the sites) or
                ``metric`` (the drop of the metric on its own data: an evaluation for each group).
            granularity: ``group`` (the smallest unit that can change precision), ``layer`` or ``block``.
            loss: for ``gradient``: a function of the output that gives a scalar; None: the output's divergence.
            metric: for ``metric``: a function of a model that gives its score.
            higher_is_better: whether a higher score is better.

        Raises:
            CalibrationError: nothing was calibrated yet.
            SensitivityError: the measure or granularity is unknown, or an argument belongs to another measure.
        """
        with ordinary_tensors():
            wrapped = None if metric is None else Metric(function=metric, higher_is_better=higher_is_better)
            return self._session.measure(module_of(model), measure, granularity, loss, wrapped)

    def fallback(
        self,
        amp: nn.Module | None,
        *,
        num: int | None = None,
        ratio: float | None = None,
        names: Sequence[str] | None = None,
        max_drop: float | None = None,
        min_speedup: float | None = None,
        metric: Score | None = None,
        higher_is_better: bool = True,
        max_evaluations: int = 25,
        costs: str | Mapping[str, float] | None = None,
        latency_costs: LatencyCosts | None = None,
        cache: str | os.PathLike[str] | None = None,
        tell: Tell | None = None,
    ) -> Fallback:
        """Let groups fall back to float, chosen by one of ``num``, ``ratio``, ``names``, ``max_drop``, ``min_speedup``.

        A second call replaces the first. With ``latency_costs`` those groups fall back, too, that low precision makes
        slower.

        Args:
            amp: the proxy that ``amp()`` returned; None: only those fall back that ``latency_costs`` finds slower.
            num: how many of the most sensitive groups fall back.
            ratio: the share of all groups that fall back.
            names: groups, or patterns of modules, sites and operands (``encoder.layer.0``, ``**.forward.add_0``).
            max_drop: how much worse than the float model's the score may be, or below 0 how much better it has to be;
                where no plan is, the one with the smallest drop falls back (``Fallback.met``).
            min_speedup: how many times as fast as in float the plan has to be, by ``latency_costs``: the most
            accurate such. metric: for ``max_drop``: a function of a model that gives its score.
            higher_is_better: whether a higher score is better.
            max_evaluations: the largest number of calls of the metric.
            costs: of groups in float, by name, or ``multiply_adds``: those with the highest error for their cost fall
                back first; None: for ``max_drop`` the times in ``latency_costs``, else 1 for each.
            latency costs: what ``measure_latency_costs`` returned for this quantizer.
            cache: for ``max_drop``: a folder for scores, with which an interrupted search continues.
            tell: for ``max_drop``: called after each score, with the groups that were float and the drop.

        Raises:
            SensitivityError: nothing went through ``amp``, an argument is out of bounds, or the metric gives no number.
            ProxyError: ``amp`` is not the proxy that this quantizer's ``amp()`` returned last.
        """
        with ordinary_tensors():
            wrapped = None if metric is None else Metric(function=metric, higher_is_better=higher_is_better)
            by = {"num": num, "ratio": ratio, "names": names, "max_drop": max_drop, "min_speedup": min_speedup}
            search = {"max_evaluations": max_evaluations, "cache": cache, "tell": tell}
            return self._session.choose(amp, latency_costs=latency_costs, metric=wrapped, costs=costs, **search, **by)

    def clear_fallback(self) -> None:
        """Undo ``fallback``, and what ``for_backend`` carried over: all groups of the plan are quantized again."""
        self._session.clear_fallback()

    def qat(self, model: Model, *, scales: Scales = "fixed", copy: bool = False) -> nn.Module:
        """Return a proxy to train: it rounds as the engine will, and gradients pass through the rounding.

        Training changes the model, whose parameters it shares; no other method does. What fell back is trained in
        float. A second call starts from the ranges of calibration again, with the model's current weights.

        Args:
            model: the float model; the proxy is in its train or eval mode.
            scales: ``fixed`` (those of calibration, or of the first training batches if nothing was calibrated),
                ``average`` (they follow the values in training, at each ``Schedule.at``) or ``learned`` (parameters of
                the proxy, trained with the weights); or a mapping from patterns of sites and operands to these.
            copy: train a copy; ``quantize(model)`` then returns the trained copy, and the model does not change.

        Raises:
            ProxyError: ``model`` is a proxy, such as a frozen one: train first, and quantize afterwards.
            CalibrationError: scales are to change in training, and nothing was calibrated yet.
            ConfigError: a kind of scales is unknown, or a pattern matches nothing.
        """
        with ordinary_tensors():
            return self._session.train(module_of(model), scales, own=copy)

    def quantize(self, model: Model) -> nn.Module:
        """Return the frozen proxy, in eval mode: fixed ranges, and the weights, trained or not, stored as integers.

        Raises:
            CalibrationError: nothing was calibrated yet.
        """
        with ordinary_tensors():
            return self._session.frozen(module_of(model))

    def for_backend(self, name: str, *, ranges: str | None = None) -> Quantizer:
        """Return a quantizer for the backend ``name``, from this one's calibration: no data is needed again.

        Its plan equals, bit for bit, that of a quantizer configured for that backend and calibrated on the same data.
        What fell back is float there too, with its groups of that backend; what ``amp`` measured is not copied.
        A backend that needs the ranges of results of convolutions, which this one's does not observe, is warned of.
        ``ranges`` (static or dynamic) replaces ``activations.ranges``. A loaded quantizer has no data: ranges that were
        chosen by running it stay, biases are not corrected, and a warning says both. Call ``quantize(model)`` first.

        Raises:
            ConfigError: the backend is unknown, or cannot compute in a format of the configuration.
            CalibrationError: nothing was calibrated yet, the folder from which this quantizer was loaded has no
                statistics, or scales were loaded or trained.
        """
        with ordinary_tensors():
            activations = self.config.activations.model_dump() | ({"ranges": ranges} if ranges else {})
            other = Quantizer(self.config, backend=name, activations=activations)
            check_formats(other.config)
            other._session.inherit_from(self._session, self.config.backend)
            warn_user(self._unobserved_results(other.config))
            return other

    def _unobserved_results(self, other: QuantizerConfig) -> Iterator[str]:
        """Yield a warning where the target of ``other`` needs ranges that this calibration did not observe."""
        needed = other.target.quantizes_outputs and not self.config.target.quantizes_outputs
        count = sum(entry.kind == "conv" and entry.quantized for entry in self._session.decided().values())
        if needed and count:
            yield (
                f"{other.backend} runs a convolution in INT8 only if its result is quantized too. A calibration for "
                f"{self.config.backend} observes no results, so most of the {count} convolutions may run in floating "
                f'point. Calibrate with backend="{other.backend}", then call for_backend("{self.config.backend}")'
            )

    def inherit(self, other: Quantizer) -> None:
        """Take the calibration of ``other``; of an equal configuration plan and ranking too: calibrate neither then."""
        with ordinary_tensors():
            self._session.inherit_from(other._session, other.config.backend, share=True)

    def load_scales(self, scales: Mapping[str, Tensor]) -> None:
        """Replace the scales of calibration by other ones, until the next ``calib``.

        The quantized operands and the fallback stay the same; the errors that ``amp`` measured are dropped.

        Args:
            scales: by ``SITE.OPERAND``, as ``scales()`` returns them: [], or [C] for a weight with a scale for each
                output channel. Operands that are not named keep their scales; operands that read one tensor share one.

        Raises:
            CalibrationError: nothing was calibrated yet, or scales are invalid: all of these are listed.
        """
        with ordinary_tensors():
            self._session.replace(with_scales(self._session.refitted(), scales, self.config.target.torch_dtype))

    def export(
        self,
        quant_model: nn.Module,
        path: str | os.PathLike[str],
        example: Any,
        *,
        opset: int | None = None,
        dynamic_axes: Mapping[str, Mapping[int, str]] | DataSizes | None = None,
    ) -> Path:
        """Write the frozen proxy as Q/DQ ONNX for ``config.backend``, or a float model to compare it with.

        Args:
            quant_model: the frozen proxy that ``quantize()`` returned, or a float model.
            path: the ``.onnx`` file.
            example: one batch, as for ``calibrate``; its values do not matter.
            opset: the ONNX opset; None: the target's, or a later one if a format needs it.
            dynamic_axes: input name to {axis: dimension name}; None: axis 0 of every input is ``batch``, each axis
                whose size varied in the calibration is open, and axis 1 of every matrix of integers [B, S] is
                ``sequence``, or ``NAME_sequence`` if it has another length. An axis 1 of length 1 is fixed, and so is
                an axis 0 whose length is not that of the first input.

        Raises:
            ProxyError: ``quant_model`` is the proxy of ``calib()``, ``amp()`` or ``qat()``.
            ExportError: the model cannot be exported, or the file cannot be written.
        """
        refuse_compiled(quant_model)
        with ordinary_tensors():
            return self._session.export(quant_model, Path(path), example, opset, dynamic_axes)

    def build(
        self,
        onnx: str | os.PathLike[str],
        engine: str | os.PathLike[str],
        *,
        dynamic: Mapping[str, tuple[int, int, int]] | None = None,
        compute_capability: str | Sequence[str] | None = None,
    ) -> BuildResult:
        """Build an engine of ``config.backend`` from an ONNX file.

        Args:
            onnx: the file that ``export`` wrote.
            engine: the file to write.
            dynamic: (minimum, optimum, maximum) of each dimension by name, for TensorRT; None: batch 1, 8, 32 and
                sequence 16, 128, 512.
            compute_capability: the GPU to build for ahead of time (``sm89``), or several; TensorRT-RTX only.

        Raises:
            EngineError: the engine cannot be built.
            MissingDependencyError: the engine's library is not installed.
        """
        from quantizer.engines import BuildOptions, build_engine

        sizes = dynamic or {"batch": (1, 8, 32), "sequence": (16, 128, 512)}
        options = BuildOptions(dynamic=sizes, compute_capability=compute_capability)
        return build_engine(self.config.backend, Path(onnx), Path(engine), options)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write configuration, plan, ranges, histograms and fallback to a folder: YAML and safetensors.

        A folder is replaced only if ``save`` wrote it and it holds nothing else.

        Raises:
            QuantizerError: nothing was calibrated yet, or the folder cannot be written or must not be replaced.
        """
        plan, session = self._session.refitted(), self._session
        return save_state(folder, plan, session.products(), session.document(), session.seen())

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Quantizer:
        """Return the quantizer that ``save`` wrote; its ``quantize()`` returns the same model, bit for bit.

        ``calib(model, resume=True)`` continues the calibration exactly, except that ranges which are chosen by running
        batches are chosen on the new batches, and biases corrected by them: the folder holds none.

        Raises:
            QuantizerError: the folder was not written by ``save``, or is damaged.
        """
        with ordinary_tensors():
            plan, products, document, observed = load_state(folder)
            try:
                loaded = cls(document["config"])
                loaded._session.load(plan, products, document, observed)
            except QuantizerError as error:
                raise QuantizerError(f"{folder} cannot be taken up: {error}") from error
            return loaded

    def inspect(self, model: Model) -> Coverage:
        """Return the coverage of a model before calibration: its sites, and which of them rules leave out."""
        proxy = proxied_copy(settings_of(self.config), module_of(model))
        plan = make_plan(proxy, make_observation(proxy).seen)
        return Coverage(plan, proxy.skipped, patches=proxy.patches)

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
        products are not quantized is the model's own, fused or not.

        To save it, save this quantizer; after ``Quantizer.load`` lower the model again.
        """
        with ordinary_tensors():
            # Not at the top: nothing else of a quantizer needs the engines.
            from quantizer.engines.for_this_cpu import EXACT_QMAX
            from quantizer.utils.cpu import saturates

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
                self._session.regions(),
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

        ``layers.timed(latency_costs)`` has the times of ``measure_latency_costs`` too, and what each group would cost
        in float.
        """
        try:
            sensitivity = self.sensitivity
        except SensitivityError:  # nothing was measured yet
            sensitivity = None
        return Layers(self._session.coverage(), sensitivity)

    @property
    def ranges(self) -> Ranges:
        """The range of every operand."""
        return Ranges(self._session.effective_plan())

    def histogram(self, operand: str) -> OperandHistogram:
        """Return the histogram of an operand (``SITE.OPERAND``) in calibration, with candidates for its range."""
        calibration = self._session.calibration
        seen = calibration.observation() if calibration is not None else None
        return OperandHistogram(histogram_of(operand, self._session.effective_plan(), seen))

    @property
    def sensitivity(self) -> Sensitivity:
        """The groups, ranked by their errors."""
        session = self._session
        if self.ranked is not None and session.amp is None and session.calibration is None:
            return self.ranked
        try:
            return session.sensitivity()
        except SensitivityError as error:
            if session.amp is not None or session.calibration is not None or not session.has_plan:
                raise
            where = "this quantizer was loaded, and its folder holds no ranking; report.json holds that of a run"
            raise SensitivityError(f"{error}; {where}") from error

    def diagnose(self, model: Model, batches: Any, *, num: int = 3) -> Diagnoses:
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
                raise CalibrationError("diagnose() measures on data: give a few calibration batches")
            plan = self._session.fitted(model, self._session.effective_plan())
            amp = self._session.amp
            # A ranking of another plan, or of other weights, tells nothing of this one.
            now = self._session.fitted(model, self._session.decided())
            holds = amp is not None and plan_digest(amp.measured_plan) == plan_digest(now)
            ranked = [entry.group for entry in amp.by_output] if amp is not None and holds else []
            return Diagnoses(diagnose_groups(self.config, self._session.trained(model), plan, given, num, ranked))

    @property
    def chosen_fallback(self) -> Fallback | None:
        """The current fallback; None before ``fallback`` and after ``clear_fallback``."""
        return self._session.fallback

    @property
    def plan(self) -> Plan:
        """The plan after the fallback: the decision for each site, by its name."""
        return self._session.effective_plan()
