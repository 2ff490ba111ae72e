"""The implementation of ``Quantizer.qat``: training of a quantized proxy.

The file also has the gradient check of a step, steps that several processes take together, the schedule that fixes
batch norm statistics and scales, and parameter groups with a separate learning rate for scales of activations.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from quantizer.algorithms.qat.checkpoint import prepare_state_dict
from quantizer.algorithms.qat.scales import Scales, changed_scales, fix_scales, kinds_of, set_up_scales, step_averages
from quantizer.errors import CalibrationError, QuantizerError, TrainingError
from quantizer.numerics.rounding import GAIN
from quantizer.plan.apply import apply_plan, switch_on, with_passes
from quantizer.plan.replace_scales import with_given_weights, with_scales
from quantizer.plan.site_plan import Plan, with_fallback
from quantizer.proxy.build import build_proxy, is_proxy, own_copy, quantizers_of, sites_of
from quantizer.proxy.model_sharing import LocalHook, hand_back_buffers, share_for_good
from quantizer.utils.distributed import all_reduce_tensor, get_rank, get_world_size

logger = logging.getLogger(__name__)

_FIRST_BATCHES = 8
"""The number of batches that determine the ranges if nothing was calibrated."""


class QatSession:
    """A model in quantization-aware training.

    Attributes:
        model: the model whose parameters are trained.
        proxy: the quantized proxy; its parameters are the model's and the learned scales.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | None,
        groups: Mapping[str, str],
        scales: Scales,
        scale_dtype: torch.dtype,
        *,
        own: bool,
    ) -> None:
        self.model = own_copy(model) if own else model
        self._scale_dtype = scale_dtype
        self.proxy = build_proxy(self.model, eager_attention=True)
        share_for_good(self.proxy, self.model)
        self._plan = plan
        self._replaced: Plan | None = None
        self.proxy.register_forward_hook(LocalHook(self._hand_back_buffers))
        if plan is None:
            kinds = kinds_of({}, scales)
            if scales != "fixed":
                raise CalibrationError(
                    f"scales={scales!r} needs calibrated scales, but nothing was calibrated yet; run data through "
                    "calib(model), or call calibrate(model, batches), before qat()"
                )
        else:
            trained = with_fallback(plan, groups)
            kinds = kinds_of(trained, scales)
            self._apply(trained)
            set_up_scales(self.proxy, trained, kinds, scale_dtype)
        if not any(parameter.requires_grad for parameter in self.proxy.parameters()):
            raise TrainingError(
                f"no parameter of this {type(model).__name__} requires a gradient, so there is nothing to train; call "
                "requires_grad_() on the model, or on the part to train, before qat()"
            )
        prepare_state_dict(self.proxy, kinds)

    def calibrate_first(self, observing: nn.Module, decided: Callable[[], Plan]) -> None:
        """Calibrate with the first batches: each runs through ``observing`` before the quantized proxy."""
        logger.warning("qat(): nothing was calibrated, so the first %d batches determine the ranges", _FIRST_BATCHES)
        batches = 0

        def observe(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            nonlocal batches
            with torch.no_grad():
                observing(*args, **keywords)
            self._plan = decided()
            self._apply(self._plan)
            batches += 1
            if batches == _FIRST_BATCHES:
                handle.remove()
                logger.info("qat(): ranges are fixed after the first %d batches", _FIRST_BATCHES)

        handle = self.proxy.register_forward_pre_hook(LocalHook(observe), with_kwargs=True)

    def learned_plan(self) -> Plan:
        """Return the plan of calibration with the proxy's current scales in the target's float type.

        The scales differ from the plan's if training moved them, or if a checkpoint was loaded.
        """
        if self._plan is None:
            raise CalibrationError("nothing was calibrated, and no batch ran through the proxy of qat() yet")
        if self._replaced is not None:
            return self._replaced
        changed = changed_scales(self.proxy, self._applied)
        plan = with_scales(self._plan, changed, self._scale_dtype, keep_zero_points=True) if changed else self._plan
        return with_given_weights(plan, self.model)

    def replace(self, plan: Plan) -> None:
        """Make ``learned_plan`` return ``plan``, whatever the proxy's scales."""
        self._replaced = plan

    def _hand_back_buffers(self, proxy: nn.Module, args: Any, result: Any) -> None:
        """Assign buffers that a pass replaced in the proxy to the model."""
        for module in proxy.modules():
            hand_back_buffers(module)

    def require_weights_of(self, model: nn.Module) -> None:
        """Raise if parameters of ``model`` were replaced since training started."""
        now = dict(model.named_parameters())
        replaced = [
            path for path, parameter in self.proxy.named_parameters() if path in now and now[path] is not parameter
        ]
        if replaced:
            raise TrainingError(
                f"{len(replaced)} parameters of the model were replaced since qat(), the first is {replaced[0]}; the "
                "proxy still trains the old ones. Load into the parameters in place (load_state_dict without assign), "
                "or call qat() again"
            )

    def _apply(self, plan: Plan) -> None:
        self._applied = plan
        # After more batches, the plan may no longer quantize an operand.
        for site in sites_of(self.proxy):
            site.reset()
        with_passes(self.proxy, plan)
        apply_plan(self.proxy, plan)
        switch_on(self.proxy, plan)


def has_gradient(parameters: Iterable[Tensor]) -> bool:
    """Return whether any parameter has a gradient other than zero."""
    return any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in parameters)


