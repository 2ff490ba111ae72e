"""``QATCalibrate``: in-place quantization of models built inside a ``with`` block."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from quantizer.algorithms.algorithm import Proxied, proxied
from quantizer.algorithms.calibration_session import merge_across_ranks
from quantizer.algorithms.make_plan import make_observation, make_plan
from quantizer.config import quantizer_config
from quantizer.errors import CalibrationError, ConfigError, ProxyError
from quantizer.observe.completeness import CountedProduct
from quantizer.observe.observation import Observation
from quantizer.plan.apply import apply_plan, switch_on, with_passes
from quantizer.plan.coverage import Coverage
from quantizer.plan.site_plan import Plan
from quantizer.proxy.build import instrument, is_proxy, refuse_compiled
from quantizer.proxy.eager_attention import use_eager_attention
from quantizer.rewrite.constructor_patch import Source, patched
from quantizer.settings import settings_of
from quantizer.utils.torch_modes import ordinary_tensors

_METHODS = {"histogram": "percentile"}
"""Calibrators by the method names of NVIDIA's toolkit; other methods are names of calibrators."""


class QATCalibrate:
    """A block in which models are built with Q/DQ and calibrated; they are fake-quantized when the block closes.

    Inside ``with QATCalibrate(method="histogram", percentile=99.99) as qat:`` build a model, call
    ``qat.setup_model_qat(model)`` and run data through it. Before ``setup_model_qat``, the model behaves bit for bit
    like a float model. After the block, it is fake-quantized with float weights, and can be trained or exported with
    ``Quantizer.export``. Unlike ``Quantizer.calib``, the block changes the model itself. Models that are built outside
    the block or by other threads are not quantized.

    Args:
        sources: the Python modules whose models are instrumented, each as a module, its name, or one of its classes;
            without sources, every imported module.
        method: ``histogram`` (a percentile) or the name of a calibrator.
        percentile: percent of the absolute values that a range covers; used by ``histogram`` and ``percentile``.
        settings: other fields of ``QuantizerConfig``, such as ``exclude``.

    Attributes:
        config: the resolved ``QuantizerConfig``.

    Raises:
        ConfigError: a setting is wrong, or sets ``weights.rounding``, which this class does not support.
        SourceError: a source is not a module, or belongs to torch.
    """

    def __init__(
        self,
        *sources: Source,
        method: Literal["histogram", "percentile", "max", "mse", "entropy", "auto"] = "histogram",
        percentile: float = 99.99,
        **settings: Any,
    ) -> None:
        activations = {"calibrator": _METHODS.get(method, method), "percentile": percentile}
        # As in NVIDIA's toolkit, one pass gives the ranges; no batches are stored.
        self.config = quantizer_config(None, activations=activations, **{"preset": "plain", **settings})
        rounding = self.config.weights.rounding
        if rounding != "nearest":
            raise ConfigError(
                [
                    f"weights.rounding: got {rounding!r}; expected 'nearest', because the model keeps float "
                    "weights; use Quantizer.quantize() for other roundings"
                ]
            )
        self._patch = patched(*sources, built=instrument)
        self._open = 0
        self._calibrating: list[tuple[Proxied, Observation]] = []
        self._plans: list[tuple[Proxied, Plan, tuple[CountedProduct, ...]]] = []

    def __enter__(self) -> QATCalibrate:
        self._patch.__enter__()
        self._open += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        with ordinary_tensors():
            self._patch.__exit__(kind, *rest)
            self._open -= 1
            if self._open:
                return
            calibrating, self._calibrating = self._calibrating, []
            for _, observation in calibrating:
                observation.detach()
            if kind is not None:
                return
            empty = [proxy.module for proxy, observation in calibrating if observation.seen.batches == 0]
            if empty:
                raise CalibrationError(
                    f"no data went through the {type(empty[0]).__name__} after setup_model_qat(): run at least one "
                    "batch through it inside the block"
                )
            # All plans are made before any model changes, so that a failure changes none.
            decided = [_planned(*entry) for entry in calibrating]
            for proxy, plan, _ in decided:
                with_passes(proxy.module, plan)
                apply_plan(proxy.module, plan)
            for proxy, plan, products in decided:
                switch_on(proxy.module, plan)
                self._plans.append((proxy, plan, products))

    def setup_model_qat(self, model: nn.Module) -> None:
        """Calibrate ``model``, in eval mode and with eager attention, until the block closes.

        Raises:
            ProxyError: no block is open, ``model`` is not a module, or it was set up before.
            ConfigError: a rule of the configuration matches nothing in the model.
        """
        with ordinary_tensors():
            if not self._open:
                raise ProxyError("setup_model_qat() must be called inside the with block of its QATCalibrate")
            if not isinstance(model, nn.Module):
                raise ProxyError(f"expected a torch.nn.Module, got {type(model).__name__}")
            refuse_compiled(model)
            if any(known.module is model for known, _ in self._calibrating):
                raise ProxyError(f"this {type(model).__name__} is already being calibrated")
            if not is_proxy(model):
                # Built before the block, or by a module outside of the sources.
                instrument(model)
            proxy = proxied(settings_of(self.config), model)
            use_eager_attention(model)
            model.eval()
            observation = make_observation(proxy)
            observation.attach(model)
            self._calibrating.append((proxy, observation))

    def coverage(self, model: nn.Module) -> Coverage:
        """Return the coverage of a model calibrated in the block: each site, and the reason for sites left in float.

        Raises:
            CalibrationError: the model was not calibrated in the block, or the block is still open.
        """
        for proxy, plan, products in self._plans:
            if proxy.module is model:
                return Coverage(plan, proxy.skipped, products, patches=proxy.patches)
        raise CalibrationError("this model has no ranges: call setup_model_qat() in the block, and coverage() after it")


def _planned(proxy: Proxied, observation: Observation) -> tuple[Proxied, Plan, tuple[CountedProduct, ...]]:
    merged = merge_across_ranks(proxy, observation)
    return proxy, make_plan(proxy, merged), merged.counted()
