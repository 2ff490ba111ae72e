"""``QATCalibrate``: quantizing in place the models that are built inside a ``with`` block."""

from __future__ import annotations

from typing import Any
from typing import Literal

from torch import nn

from quantizer.calibration.choose_ranges import make_plan
from quantizer.calibration.session import merge_across_ranks
from quantizer.calibration.settings import excluded_sites
from quantizer.calibration.settings import make_observation
from quantizer.config import quantizer_config
from quantizer.errors import CalibrationError
from quantizer.errors import ProxyError
from quantizer.observe.completeness.product_counter import CountedProduct
from quantizer.observe.observation import Observation
from quantizer.plan.apply import apply_plan
from quantizer.plan.apply import switch_on
from quantizer.plan.site_plan import Plan
from quantizer.proxy.build import applied_patches
from quantizer.proxy.build import instrument
from quantizer.proxy.build import is_proxy
from quantizer.proxy.build import sites_of
from quantizer.proxy.build import skipped_sources
from quantizer.proxy.eager_attention import use_eager_attention
from quantizer.rewrite.constructor_patch import Source
from quantizer.rewrite.constructor_patch import patched
from quantizer.views.coverage import Coverage

__all__ = ["QATCalibrate"]

_METHODS = {"histogram": "percentile"}
"""Names of NVIDIA's toolkit; others are those of our calibrators."""


class QATCalibrate:
    """Models built inside the block carry Q/DQ; their ranges are calibrated in the block and loaded when it closes.

    ``with QATCalibrate(method="histogram", percentile=99.99) as qat:`` - build a model, ``qat.setup_model_qat(model)``,
    run data through it. Before ``setup_model_qat`` a model built inside behaves bit for bit as if it were built
    outside. After the block it rounds its operands, with float weights, ready to be trained or exported with
    ``Quantizer.export``. Unlike ``Quantizer.calib`` this changes the model itself; models built outside, or by other
    threads, stay float.

    Args:
        sources: the modelling modules whose models are meant: modules, their names, or one of their classes; none:
            every imported module.
        method: ``histogram`` (a percentile) or another calibrator.
        percentile: percent of the absolute values that a range covers; used by ``histogram``.
        settings: other fields of ``QuantizerConfig``, such as ``exclude``.

    Attributes:
        config: the resolved ``QuantizerConfig``.

    Raises:
        ConfigError: a setting is wrong.
        SourceError: a source is no module, or is torch's own.
    """

    def __init__(
        self,
        *sources: Source,
        method: Literal["histogram", "percentile", "max", "mse", "entropy", "auto"] = "histogram",
        percentile: float = 99.99,
        **settings: Any,
    ) -> None:
        activations = {"calibrator": _METHODS.get(method, method), "percentile": percentile}
        self.config = quantizer_config(None, activations=activations, **settings)
        self._patch = patched(*sources, built=instrument)
        self._open = 0
        self._calibrating: list[tuple[nn.Module, Observation, dict[str, str]]] = []
        self._plans: list[tuple[nn.Module, Plan, tuple[CountedProduct, ...]]] = []

    def __enter__(self) -> QATCalibrate:
        self._patch.__enter__()
        self._open += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._patch.__exit__(kind, *rest)
        self._open -= 1
        if self._open:
            return
        calibrating, self._calibrating = self._calibrating, []
        for model, observation, _ in calibrating:
            observation.detach(sites_of(model))
        if kind is not None:
            return
        empty = [model for model, observation, _ in calibrating if observation.seen.batches == 0]
        if empty:
            raise CalibrationError(
                f"no data went through the {type(empty[0]).__name__} after setup_model_qat(): run at least one batch "
                "through it inside the block"
            )
        # All are decided before the first one changes: where one fails, none rounds.
        decided = [self._decided(*entry) for entry in calibrating]
        for model, plan, _ in decided:
            apply_plan(model, plan)
        for model, plan, products in decided:
            switch_on(model, plan)
            self._plans.append((model, plan, products))

    def setup_model_qat(self, model: nn.Module) -> None:
        """Start calibrating ``model``, in eval mode and with eager attention, until the block closes.

        Raises:
            ProxyError: no block is open, ``model`` is no module, or it was set up before.
            ConfigError: a rule of the configuration matches nothing in it.
        """
        if not self._open:
            raise ProxyError("setup_model_qat() belongs inside the with block of its QATCalibrate")
        if not isinstance(model, nn.Module):
            raise ProxyError(f"a torch.nn.Module is needed, got {type(model).__name__}")
        if any(known is model for known, *_ in self._calibrating):
            raise ProxyError(f"this {type(model).__name__} is being calibrated already")
        if not is_proxy(model):
            # Built before the block, or from parts that nobody named.
            instrument(model)
        refused = excluded_sites(self.config, model)
        use_eager_attention(model)
        model.eval()
        observation = make_observation(self.config, model, refused, list(skipped_sources(model)))
        observation.attach(model, sites_of(model))
        self._calibrating.append((model, observation, refused))

    def coverage(self, model: nn.Module) -> Coverage:
        """Return every site of a model that was calibrated here: quantized, or why not.

        Raises:
            CalibrationError: its ranges were not loaded by this block.
        """
        for known, plan, products in self._plans:
            if known is model:
                skipped = list(skipped_sources(model))
                return Coverage.from_plan(plan, skipped, products, patches=applied_patches(model))
        raise CalibrationError("the ranges of this model were not loaded yet: they are when the block closes")

    def _decided(
        self, model: nn.Module, observation: Observation, refused: dict[str, str]
    ) -> tuple[nn.Module, Plan, tuple[CountedProduct, ...]]:
        seen = merge_across_ranks(self.config, model, observation)
        return model, make_plan(self.config, model, seen, refused), seen.counted()
