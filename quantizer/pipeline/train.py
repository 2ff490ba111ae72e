"""Quantization-aware training of a run: shuffled samples, a learning rate schedule, evaluations, and the best
checkpoint.

Each evaluation writes a checkpoint, so that an interrupted training resumes with the same result.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from quantizer.algorithms.qat import Distillation, Schedule, parameter_groups
from quantizer.algorithms.qat.checkpoint import (
    BEST,
    LAST,
    read_checkpoint,
    read_facts,
    share_checkpoints,
    write_checkpoint,
)
from quantizer.algorithms.qat.session import has_gradient, own_examples, sum_gradients
from quantizer.algorithms.sensitivity import fingerprint
from quantizer.config import QatConfig
from quantizer.errors import TrainingError
from quantizer.pipeline.context import RunContext
from quantizer.pipeline.scores import Metric
from quantizer.quantizer import Quantizer
from quantizer.report.record import TrainingRun, TrainingScore
from quantizer.tasks import Example, Task, rows_at
from quantizer.tasks.datasets.examples import content_of
from quantizer.utils.batches import own_tensors
from quantizer.utils.distributed import all_reduce_sum, all_reduce_tensor, get_world_size
from quantizer.utils.fingerprint import Fingerprint
from quantizer.utils.plain_values import decoded
from quantizer.utils.progress import loop

logger = logging.getLogger(__name__)

_WARM_UP = 0.1
"""Fraction of steps with a rising learning rate."""


@dataclass
class TrainingResult:
    """The result of a training.

    Attributes:
        steps: the number of planned steps.
        float_score: the score of the float model on the tuning samples.
        losses: the loss of each step.
        rates: the learning rate of each step.
        scores: (steps, score on the tuning samples); the first entry is PTQ, before any step.
        best: the number of steps of the kept checkpoint: the last one within the tolerance of the best score.
        stopped: the reason of an early stop; None without one.
    """

    steps: int
    float_score: float
    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    scores: list[tuple[int, float]] = field(default_factory=list)
    best: int = 0
    stopped: str | None = None

    def record(self, task: Task) -> TrainingRun:
        """Return the result as a report record, with the task's metric."""
        return TrainingRun(
            metric=task.metric_name,
            higher_is_better=task.higher_is_better,
            planned_steps=self.steps,
            losses=tuple(self.losses),
            scores=tuple(TrainingScore(step=step, score=s, best=step == self.best) for step, s in self.scores),
            float_score=self.float_score,
            stopped=self.stopped,
        )


