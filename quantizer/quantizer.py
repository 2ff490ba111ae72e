"""``Quantizer``: one object over the stages, configured by YAML."""

from __future__ import annotations

import os
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

from torch import Tensor
from torch import nn

from quantizer.common.batches import run_batches
from quantizer.common.distributed import get_world_size
from quantizer.config import QuantizerConfig
from quantizer.config import quantizer_config
from quantizer.config.feasibility import check_formats
from quantizer.errors import CalibrationError
from quantizer.errors import ProxyError
from quantizer.errors import QuantizerError
from quantizer.float16.simulate import simulate
from quantizer.model_session import ModelSession
from quantizer.plan.replace_scales import with_scales
from quantizer.plan.saved_folder import load_state
from quantizer.plan.saved_folder import save_state
from quantizer.proxy.build import build_proxy
from quantizer.qat import Scales
from quantizer.sensitivity import Fallback
from quantizer.sensitivity import Loss
from quantizer.sensitivity import Metric
from quantizer.sensitivity import Score
from quantizer.sensitivity.session import SensitivitySession
from quantizer.views.quantizer_views import QuantizerViews

if TYPE_CHECKING:
    from quantizer.engines import BuildResult

__all__ = ["Quantizer"]


class Quantizer(QuantizerViews):
    """Calibration, sensitivity, training and quantization of one model, through proxies of it.

    Args:
        source: a YAML file (a run file or a ``quantizer:`` section alone), a mapping, a ``QuantizerConfig``, or None
            for the defaults.
        keywords: fields of ``QuantizerConfig`` that override those of ``source``:
            ``Quantizer(backend="openvino", exclude={"names": ["classifier"]})``.

    Raises:
        ConfigError: the configuration has problems; all of them are listed.
    """

    def __init__(
        self, source: str | os.PathLike[str] | Mapping[str, Any] | QuantizerConfig | None = None, **keywords: Any
    ) -> None:
        self.config = quantizer_config(source, **keywords)
        self._session = ModelSession(self.config)

    def proxy(self, model: nn.Module) -> nn.Module:
        """Return a proxy with every quantizer off: bit for bit the model, in the model's own train or eval mode."""
        return build_proxy(model, eager_attention=False)

    def calib(self, model: nn.Module, *, resume: bool = False) -> nn.Module:
        """Return a proxy that gives the float outputs (with eager attention) and observes what goes through it.

        It is in eval mode; the model keeps its own. A second call starts afresh; ``resume=True`` goes on with what was
        seen so far, also with what the folder that this quantizer was loaded from had seen.

        Under ``torch.distributed`` each rank calibrates on its own data, and all must ask for the outcome alike.

        Raises:
            ProxyError: this quantizer serves another model already.
            ConfigError: a rule of ``include`` or ``exclude`` matches nothing in the model.
            CalibrationError: ``resume=True`` and there is nothing to go on with, or it is of another model.
        """
        return self._session.calibration_proxy(model, resume=resume)

    def calibrate(
        self, model: nn.Module, batches: Iterable[Any], *, resume: bool = False, progress: bool | None = None
    ) -> nn.Module:
        """Run all of ``batches`` through ``calib(model)``, without gradients.

        A batch counts as a whole or not at all. Where one fails, or this is interrupted, an earlier calibration goes on
        to count; of a first one, and with ``resume=True``, the batches before stay, and ``resume=True`` goes on.

        Args:
            batches: each a mapping (keyword arguments), a tuple or list (positional), or one tensor.
            resume: as in ``calib``.
            progress: show a progress bar; None: only in a terminal.

        Raises:
            CalibrationError: there is no data, a batch does not run through the model, or it has NaN.
        """
        with nullcontext() if resume else self._session.replaced_as_a_whole():
            proxy = self.calib(model, resume=resume)
            # Of several ranks, one may be left without data.
            if run_batches(proxy, batches, progress) == 0 and get_world_size() == 1:
                raise CalibrationError("the calibration data is empty: at least one batch is needed")
        return proxy

    def amp(
        self,
        model: nn.Module,
        *,
        measure: str = "gradient",
        granularity: str = "group",
        loss: Loss | None = None,
        metric: Score | None = None,
        higher_is_better: bool = True,
    ) -> nn.Module:
        """Return a proxy that gives the float outputs and measures, at each call, what every group of sites costs.

        Args:
            measure: ``gradient`` (a second-order estimate of the output's divergence: one backward pass for all
                groups), ``output`` (that divergence itself: a pass for each), ``local`` (the relative error at the
                sites) or ``metric`` (how much worse the metric is, on its own data: an evaluation for each).
            granularity: ``group`` (the smallest thing that may change precision), ``layer`` or ``block``.
            loss: for ``gradient``: takes the model's output and gives a scalar; None: the divergence of the output.
            metric: for ``metric``: takes a model and gives its score.
            higher_is_better: which way the metric is better.

        Raises:
            CalibrationError: nothing was calibrated yet.
            SensitivityError: there is no such measure or granularity, or an argument belongs to another measure.
        """
        self._session.bind(model)
        wrapped = None if metric is None else Metric(function=metric, higher_is_better=higher_is_better)
        plan = self._session.fitted(model, self._session.decided())
        self._session.amp = SensitivitySession(self._session.trained(model), plan, measure, granularity, loss, wrapped)
        return self._session.amp.proxy

    def fallback(
        self,
        amp: nn.Module,
        *,
        num: int | None = None,
        ratio: float | None = None,
        names: Sequence[str] | None = None,
        max_drop: float | None = None,
        metric: Score | None = None,
        higher_is_better: bool = True,
        max_evaluations: int = 25,
        costs: str | Mapping[str, float] | None = None,
        cache: str | os.PathLike[str] | None = None,
    ) -> Fallback:
        """Put groups back to float: one of ``num``, ``ratio``, ``names`` and ``max_drop`` says which.

        A second call replaces the first.

        Args:
            amp: the proxy that ``amp()`` returned.
            num: this many of the most sensitive groups.
            ratio: this share of all groups.
            names: groups, or patterns of modules, sites and operands (``encoder.layer.0``, ``**.forward.add_0``).
            max_drop: as few groups as let ``metric`` be at most so much worse than the float model's.
            metric: for ``max_drop``: takes a model and gives its score.
            higher_is_better: which way the metric is better.
            max_evaluations: how often the metric is called at most.
            costs: what a group costs in float, by name, or ``multiply_adds``; those that win most for their cost are
                put back first. None: all cost the same.
            cache: for ``max_drop``: a JSON file that keeps each score, so that a search that was interrupted goes on.

        Raises:
            SensitivityError: no data went through ``amp`` yet, an argument is out of bounds, or the metric gives no
                number.
            ProxyError: ``amp`` is not the proxy that this quantizer's ``amp()`` returned last.
        """
        measured = self._session.amp
        if measured is None or amp is not measured.proxy:
            raise ProxyError("fallback() takes the proxy that amp() of this same Quantizer returned last")
        wrapped = None if metric is None else Metric(function=metric, higher_is_better=higher_is_better)
        chosen = measured.fallback(
            num=num,
            ratio=ratio,
            names=names,
            max_drop=max_drop,
            metric=wrapped,
            max_evaluations=max_evaluations,
            costs=costs,
            cache=cache,
        )
        self._session.put_back(chosen, measured.measured_plan)
        return chosen

    def clear_fallback(self) -> None:
        """Undo ``fallback``: every group is quantized again as calibration decided."""
        self._session.fallback = None

    def qat(self, model: nn.Module, *, scales: Scales = "fixed", copy: bool = False) -> nn.Module:
        """Return a proxy to train: it rounds as the engine will, and gradients pass through the rounding.

        It shares its parameters with the model: training it trains the model, which nothing else here does. What
        ``fallback`` put back is trained in float. ``quantize(model)`` then takes what was learned. A second call starts
        from the ranges of calibration again, and from the model's weights as they are.

        Args:
            model: the float model; the proxy is in its train or eval mode.
            scales: ``fixed`` (those of calibration; where there was none, of the first batches that come),
                ``average`` (they follow what goes through, at each ``Schedule.at``) or ``learned`` (parameters of the
                proxy, trained with the weights); or a mapping of such by pattern of a site's or operand's name.
            copy: train a copy; ``quantize(model)`` gives what the copy learned, and the model stays as it is.

        Raises:
            ProxyError: ``model`` is a proxy, such as a frozen one: train what this gives, and quantize afterwards.
            CalibrationError: scales are to move, and nothing was calibrated yet.
            ConfigError: there is no such kind of scales, or a pattern matches nothing.
        """
        return self._session.train(model, scales, own=copy)

    def quantize(self, model: nn.Module) -> nn.Module:
        """Return the frozen proxy: ranges fixed, weights held as integers, in eval mode.

        Raises:
            CalibrationError: nothing was calibrated yet.
        """
        return self._session.frozen(model)

    def for_backend(self, name: str) -> Quantizer:
        """Return a quantizer for the backend ``name``, from this one's calibration: no data is needed again.

        It decides as one that was configured for that backend and calibrated on the same data, bit for bit. What
        ``fallback`` put back stays float there, with the groups of that backend that it belongs to; what ``amp``
        measured is not carried over. This quantizer stays as it is, and neither sees what is calibrated in the other
        later on. Of one that was loaded, call ``quantize(model)`` before anything else.

        Raises:
            ConfigError: there is no such backend, or it cannot compute in a format of the configuration.
            CalibrationError: nothing was calibrated yet, the folder it was loaded from holds nothing of what
                calibration saw, or scales were loaded.
        """
        other = Quantizer(self.config, backend=name)
        check_formats(other.config)
        other._session.inherit_from(self._session, self.config.backend)
        return other

    def simulate(self, model: nn.Module) -> nn.Module:
        """Return the frozen proxy as the target runs it: its float rest in half precision, where the target wants that.

        Scores of it foresee the engine's. It takes and gives what ``quantize()``'s does; it is not for ``export``.
        Where the target's floats are float32 it is the same model.

        Raises:
            CalibrationError: nothing was calibrated yet.
        """
        return simulate(self.quantize(model), self.config.target.torch_dtype, self._session.decisions.regions())

    def load_scales(self, scales: Mapping[str, Tensor]) -> None:
        """Put scales from anywhere in the place of those that calibration found, until the next ``calib``.

        What is quantized does not change, nor what ``fallback`` put back; what ``amp`` measured is forgotten.

        Args:
            scales: by ``SITE.OPERAND``, as ``scales()`` gives them: [], or [C] for a weight with a scale for each
                output channel. Operands that are not named keep their scales; operands that read one tensor share one.

        Raises:
            CalibrationError: nothing was calibrated yet, or scales cannot be taken: all of them are listed.
        """
        self._session.replace(with_scales(self._session.decided(), scales, self.config.target.torch_dtype))

    def export(
        self,
        quant_model: nn.Module,
        path: str | os.PathLike[str],
        example: Any,
        *,
        opset: int | None = None,
        dynamic_axes: Mapping[str, Mapping[int, str]] | None = None,
    ) -> Path:
        """Write the frozen proxy as Q/DQ ONNX for ``config.backend``.

        Args:
            quant_model: what ``quantize()`` returned.
            path: the ``.onnx`` file.
            example: one batch, as for ``calibrate``; its values do not matter.
            opset: the ONNX opset; None: what the target wants, or later where a format needs it.
            dynamic_axes: input name to {axis: dimension name}; None: axis 0 of every input is ``batch``, and axis 1 of
                every integer input is ``sequence``, or ``NAME_sequence`` where it has another length in the example.
                Fixed are an axis 1 of length 1, and an axis 0 of another length than that of the first input.

        Raises:
            ProxyError: ``quant_model`` is the float model, or the proxy of ``calib()``, ``amp()`` or ``qat()``.
            ExportError: the model cannot be exported, or the file cannot be written.
        """
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
            engine: the engine's file.
            dynamic: (least, best, most) of each dimension by name, for TensorRT; None: batch 1, 8, 32 and sequence
                16, 128, 512.
            compute_capability: the GPU to build for ahead of time (``sm89``), or several; TensorRT-RTX only.

        Raises:
            EngineError: the engine does not build.
            MissingDependencyError: the engine's library is not installed.
        """
        from quantizer.engines import BuildOptions
        from quantizer.engines import backend

        options = BuildOptions(
            dynamic=dynamic or {"batch": (1, 8, 32), "sequence": (16, 128, 512)}, compute_capability=compute_capability
        )
        return backend(self.config.backend).build(Path(onnx), Path(engine), options)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write config, decisions, ranges, histograms and fallback to a folder: YAML and safetensors.

        A folder that stands there is replaced where ``save`` wrote it and nothing else lies in it, and kept otherwise.

        Raises:
            CalibrationError: there is nothing to save yet.
            QuantizerError: the folder cannot be written, or is kept.
        """
        plan, decisions = self._session.decided(), self._session.decisions
        return save_state(folder, plan, decisions.products(), self._session.document(), decisions.seen())

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Quantizer:
        """Return the quantizer that ``save`` wrote; ``quantize()`` then gives the same model, bit for bit.

        ``calib(model, resume=True)`` goes on with the calibration, exactly; batches on which ranges are chosen are
        those that come then.

        Raises:
            QuantizerError: the folder is none of ours or damaged.
        """
        plan, products, document, observed = load_state(folder)
        try:
            loaded = cls(document["config"])
            loaded._session.load(plan, products, document, observed)
        except QuantizerError as error:
            raise QuantizerError(f"{folder} cannot be taken up: {error}") from error
        return loaded
