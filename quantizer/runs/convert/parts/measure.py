"""The texts of engines of a model in parts beside those of the float model, and how long they take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from quantizer.engines import Engine
from quantizer.runs.convert.choose import PYTORCH
from quantizer.runs.convert.measure import ShapeLatency, measure_latency
from quantizer.runs.convert.parts.part_maker import PartMaker, PartsMade
from quantizer.runs.convert.parts.result import Agreement, WholeLatency
from quantizer.tasks import Batch, Task
from quantizer.tasks.seq2seq.writer import Writer, equal_texts, equal_tokens

_TIMED_TOKENS = 32
"""How many tokens are written to be timed, if engines write so many."""


def agreements(
    task: Task, models: Mapping[str, Any], batches: Sequence[Batch], tokens: int, float_model: Any
) -> dict[str, Agreement]:
    """Return how far the texts of models are those of the float model, by the names of the models."""
    right = _written(task, float_model, batches, tokens)
    made = {}
    for name, model in models.items():
        found = _written(task, model, batches, tokens)
        made[name] = Agreement(len(right), equal_tokens(right, found), equal_texts(right, found))
    return made


def _written(task: Task, model: Any, batches: Sequence[Batch], tokens: int) -> Any:
    writer = Writer(model, tokens)
    with torch.no_grad():
        rows = [row.numpy() for batch in batches for row in task.collect(writer(**batch), batch)]
    longest = max(map(len, rows))
    filled = [np.pad(row, (0, longest - len(row)), constant_values=np.nan) for row in rows]
    return task.decide(np.stack(filled))


def whole_latency(maker: PartMaker, models: Mapping[str, Any]) -> WholeLatency:
    """Return the time to write a number of tokens for the batch of the usual shape, models in turns."""
    writers: dict[str, nn.Module | Engine] = {name: _writer(maker, model) for name, model in models.items()}
    batch = maker.checked_on[maker.facts.usual].read
    return WholeLatency(_timed_tokens(maker), measure_latency(writers, batch, maker.asked.threads))


def write_once(maker: PartMaker, model: Any) -> object:
    """Write with a model what it is timed on."""
    return _writer(maker, model)(**maker.checked_on[maker.facts.usual].read)


def _writer(maker: PartMaker, model: Any) -> Writer:
    return Writer(model, _timed_tokens(maker), exactly=True)


def _timed_tokens(maker: PartMaker) -> int:
    return min(_TIMED_TOKENS, maker.tokens)


def part_latency(maker: PartMaker, name: str, made: PartsMade, plain: PartsMade | None) -> tuple[ShapeLatency, ...]:
    """Return the latency of a part at each shape: in PyTorch, in its engine, and in that of the float model."""
    engines = {} if plain is None else {"float engine": plain.parts[name].engine}
    engines["engine"] = made.parts[name].engine
    models: dict[str, nn.Module | Engine] = {PYTORCH: maker.parts[name]}
    models |= {which: engine for which, engine in engines.items() if engine is not None}
    return tuple(measure_latency(models, one.parts[name], maker.asked.threads) for one in maker.checked_on)