class Training:
    """The training of a proxy from ``qat()`` in eval mode, without dropout and with fixed batch statistics.

    Several processes take each step together, each with its share of the batch. The result equals that of one process,
    except for the rounding of sums.
    """

    def __init__(
        self,
        settings: QatConfig,
        task: Task,
        examples: Sequence[Example],
        score: Callable[[nn.Module], float],
        *,
        higher_is_better: bool,
        folder: Path,
        identity: str,
        tell: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._task = task
        self._rows = examples
        self._score = score
        self._sign = 1 if higher_is_better else -1
        self._identity = identity
        self._tell = tell
        self._last, self._best = folder / LAST, folder / BEST
        self._steps_per_epoch = math.ceil(len(examples) / task.batch_size)
        self._share_of_batch = 1.0
        self._steps = max(1, math.ceil(settings.epochs * self._steps_per_epoch))
        numbers = range(1, settings.evaluations + 1)
        self._scored_at = {math.ceil(self._steps * number / settings.evaluations) for number in numbers}

    def run(self, model: nn.Module, proxy: nn.Module) -> TrainingResult:
        """Train the proxy to reproduce the float model's outputs, and load the kept checkpoint."""
        settings = self._settings
        proxy.eval()
        distillation = Distillation(
            model, temperature=settings.temperature, hidden=settings.hidden, divisor=self._joint
        )
        rates = settings.learning_rate, settings.scale_learning_rate
        groups = parameter_groups(proxy, rates[0], scale_learning_rate=rates[1])
        optimizer = torch.optim.AdamW([{**group, "highest": group["lr"]} for group in groups], weight_decay=0.0)
        schedule = Schedule(proxy, self._steps, freeze_scales=settings.freeze_scales)
        share_checkpoints(self._last.parent)
        course = self._resumed(proxy, optimizer)
        if course is None:
            try:
                self._last.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise TrainingError(f"cannot create {self._last.parent}: {error.strerror}") from error
            course = TrainingResult(steps=self._steps, float_score=self._score(model))
            self._tell(f"the float model: {course.float_score:.5f} on the tuning samples")
            self._take_score(course, proxy, optimizer)
        schedule.at(len(course.losses))
        with loop("training", unit="step", total=self._steps, done=len(course.losses)) as progress:
            while len(course.losses) < self._steps and course.stopped is None:
                share = self._share(len(course.losses))
                for group in optimizer.param_groups:
                    group["lr"] = share * group["highest"]
                loss = self._step(len(course.losses), proxy, distillation, optimizer)
                course.losses.append(loss)
                course.rates.append(share * settings.learning_rate)
                schedule.at(len(course.losses))
                progress.step(f"loss {loss:.4g}")
                if len(course.losses) in self._scored_at:
                    self._take_score(course, proxy, optimizer)
        read_checkpoint(self._best, proxy)
        schedule.at(self._steps)
        return course

    def _step(self, step: int, proxy: nn.Module, distillation: Distillation, optimizer: torch.optim.Optimizer) -> float:
        batch = self._batch(step)
        hidden = {"output_hidden_states": True} if self._settings.hidden else {}
        # Copies, because a forward may write into its inputs, and the batch runs again.
        loss = distillation(proxy(**own_tensors(batch), **hidden), **batch)
        (value,) = all_reduce_sum([self._share_of_batch * loss.item()])
        if not math.isfinite(value):
            raise TrainingError(
                f"the loss is {value} after {step} steps: lower qat.learning_rate ({self._settings.learning_rate:g}). "
                f"The last good checkpoint is {self._last}"
            )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        sum_gradients(trained, self._share_of_batch)
        if step == 0 and not has_gradient(trained):
            raise TrainingError(
                "no parameter has a gradient: the compared outputs depend on no parameter, or on no quantized operation"
            )
        optimizer.step()
        return value

    def _joint(self, divisor: Tensor) -> Tensor:
        """Return the divisor of a mean over the samples of all processes."""
        return divisor if get_world_size() == 1 else all_reduce_tensor(divisor) * self._share_of_batch

    def _batch(self, step: int) -> dict[str, Tensor]:
        """Return this process's samples of a batch."""
        number, at = divmod(step, self._steps_per_epoch)
        # No two seeds share an order.
        generator = torch.Generator().manual_seed(self._settings.seed * 2**16 + number)
        order = torch.randperm(len(self._rows), generator=generator).tolist()
        size = self._task.batch_size
        examples = order[at * size : (at + 1) * size]
        (batch,) = self._task.batches([self._rows[row] for row in examples])
        # Split after batching, so that the padding equals that of one process.
        places = range(len(next(iter(batch.values()))))
        mine, self._share_of_batch = own_examples(places)
        return batch if mine == places else rows_at(batch, mine)

    def _share(self, step: int) -> float:
        """Return the learning rate factor of a step, from 0: linear warm-up, cosine decay (arXiv:1608.03983)."""
        warm_up = max(1, math.ceil(_WARM_UP * self._steps))
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, self._steps - warm_up)))

    def _take_score(self, course: TrainingResult, proxy: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        step = len(course.losses)
        since = course.losses[course.scores[-1][0] :] if step else []
        mean = f", mean loss {sum(since) / len(since):.4g}" if since else ", which is PTQ"
        score = self._score(proxy)
        self._tell(f"after {step} of {self._steps} steps{mean}: {score:.5f} on the tuning samples")
        highest = max((self._sign * other for _, other in course.scores), default=-math.inf)
        is_best = self._sign * score >= highest - self._settings.tolerance
        course.scores.append((step, score))
        if is_best:
            course.best = step
            write_checkpoint(self._best, proxy, {"step": step})
        ptq = course.scores[0][1]
        if self._sign * score < self._sign * ptq:
            text = (
                f"after {step} of {self._steps} steps the score on the tuning samples is {score:.5f}, worse than the "
                f"{ptq:.5f} before training: a lower qat.learning_rate than {self._settings.learning_rate:g} may help"
            )
            logger.warning("qat: %s", text)
            self._tell(f"warning: {text}")
        worse = sum(done > course.best for done, _ in course.scores)
        if self._settings.patience is not None and worse >= self._settings.patience and step < self._steps:
            course.stopped = f"no better score in {worse} evaluations"
        facts = {"identity": self._identity, "course": asdict(course)}
        write_checkpoint(self._last, proxy, facts, optimizer)

    def _resumed(self, proxy: nn.Module, optimizer: torch.optim.Optimizer) -> TrainingResult | None:
        """Restore the last checkpoint and return the result so far; None without a checkpoint."""
        if not (self._last.exists() and self._best.exists()):
            return None
        facts = read_facts(self._last)
        if facts.get("identity") != self._identity:
            raise TrainingError(
                f"{self._last.parent} contains checkpoints of another configuration: remove it to start over, or "
                "choose another output folder"
            )
        read_checkpoint(self._last, proxy, optimizer)
        try:
            course: TrainingResult = decoded(TrainingResult, facts.get("course"), "course")
        except ValueError as error:
            raise TrainingError(f"{self._last} is damaged: {error}; remove it to restart the training") from error
        self._tell(f"resuming after {len(course.losses)} of {self._steps} steps from {self._last}")
        return course


def train(
    context: RunContext, settings: QatConfig, quantizer: Quantizer, examples: Sequence[Example], score: Metric
) -> TrainingResult:
    """Train a copy of the model, because the float model must stay the reference."""
    known = fingerprint(quantizer.plan, score, Fingerprint.of(context.model))
    parts = known, settings.model_dump(mode="json"), content_of(examples)
    training = Training(
        settings,
        context.task,
        examples,
        score,
        higher_is_better=score.higher_is_better,
        folder=context.resume.training,
        identity=hashlib.sha256(repr(parts).encode()).hexdigest(),
        tell=context.timer.tell,
    )
    with context.timer("train (QAT)"):
        course = training.run(context.model, quantizer.qat(context.model, scales=settings.scales, copy=True))
        context.timer.tell(
            f"keeping the state after {course.best} of {course.steps} steps: {dict(course.scores)[course.best]:.5f} "
            f"on the tuning samples, {course.scores[0][1]:.5f} before training, {course.float_score:.5f} in float"
        )
    return course