Example = TypeVar("Example")


def own_examples(examples: Sequence[Example]) -> tuple[Sequence[Example], float]:
    """Return this process's examples of a batch, and their share; with fewer examples than processes, each gets all."""
    size = get_world_size()
    if len(examples) < size:
        return examples, 1 / size
    mine = examples[get_rank() :: size]
    return mine, len(mine) / len(examples)


def sum_gradients(parameters: Sequence[Tensor], share: float) -> None:
    """Replace gradients by their sums over all processes, weighted by ``share``; all processes must call this.

    A parameter that has no gradient in any process keeps none.
    """
    if get_world_size() == 1:
        return
    with torch.no_grad():
        reached = all_reduce_tensor(torch.tensor([float(parameter.grad is not None) for parameter in parameters]))
        used = [parameter for parameter, count in zip(parameters, reached, strict=True) if count]
        if not used:
            return
        mine = [torch.zeros_like(p) if p.grad is None else p.grad for p in used]
        summed = all_reduce_tensor(torch.cat([gradient.flatten() * share for gradient in mine]))
        for parameter, part in zip(used, torch.split(summed, [p.numel() for p in used]), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype, copy=True)


class Schedule:
    """The schedule of one training; call ``at(step)`` after every step of the optimizer.

    It depends on the step alone: to resume a training, call ``at`` with the step from which it resumes.

    Args:
        proxy: the proxy that ``qat()`` returned.
        steps: the number of steps of the optimizer, 1 or more.
        freeze_scales: the share of the steps after which scales are fixed, 0 to 1; 1: they are never fixed.
        freeze_batch_norm: the share after which batch norms stop updating statistics, 0 to 1. From then on they compute
            as in the exported file, where they are folded into the convolutions before them.

    Raises:
        QuantizerError: ``proxy`` is not a result of ``qat()``, or a number is out of bounds.
    """

    def __init__(
        self, proxy: nn.Module, steps: int, *, freeze_scales: float = 0.8, freeze_batch_norm: float = 0.5
    ) -> None:
        if not is_proxy(proxy) or any(site.frozen for site in sites_of(proxy)):
            raise QuantizerError("a Schedule needs the proxy that qat() returns")
        if steps < 1:
            raise QuantizerError(f"steps is {steps}, expected 1 or more")
        for name, share in (("freeze_scales", freeze_scales), ("freeze_batch_norm", freeze_batch_norm)):
            if not 0 <= share <= 1:
                raise QuantizerError(f"{name} is {share}, expected a share of the steps, 0 to 1")
        self._proxy = proxy
        self._freeze_scales = steps if freeze_scales == 1 else freeze_scales * steps
        self._freeze_batch_norm = freeze_batch_norm * steps
        self._frozen_batch_norms: list[Any] = []

    def at(self, step: int) -> None:
        """Bring the proxy to its state after ``step`` steps, 0 or more; repeated calls have no effect."""
        quantizers = quantizers_of(self._proxy)
        step_averages(quantizers)
        if step >= self._freeze_scales:
            fix_scales(self._proxy)
        if step >= self._freeze_batch_norm and not self._frozen_batch_norms:
            self._frozen_batch_norms = [
                module.register_forward_pre_hook(_keep_statistics)
                for module in self._proxy.modules()
                if isinstance(module, _BatchNorm)
            ]


def _keep_statistics(module: nn.Module, _: tuple[Any, ...]) -> None:
    # Training loops call train() on the whole model, often at every step.
    module.training = False


def parameter_groups(
    proxy: nn.Module, learning_rate: float, *, scale_learning_rate: float = 0.2
) -> list[dict[str, Any]]:
    """Return parameter groups for Adam or AdamW.

    Learned scales of activations have their own learning rate: the calibrated scale may be a third of the best one for
    training, and a rate that suits weights would need thousands of steps. Scales of weights fit from the start and use
    the rate of the weights.

    Args:
        proxy: the proxy that ``qat()`` returned.
        learning_rate: the rate of weights and of learned scales of weights.
        scale_learning_rate: the largest relative change of a learned activation scale per step.

    Returns:
        Groups with ``params`` and ``lr``, none of them empty.

    Raises:
        QuantizerError: ``proxy`` is not a proxy, or a rate is not above 0.
    """
    if not is_proxy(proxy):
        raise QuantizerError(f"{type(proxy).__name__} is not a proxy; pass the result of qat() to parameter_groups")
    for name, rate in (("learning_rate", learning_rate), ("scale_learning_rate", scale_learning_rate)):
        if not 0 < rate < float("inf"):
            raise QuantizerError(f"{name} is {rate}, expected a number above 0")
    ranges = {id(quantizer.change) for quantizer in quantizers_of(proxy) if quantizer.of_samples}
    trained = [parameter for parameter in proxy.parameters() if parameter.requires_grad]
    of_ranges = [parameter for parameter in trained if id(parameter) in ranges]
    others = [parameter for parameter in trained if id(parameter) not in ranges]
    # At the same rate, a scale moves GAIN times as far as a weight.
    groups = [{"params": others, "lr": learning_rate}, {"params": of_ranges, "lr": scale_learning_rate / GAIN}]
    return [group for group in groups if group["params"]]
