"""A callback for the ``Trainer`` of transformers that follows the schedule and stops a failing training."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantizer.algorithms.qat.session import Schedule, has_gradient
from quantizer.errors import MissingDependencyError, TrainingError, require_supported
from quantizer.proxy.build import is_proxy, quantizers_of

require_supported("transformers")
try:
    import transformers
except ImportError as error:
    raise MissingDependencyError("transformers", "hf") from error


logger = logging.getLogger(__name__)


class QATCallback(transformers.TrainerCallback):
    """A callback to train a proxy from ``qat()``: ``Trainer(proxy, args, callbacks=[QATCallback()], ...)``.

    It follows the schedule, stops a training that cannot continue, and warns if training makes the model worse than it
    was before the first step. The warning needs an evaluation before training: ``eval_on_start=True``, or
    ``trainer.evaluate()``. It compares ``metric_for_best_model``, by default the loss.
    """

    def __init__(self, *, freeze_scales: float = 0.8, freeze_batch_norm: float = 0.5) -> None:
        self._freeze_scales = freeze_scales
        self._freeze_batch_norm = freeze_batch_norm
        self._schedule: Schedule | None = None
        self._before: float | None = None

    def on_train_begin(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **keywords: Any,
    ) -> None:
        """Bring the proxy to the step from which the training starts or resumes."""
        model = keywords["model"]
        if not is_proxy(model):
            raise TrainingError(
                f"QATCallback needs a proxy in training, but the Trainer has a {type(model).__name__}; pass the result "
                "of qat(model) to the Trainer"
            )
        if hasattr(model, "peft_config") and args.save_strategy != "no" and _scales_move(model):
            raise TrainingError(
                "a checkpoint of adapters would lack the trained scales; use qat(model, scales='fixed'), or "
                "save_strategy='no'"
            )
        self._schedule = Schedule(
            model, state.max_steps, freeze_scales=self._freeze_scales, freeze_batch_norm=self._freeze_batch_norm
        )
        self._schedule.at(state.global_step)

    def on_pre_optimizer_step(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **keywords: Any,
    ) -> None:
        """Check the gradients before the optimizer applies them."""
        # The gradient scaler of float16 expects infinities, and skips such steps.
        if args.fp16:
            return
        model = keywords["model"]
        if not _gradients_are_finite(model):
            raise TrainingError(
                f"step {state.global_step + 1}: a gradient is NaN or infinite, the first is that of "
                f"{_first_not_finite(model)!r}; the training stopped before the step. {_last_checkpoint(args, state)} "
                f"Check the loss for NaN, or lower the learning rate ({args.learning_rate:g})"
            )
        if state.global_step == 0 and not has_gradient(model.parameters()):
            raise TrainingError(
                "step 1: no parameter has a gradient, because the loss depends on no trained parameter. Compute it "
                "from the proxy's output, without detach() or no_grad(), and check which parameters require a gradient"
            )

    def on_step_end(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **keywords: Any,
    ) -> None:
        """Advance the schedule; the checkpoint of this step is written afterwards."""
        assert self._schedule is not None
        self._schedule.at(state.global_step)

    def on_evaluate(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **keywords: Any,
    ) -> None:
        """Warn if the score is worse than before the first step, which is the score of PTQ."""
        name = args.metric_for_best_model or "loss"
        name = name if name.startswith("eval_") else f"eval_{name}"
        metrics: Mapping[str, float] = keywords["metrics"]
        if name not in metrics:
            return
        if state.global_step == 0:
            self._before = metrics[name]
        # After a resume, the score is in the history of the checkpoint.
        history = (entry[name] for entry in state.log_history if entry["step"] == 0 and name in entry)
        before, now = next(history, self._before), metrics[name]
        if before is None:
            return
        higher_is_better = args.greater_is_better if args.metric_for_best_model else False
        if now < before if higher_is_better else now > before:
            logger.warning(
                "%s is %.4g after %d steps, but was %.4g before the first: the model is worse than after PTQ. If this "
                "continues, lower the learning rate (%g)",
                name,
                now,
                state.global_step,
                before,
                args.learning_rate,
            )


def _scales_move(model: nn.Module) -> bool:
    quantizers = quantizers_of(model)
    return any(quantizer.change is not None or quantizer.watcher is not None for quantizer in quantizers)


def _gradients_are_finite(model: nn.Module) -> bool:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    # The largest absolute value: a sum of squares could overflow where no gradient does.
    return not gradients or bool(torch.nn.utils.get_total_norm(gradients, float("inf")).isfinite())


def _first_not_finite(model: nn.Module) -> str:
    return next(
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not parameter.grad.isfinite().all()
    )


def _last_checkpoint(args: transformers.TrainingArguments, state: transformers.TrainerState) -> str:
    """Return a sentence that names the last good checkpoint; later ones belong to another run."""
    prefix = transformers.trainer_utils.PREFIX_CHECKPOINT_DIR + "-"
    checkpoints = {
        int(number): folder
        for folder in Path(args.output_dir or ".").glob(f"{prefix}*")
        if (number := folder.name.removeprefix(prefix)).isdecimal() and int(number) <= state.global_step
    }
    if not checkpoints:
        return "There is no earlier checkpoint."
    return f"The last good checkpoint is {checkpoints[max(checkpoints)]}."
