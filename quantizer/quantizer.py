"""The public class ``Quantizer``.

It holds the configuration and the state of one model. Each method runs one step of the workflow: calibration,
sensitivity analysis, fallback, QAT, quantization, ONNX export, engine build.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from quantizer.model_session import ModelSession, for_this_machine
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
from quantizer.utils.files import Store
from quantizer.utils.lazy import import_library
from quantizer.utils.sizes import DataSizes
from quantizer.utils.torch_modes import ordinary_tensors

if TYPE_CHECKING:
    from quantizer.engines import BuildResult

logger = logging.getLogger(__name__)


class Quantizer:
    """Calibrate, analyze, train and quantize one PyTorch model or ``ExportedProgram``.

    The methods work on proxies: copies that share the model's parameters. Only ``qat`` changes the model.

    Example::

        quantizer = Quantizer(backend="openvino", exclude={"names": ["classifier"]})
        quantizer.calibrate(model, batches)
        int8_model = quantizer.quantize(model)
        quantizer.export(int8_model, "model.onnx", example=batches[0])

    Args:
        source: a YAML file (of a run, or a ``quantizer:`` section alone), a mapping, a ``QuantizerConfig``, or None for
            the defaults.
        keywords: fields of ``QuantizerConfig``, which override those of ``source``.

    Attributes:
        config: the validated configuration, with a concrete backend in place of ``auto``.
        ranked: the sensitivity ranking of the run that saved this quantizer. None if there is none. ``sensitivity``
            returns it until ``amp`` or ``calib`` is called.

    Raises:
        ConfigError: the configuration is invalid. The message lists all problems.
    """

    def __init__(
        self, source: str | os.PathLike[str] | Mapping[str, Any] | QuantizerConfig | None = None, **keywords: Any
    ) -> None:
        self.config = for_this_machine(quantizer_config(source, **keywords))
        self._session = ModelSession(self.config)
        self.ranked: Sensitivity | None = None

    def __repr__(self) -> str:
        fallback = self._session.fallback
        groups = 0 if fallback is None else len(fallback.groups)
        suffix = f", {groups} {'group' if groups == 1 else 'groups'} in float" if groups else ""
        return f"Quantizer(backend={self.config.backend!r}, {self._session.described()}{suffix})"

    def proxy(self, model: Model) -> nn.Module:
        """Return a proxy with all quantizers off, whose outputs equal the model's bit for bit.

        It has the model's train or eval mode. Use it to check that the rewritten source computes the same::

            assert torch.equal(quantizer.proxy(model)(x), model(x))
        """
        with ordinary_tensors():
            return build_proxy(module_of(model), eager_attention=False)

    def calib(self, model: Model, *, resume: bool = False) -> nn.Module:
        """Return a proxy that computes in float and observes the ranges of all batches that run through it.

        The proxy is in eval mode and uses eager attention. The mode of the model does not change::

            proxy = quantizer.calib(model)
            with torch.no_grad():
                for batch in loader:
                    proxy(**batch)

        Under ``torch.distributed`` each rank calibrates on its own data, and all ranks must make the same later calls.

        Args:
            model: the float model.
            resume: continue the last calibration, also that of a loaded folder, instead of starting a new one.

        Raises:
            ProxyError: this quantizer is bound to another model.
            ConfigError: a rule of ``include`` or ``exclude`` matches nothing in the model.
            CalibrationError: ``resume=True`` without an earlier calibration, or with the calibration of another model.
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
        cache: str | os.PathLike[str] | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> nn.Module:
        """Calibrate on ``batches`` without gradients, and return the proxy of ``calib(model)``.

        Example::

            quantizer.calibrate(model, train_loader, samples=256)

        Each batch counts completely or not at all. If a batch fails or the call is interrupted:

        - An earlier calibration stays in use.
        - A first calibration, and one with ``resume=True``, keeps its complete batches. Continue it with
          ``resume=True``.

        Args:
            model: the float model.
            batches: a loader or iterable of batches, a ``Dataset``, or a tensor or array of samples. A batch is a
                mapping (keyword arguments), a tuple or list (positional arguments) or one tensor, with or without a
                label.
            samples: the largest number of samples to read; None: all.
            resume: continue the last calibration, as in ``calib``.
            progress: whether to show a progress bar; None: only in a terminal.
            split: all ranks of ``torch.distributed`` get the same batches, and each rank runs its share of them.
            cache: a folder that stores the calibration and the choices of its plans, so that an interrupted program can
                continue. They are reused for the same weights, code, data and configuration. All batches are held in
                memory then. Several ranks store nothing.
            tell: a callback with the names of the results that are reused from ``cache``.

        Raises:
            CalibrationError: the data is empty, a batch does not run through the model, or values are NaN. Or ``cache``
                is no folder for such results, or is used with ``resume``.
        """
        if resume and cache is not None:
            raise CalibrationError("calibrate(resume=True) continues in memory, so it takes no cache: pass one of them")
        with ordinary_tensors():
            with nullcontext() if resume else self._session.restored_on_failure():
                proxy = self.calib(model, resume=resume)
                calibration = self._session.calibration
                assert calibration is not None
                distribution = calibration.dealt()
                is_mine = distribution.is_mine if split else lambda batch: True
                is_stored = False
                if cache is not None and get_world_size() == 1:
                    batches = list(batches_of(proxy, batches, samples))
                    is_stored = calibration.restore_from(Store(cache, CalibrationError), batches, tell)
                if is_stored:
                    count = len(batches)
                else:
                    count = run_batches(proxy, batches, progress, samples=samples, doubt=True, is_mine=is_mine)
                    calibration.store_statistics()
                # Without ``split`` a rank may have no data, and not call this at all.
                all_ranks_call = split or get_world_size() == 1
                if count == 0 and all_ranks_call:
                    raise CalibrationError("the calibration data is empty: at least one batch is needed")
                if split:
                    distribution.check()
            if all_ranks_call:
                (sample_count,) = all_reduce_sum([calibration.extent()[1]])
                warn_user(doubts_of_calibration(module_of(model), int(sample_count)))
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
        """Return a proxy that measures the sensitivity of each precision group on the data that runs through it.

        Its outputs are those of the float model. ``sensitivity`` then ranks the groups::

            proxy = quantizer.amp(model)
            for batch in batches:
                proxy(**batch)
            print(quantizer.sensitivity)

        | ``measure`` | error of a group | work |
        |---|---|---|
        | ``gradient`` | second-order estimate of the divergence of the output | one backward pass |
        | ``output`` | divergence of the output | one forward pass per group |
        | ``local`` | relative error at the sites | one forward pass |
        | ``metric`` | drop of ``metric`` on its own data | one evaluation per group |

        Args:
            model: the float model.
            measure: one of the table.
            granularity: ``group`` (the smallest unit that can change precision), ``layer`` or ``block``.
            loss: for ``gradient``: a function from the output to a scalar; None: the divergence of the output.
            metric: for ``metric``: a function from a model to its score.
            higher_is_better: whether a higher score is better.

        Raises:
            CalibrationError: nothing was calibrated yet.
            SensitivityError: the measure or granularity is unknown, or an argument belongs to another measure.
        """
        with ordinary_tensors():
            score_metric = None if metric is None else Metric(function=metric, higher_is_better=higher_is_better)
            return self._session.measure(module_of(model), measure, granularity, loss, score_metric)

    def fallback(
        self,
        amp: nn.Module | None = None,
        *,
        num: int | None = None,
        ratio: float | None = None,
        names: Sequence[str] | None = None,
        max_drop: float | None = None,
        min_speedup: float | None = None,
        metric: Score | None = None,
        higher_is_better: bool = True,
        max_evaluations: int = 25,
        min_groups: int = 0,
        costs: str | Mapping[str, float] | None = None,
        latency_costs: LatencyCosts | None = None,
        cache: str | os.PathLike[str] | None = None,
        tell: Tell | None = None,
    ) -> Fallback:
        """Choose groups that fall back to float, by ``num``, ``ratio``, ``names``, ``max_drop`` or ``min_speedup``.

        Example::

            quantizer.fallback(proxy, num=4)  # the proxy that amp() returned
            quantizer.fallback(proxy, max_drop=0.01, metric=accuracy)

        Pass exactly one of the five. With ``latency_costs``, groups that are slower in low precision fall back as well.
        Without ``amp``, none of the five is needed then, and only these groups fall back. A second call replaces the
        choice of the first.

        Args:
            amp: the proxy that ``amp()`` returned, after data ran through it; ``names`` and ``latency_costs`` do not
                need it.
            num: the number of most sensitive groups that fall back.
            ratio: the share of all groups that fall back, 0 to 1.
            names: groups, or patterns of modules, sites and operands (``encoder.layer.0``, ``**.forward.add_0``).
            max_drop: the largest accepted drop of the score below the float model's; a negative value demands a gain.
                If no choice meets it, the one with the smallest drop is used, and ``Fallback.met`` is False.
            min_speedup: the least speedup over float by ``latency_costs``; the most accurate choice that reaches it is
                used.
            metric: for ``max_drop``: a function from a model to its score.
            higher_is_better: whether a higher score is better.
            max_evaluations: the largest number of calls of ``metric``.
            min_groups: for ``max_drop``: the least number of groups that fall back, the most sensitive first.
            costs: the cost of each group in float by name, or ``multiply_adds``. Groups with the highest error per cost
                fall back first. None: the times in ``latency_costs`` for ``max_drop``, otherwise 1 for each group.
            latency_costs: the result of ``measure_latency_costs`` for this quantizer.
            cache: for ``max_drop``: a folder that stores scores, so that an interrupted search can continue.
            tell: for ``max_drop``: a callback after each score, with the groups that were in float and the drop.

        Raises:
            SensitivityError: no data ran through ``amp``, it is missing, an argument is out of bounds, or the metric
                returns no number.
            CalibrationError: nothing was calibrated yet.
            ProxyError: ``amp`` is not the proxy that the last ``amp()`` of this quantizer returned.
        """
        with ordinary_tensors():
            score_metric = None if metric is None else Metric(function=metric, higher_is_better=higher_is_better)
            choice = {"num": num, "ratio": ratio, "names": names, "max_drop": max_drop, "min_speedup": min_speedup}
            search = {"max_evaluations": max_evaluations, "min_groups": min_groups, "cache": cache, "tell": tell}
            return self._session.choose(
                amp, choice, latency_costs=latency_costs, metric=score_metric, costs=costs, **search
            )

    def clear_fallback(self) -> None:
        """Quantize all groups of the plan again.

        It undoes ``fallback`` and the fallback that ``for_backend`` copied::

            quantizer.clear_fallback()
        """
        self._session.clear_fallback()

    def qat(self, model: Model, *, scales: Scales = "fixed", copy: bool = False) -> nn.Module:
        """Return a proxy for quantization-aware training (QAT), which rounds as the engine does.

        Example::

            proxy = quantizer.qat(model)
            optimizer = torch.optim.AdamW(proxy.parameters(), lr=1e-5)
            ...  # the usual training loop
            int8_model = quantizer.quantize(model)

        The rounding passes gradients straight through. The proxy shares its parameters with the model, so training
        changes the model. Groups that fell back are trained in float. A second call starts from the calibrated ranges
        again, with the current weights of the model.

        Args:
            model: the float model. The proxy has its train or eval mode.
            scales: ``fixed``, ``average`` (scales follow the values in training, at each ``Schedule.at``), ``learned``
                (scales are parameters of the proxy), or a mapping from patterns of sites and operands to these words.
                Fixed scales come from calibration, or from the first training batches if nothing was calibrated.
            copy: train a copy. ``quantize(model)`` then returns the trained copy, and the model does not change.

        Raises:
            ProxyError: ``model`` is a proxy, such as a frozen one. Train first and quantize afterwards.
            CalibrationError: ``average`` or ``learned`` scales, and nothing was calibrated yet.
            ConfigError: ``scales`` has an unknown word, or a pattern that matches nothing.
        """
        with ordinary_tensors():
            return self._session.train(module_of(model), scales, own=copy)

    def quantize(self, model: Model) -> nn.Module:
        """Return the quantized model: a frozen proxy in eval mode, with fixed ranges and integer weights.

        Example::

            int8_model = quantizer.quantize(model)
            logits = int8_model(**batch)

        It simulates the engine in PyTorch. Export it with ``export``, or run integer kernels with ``lower``.

        Raises:
            CalibrationError: nothing was calibrated yet.
        """
        with ordinary_tensors():
            return self._session.frozen(module_of(model))

    def for_backend(self, name: str, *, ranges: str | None = None, dtype: str | None = None) -> Quantizer:
        """Return a quantizer for another backend that reuses this calibration, so no data is needed.

        Example::

            gpu = quantizer.for_backend("tensorrt")
            gpu.export(gpu.quantize(model), "gpu.onnx", example=batch)

        Call ``quantize(model)`` on it first. Its plan equals, bit for bit, that of a quantizer for that backend
        calibrated on the same data. The fallback is copied; the sensitivity ranking is not. A warning says if the
        backend needs ranges that this calibration did not observe.

        A loaded quantizer has no data: ranges that were chosen by running data stay as they are, and biases are not
        corrected. A warning says both.

        Args:
            name: the backend.
            ranges: ``static`` or ``dynamic``, in place of ``activations.ranges``.
            dtype: ``int8`` or ``fp8``, in place of ``dtype``.

        Raises:
            ConfigError: the backend is unknown, or does not support a format of the configuration.
            CalibrationError: nothing was calibrated, the loaded folder has no statistics, or scales were loaded or
                trained.
        """
        with ordinary_tensors():
            activations = self.config.activations.model_dump() | ({"ranges": ranges} if ranges else {})
            formats = {"dtype": dtype} if dtype else {}
            other = Quantizer(self.config, backend=name, activations=activations, **formats)
            check_formats(other.config)
            other._session.inherit_from(self._session, self.config.backend)
            warn_user(self._unobserved_results(other.config))
            return other

    def _unobserved_results(self, other: QuantizerConfig) -> Iterator[str]:
        """Yield a warning if the target of ``other`` needs ranges of convolution outputs, which were not observed."""
        needed = other.target.quantizes_outputs and not self.config.target.quantizes_outputs
        count = sum(entry.kind == "conv" and entry.quantized for entry in self._session.decided().values())
        if needed and count:
            yield (
                f"{other.backend} runs a convolution in INT8 only if its result is quantized too. A calibration for "
                f"{self.config.backend} observes no results, so most of the {count} convolutions may run in floating "
                f'point. Calibrate with backend="{other.backend}", then call for_backend("{self.config.backend}")'
            )

    def inherit(self, other: Quantizer) -> None:
        """Take the calibration of ``other``, and share its plan and ranking if the configurations are equal.

        Calibrate neither quantizer afterwards::

            second = Quantizer(first.config)
            second.inherit(first)
        """
        with ordinary_tensors():
            self._session.inherit_from(other._session, other.config.backend, share=True)

    def load_scales(self, scales: Mapping[str, Tensor]) -> None:
        """Replace calibrated scales, until the next ``calib``.

        Example::

            scales = quantizer.scales()
            scales["fc.input"] *= 0.9
            quantizer.load_scales(scales)

        The quantized operands and the fallback stay the same. The sensitivity ranking is dropped.

        Args:
            scales: tensors by ``SITE.OPERAND``, as ``scales()`` returns them: [], or [C] for a weight with one scale
                per output channel. Operands without an entry keep their scales. Operands that read the same tensor
                share one scale.

        Raises:
            CalibrationError: nothing was calibrated yet, or scales are invalid. The message lists all of them.
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
        """Write a quantized model as Q/DQ ONNX for ``config.backend``, or a float model to compare it with.

        Example::

            quantizer.export(quantizer.quantize(model), "model.onnx", example=batch)

        Args:
            quant_model: the model that ``quantize()`` returned, or a float model.
            path: the ``.onnx`` file.
            example: one batch, as for ``calibrate``. Its values do not matter.
            opset: the ONNX opset; None: the target's, or a later one if a format needs it.
            dynamic_axes: dynamic axes as input name to {axis: dimension name}; None: see below.

        Without ``dynamic_axes``, these axes are dynamic, and may have another size in each call of the engine:

        - The first axis of each input, if it is as long as that of the first input. Its name is ``batch``.
        - Every axis whose size varied in calibration.
        - The second axis of each integer input [B, S], if S is above 1, as in token ids. Its name is ``sequence``. An
          input of another length S has its own name, ``NAME_sequence``.

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

        Example::

            quantizer.build("model.onnx", "model.engine")

        Args:
            onnx: the file that ``export`` wrote.
            engine: the file to write.
            dynamic: (minimum, optimum, maximum) size of each dimension by name, for TensorRT; None: batch 1, 8, 32 and
                sequence 16, 128, 512.
            compute_capability: the GPU or GPUs to build for ahead of time (``sm89``); TensorRT-RTX only.

        Raises:
            EngineError: the engine cannot be built.
            MissingDependencyError: the library of the engine is not installed.
        """
        from quantizer.engines import BuildOptions, build_engine

        sizes = dynamic or {"batch": (1, 8, 32), "sequence": (16, 128, 512)}
        options = BuildOptions(dynamic=sizes, compute_capability=compute_capability)
        return build_engine(self.config.backend, Path(onnx), Path(engine), options)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Save configuration, plan, ranges, histograms and fallback in a folder, as YAML and safetensors.

        Example::

            quantizer.save("calibrated")
            quantizer = Quantizer.load("calibrated")

        An existing folder is replaced only if ``save`` wrote it and it contains nothing else.

        Raises:
            QuantizerError: nothing was calibrated yet, or the folder cannot be written or must not be replaced.
        """
        plan, session = self._session.refitted(), self._session
        return save_state(folder, plan, session.products(), session.document(), session.seen())

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Quantizer:
        """Return the quantizer that ``save`` wrote; its ``quantize()`` returns the same model bit for bit.

        Example::

            int8_model = Quantizer.load("calibrated").quantize(model)

        ``calib(model, resume=True)`` continues the calibration. The folder contains no batches, so algorithms that run
        batches (range search, bias correction) use only the new ones.

        Raises:
            QuantizerError: ``save`` did not write the folder, or the folder is damaged.
        """
        with ordinary_tensors():
            plan, products, document, statistics = load_state(folder)
            try:
                loaded = cls(document["config"])
                loaded._session.load(plan, products, document, statistics)
            except QuantizerError as error:
                raise QuantizerError(f"{folder} cannot be loaded: {error}") from error
            return loaded

    def inspect(self, model: Model) -> Coverage:
        """Return the coverage of a model before calibration: its sites, and which of them the rules exclude.

        Example::

            print(Quantizer().inspect(model))
        """
        proxy = proxied_copy(settings_of(self.config), module_of(model))
        plan = make_plan(proxy, make_observation(proxy).seen)
        return Coverage(plan, proxy.skipped, patches=proxy.patches)

    def diff(self, model: Model) -> str:
        """Return the changes of the rewriting to the source of the model, as a unified diff.

        Example::

            print(quantizer.diff(model))
        """
        return source_diff(module_of(model))

    def lower(self, model: Model, *, triton: bool = False) -> nn.Module:
        """Return a model for inference that runs ``quantize(model)`` with torch's integer kernels.

        Example::

            fast = torch.compile(quantizer.lower(model))

        | device | INT8 | FP8 |
        |---|---|---|
        | CPU | linears and convolutions in oneDNN | none |
        | GPU | linears in ``torch._int_mm`` | linears in ``torch._scaled_mm`` |

        All other code stays the Python of the model, with its control flow and caches, so models that do not export can
        be lowered. Sites without a kernel keep the simulated rounding of ``quantize(model)``; ``kernels`` lists them
        with the reason. Attention without quantized matrix multiplications stays as the model computes it.

        To save the result, save this quantizer, and lower the model again after ``Quantizer.load``.

        Args:
            model: the float model.
            triton: on a GPU, compute linears with static ranges in one Triton kernel each, with scales and bias.

        Raises:
            MissingDependencyError: ``triton`` is not installed.
        """
        with ordinary_tensors():
            if triton:
                import_library("triton", "triton")
            # Not at the top: nothing else of a quantizer needs the engines.
            from quantizer.engines.for_this_cpu import EXACT_QMAX
            from quantizer.utils.cpu import saturates

            widest = EXACT_QMAX if saturates() else None
            lowered = lower(self._session.frozen(module_of(model), fused=True), Lowering(widest=widest, triton=triton))
            kernels = self.kernels(lowered)
            if len(kernels) and not any(row.kernel for row in kernels):
                logger.warning(
                    "lower() found no kernel, so the model is the same as after quantize(): %s", kernels[0].reason
                )
            return lowered

    def kernels(self, lowered: nn.Module) -> Kernels:
        """Return the torch kernel of each quantized site of a lowered model, or the reason for a missing one.

        Example::

            print(quantizer.kernels(quantizer.lower(model)))
        """
        return Kernels(kernels_of(lowered))

    def simulate(self, model: Model) -> nn.Module:
        """Return the quantized model with its float part in the float type of the target, such as float16.

        Its scores predict those of the engine. It cannot be exported. For a float32 target it equals
        ``quantize(model)``::

            score = accuracy(quantizer.simulate(model))
        """
        with ordinary_tensors():
            return simulate(
                self._session.frozen(module_of(model)),
                self.config.target.torch_dtype,
                self._session.regions(),
            )

    def scales(self) -> dict[str, Tensor]:
        """Return the scale of every quantized operand by ``SITE.OPERAND``, float32 [] or [C].

        Example::

            torch.save(quantizer.scales(), "scales.pt")
        """
        with ordinary_tensors():
            return scales_of(self._session.effective_plan())

    @property
    def coverage(self) -> Coverage:
        """All sites with their state and reason, and all matrix multiplications that torch computed in calibration."""
        return self._session.coverage()

    @property
    def passes(self) -> float:
        """Number of passes of all calibration data through the model: one for the statistics, the others for the plan.

        A plan of stored choices, or of another backend's equal ones, needs no more passes. 0 without a calibration.
        """
        return self._session.passes()

    @property
    def layers(self) -> Layers:
        """A table with formats, range, SQNR in dB, share of the multiply-adds and sensitivity of each layer that ran.

        ``layers.timed(latency_costs)`` adds the latencies of ``measure_latency_costs`` and the latency cost of each
        group.
        """
        try:
            sensitivity = self.sensitivity
        except SensitivityError:  # nothing was measured yet
            sensitivity = None
        return Layers(self._session.coverage(), sensitivity)

    @property
    def ranges(self) -> Ranges:
        """The calibrated range of every operand."""
        return Ranges(self._session.effective_plan())

    def histogram(self, operand: str) -> OperandHistogram:
        """Return the histogram of an operand in calibration, with candidates for its range.

        Example::

            quantizer.histogram("fc.input")

        Args:
            operand: ``SITE.OPERAND``.
        """
        calibration = self._session.calibration
        observation = calibration.observation() if calibration is not None else None
        return OperandHistogram(histogram_of(operand, self._session.effective_plan(), observation))

    @property
    def sensitivity(self) -> Sensitivity:
        """The precision groups, ranked by the error that ``amp`` measured.

        Raises:
            SensitivityError: nothing was measured yet.
        """
        session = self._session
        if self.ranked is not None and session.amp is None and session.calibration is None:
            return self.ranked
        try:
            return session.sensitivity()
        except SensitivityError as error:
            if session.amp is not None or session.calibration is not None or not session.has_plan:
                raise
            hint = "a saved quantizer contains no ranking; the ranking of a run is in its report.json"
            raise SensitivityError(f"{error}; {hint}") from error

    def diagnose(self, model: Model, batches: Any, *, num: int = 3) -> Diagnoses:
        """Return the groups that reduce the SQNR of the output most, with the cause and the best fix of each.

        Example::

            print(quantizer.diagnose(model, batches[:4]))

        The cost of a group is the SQNR of the model's output with only this group quantized. The gain of a fix is
        measured: the model is calibrated on ``batches`` with each candidate setting. The candidates come from the
        ranking of ``amp()`` if it measured the output with the current plan and weights; otherwise they are ranked on
        ``batches``.

        Args:
            model: the float model.
            batches: a few calibration batches, as for ``calibrate``.
            num: the number of groups.

        Raises:
            CalibrationError: ``batches`` is empty, or nothing was calibrated yet.
        """
        with ordinary_tensors():
            model = module_of(model)
            sample_batches = list(batches_of(model, batches))
            if not sample_batches:
                raise CalibrationError("diagnose() needs data: pass a few calibration batches")
            plan = self._session.fitted(model, self._session.effective_plan())
            amp = self._session.amp
            # A ranking of another plan or of other weights is not valid.
            current_plan = self._session.fitted(model, self._session.decided())
            is_current = amp is not None and plan_digest(amp.measured_plan) == plan_digest(current_plan)
            ranked = [entry.group for entry in amp.by_output] if amp is not None and is_current else []
            return Diagnoses(
                diagnose_groups(self.config, self._session.trained(model), plan, sample_batches, num, ranked)
            )

    @property
    def chosen_fallback(self) -> Fallback | None:
        """The current fallback; None before ``fallback`` and after ``clear_fallback``."""
        return self._session.fallback

    @property
    def plan(self) -> Plan:
        """The decision for each site by its name, after the fallback."""
        return self._session.effective_plan()
