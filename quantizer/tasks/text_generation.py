"""The tasks on the next token of a text, with and without a cache of keys and values.

Shapes: B rows, S tokens that are read, P tokens in the cache, H heads of keys, D their width.

Shapes: N rows, B rows of a batch, S tokens, V tokens of the vocabulary.

The task ``text-generation-with-past``: token by token, with keys and values of former tokens as inputs and outputs.

Shapes: B rows of a batch, S tokens, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from quantizer.errors import TaskError
from quantizer.tasks.checkpoints import transformers_package
from quantizer.tasks.datasets.rows import Plain, Row
from quantizer.tasks.inputs import Batch, Inputs, Sample, TextInputs
from quantizer.tasks.outputs import first_output, flips, per_token, whole_numbers
from quantizer.tasks.task import CountedTask, Predictions, Run, rows_of_kind, tasks
from quantizer.utils.dimension_names import CACHE, PRESENT

_KINDS = ("key", "value")


class DecodeStep(nn.Module):
    """A causal language model with its cache as tensors, under the names that the usual runtimes know."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.config = model.config
        self._cache = transformers_package().DynamicCache
        cache = self._cache(config=model.config)
        with torch.no_grad():
            made = model(input_ids=torch.zeros(1, 1, dtype=torch.long), past_key_values=cache, use_cache=True)
        layers = getattr(made.past_key_values, "layers", ())
        strange = {type(layer).__name__ for layer in layers if type(layer).__name__ != "DynamicLayer"}
        if not layers or strange:
            raise TaskError(
                f"{type(model).__name__} keeps {', '.join(sorted(strange)) or 'no cache'} of former tokens, expected "
                "the keys and values of all of them: take task text-generation, which reads a whole text at once"
            )
        self.sizes = tuple((tuple(layer.keys.shape), tuple(layer.values.shape)) for layer in layers)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **past: Tensor) -> dict[str, Tensor]:
        """Return the logits [B x S x V], and keys and values of all tokens [B x H x P + S x D].

        Args:
            input_ids: the tokens to read [B x S].
            attention_mask: 1 for a token that is seen, those in the cache first [B x P + S].
            past: keys and values of the tokens before [B x H x P x D].
        """
        cache = self._cache()
        for layer in range(len(past) // 2):
            cache.update(past[f"past_key_values.{layer}.key"], past[f"past_key_values.{layer}.value"], layer)
        made = self.model(input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True)
        outputs = {"logits": made.logits}
        for number, layer in enumerate(made.past_key_values.layers):
            outputs[f"present.{number}.key"] = layer.keys
            outputs[f"present.{number}.value"] = layer.values
        return outputs

    def empty_cache(self, rows: int) -> Batch:
        """Return a cache of no tokens."""
        return {
            f"{CACHE}.{layer}.{kind}": torch.zeros(rows, size[1], 0, size[3])
            for layer, sizes in enumerate(self.sizes)
            for kind, size in zip(_KINDS, sizes, strict=True)
        }


def next_cache(result: Any) -> Batch:
    """Return the cache for the next step, from what a model, a proxy or an engine gave."""
    made: Mapping[str, Any] = result
    names = [name for name in made if name.startswith(f"{PRESENT}.")]
    return {f"{CACHE}{name.removeprefix(PRESENT)}": first_output(made, name) for name in names}


class CachedInputs(TextInputs):
    """Batches of texts with a cache: empty to calibrate and to score, and of all tokens but the last to check and time.

    What a decoder computes for a token does not depend on what was read before in one call: ranges of texts that are
    read at once are those of texts that are read token by token.
    """

    def __init__(self, model: DecodeStep, tokenizer: Any, *, max_length: int, min_length: int) -> None:
        super().__init__(model, tokenizer, max_length=max_length, min_length=min_length)
        if "attention_mask" not in self.names:
            raise TaskError(f"{type(tokenizer).__name__} makes no attention_mask, which tells tokens from padding")
        self._model = model
        self._texts = TextInputs(model, tokenizer, max_length=max_length, min_length=min_length)
        self.names = (*self.names, *model.empty_cache(1))

    def batch(self, texts: Sequence[Any], min_length: int | None = None) -> Batch:
        """Return one batch of texts [B x S] with an empty cache."""
        made = self._texts.batch(texts, min_length)
        return {**made, **self._model.empty_cache(len(made["input_ids"]))}

    def filled(self, texts: Sequence[Any], rows: int, sequence: int | None) -> Batch:
        """Return the last tokens of a batch [rows x sequence], and the cache of those before; see ``TextInputs``."""
        return self._last(self._texts.filled(texts, rows, sequence))

    def later_half(self, texts: Sequence[Any], rows: int, sequence: int | None) -> Batch:
        """Return the later half of the tokens of a batch [rows x sequence], and the cache of those before."""
        made = self._texts.filled(texts, rows, sequence)
        return self.split(made, made["input_ids"].shape[1] // 2)

    def random(self, rows: int, sequence: int | None, seed: int = 0) -> Batch:
        """Return the last of random tokens [rows x sequence], and the cache of those before."""
        return self._last(self._texts.random(rows, sequence, seed))

    def example(self, texts: Sequence[Any]) -> Batch:
        """Return the later tokens of two texts, and the cache of those before."""
        made = self._texts.example(texts)
        return self.split(made, max(made["input_ids"].shape[1] // 2 - 1, 1))

    def split(self, batch: Batch, kept: int, run: Any = None) -> Batch:
        """Return the tokens of a batch from ``kept`` on, and the cache of those before.

        Args:
            batch: a batch [B x S] without a cache, or with an empty one.
            kept: how many tokens are in the cache.
            run: gives it; None: the float model does.
        """
        ids, mask = batch["input_ids"], batch["attention_mask"]
        cache = self._model.empty_cache(len(ids))
        if kept:
            first = {"input_ids": ids[:, :kept], "attention_mask": mask[:, :kept], **cache}
            with torch.no_grad():
                cache = next_cache(self._model(**first) if run is None else run(first))
        return {"input_ids": ids[:, kept:], "attention_mask": mask, **cache}

    def _last(self, batch: Batch) -> Batch:
        return self.split(batch, batch["input_ids"].shape[1] - 1)


@tasks.add("text-generation")
class TextGeneration(CountedTask):
    """Texts to the loss of each next token and the likeliest one [N x S x 2], scored by perplexity.

    The model reads a whole text at once, as it does before it generates (prefill); no token is generated.
    """

    name = "text-generation"
    auto_class = "AutoModelForCausalLM"
    output_name = "logits"
    metric_name = "perplexity"
    higher_is_better = False
    gives_vocabulary = True

    def samples(self, rows: Sequence[Row]) -> list[Sample]:
        return [row.text for row in rows_of_kind(rows, Plain, self.name)]

    def targets(self, rows: Sequence[Row]) -> npt.NDArray[Any]:
        """Return the texts [N], whose own tokens are what is right."""
        return np.array([row.text for row in rows_of_kind(rows, Plain, self.name)], dtype=object)

    def collect(self, result: object, batch: Batch) -> Sequence[torch.Tensor]:
        logits = first_output(result, self.output_name)
        ids = batch["input_ids"]
        rows = zip(per_token(logits, batch), per_token(ids, batch), strict=True)
        return [_next_tokens(row, own) for row, own in rows]

    def decide(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """Return the likeliest next token at each place [N x S]; -1 where there is none."""
        return whole_numbers(outputs[..., 1])

    def counts(self, predictions: Predictions, rows: Sequence[Row]) -> npt.NDArray[np.float64]:
        """Return the sum of the losses of each row's tokens in nats, and their number [N x 2]."""
        losses = predictions.outputs[..., 0]
        there = ~np.isnan(losses)
        if not there.any():
            raise TaskError("no text has two tokens or more, so there is no next token to score: give longer texts")
        return np.stack([np.nansum(losses, axis=-1, dtype=np.float64), there.sum(axis=-1)], axis=-1)

    def ratio(self, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the perplexity: e to the mean loss."""
        return np.exp(sums[..., 0] / np.maximum(sums[..., 1], 1))

    def paired(self, float_predictions: Predictions, other: Predictions) -> dict[str, float]:
        """Return the share of places where another token is the likeliest."""
        return {"label_flips": flips(float_predictions, other, float_predictions.decisions >= 0)}


def _next_tokens(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the loss of each token after the first, and the likeliest one [S - 1 x 2], of logits [S x V]."""
    losses = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
    return torch.stack([losses, logits[:-1].argmax(dim=-1).float()], dim=-1)


@tasks.add("text-generation-with-past")
class TextGenerationWithPast(TextGeneration):
    """Texts to the loss of each next token and the likeliest one [N x S x 2], scored by perplexity.

    The first half of a text is read into an empty cache, the second half with the cache that came of it: the score
    covers what a cache in low precision, or an engine that reads it wrongly, would cost.
    """

    name = "text-generation-with-past"
    gives_vocabulary = False  # for one token a row, as it is checked and timed

    @classmethod
    def module_of(
        cls, model: torch.nn.Module, tokenizer: Any = None, texts: Mapping[str, str] | None = None
    ) -> torch.nn.Module:
        """Return one step of the model, with its cache as inputs and outputs."""
        return DecodeStep(model)

    def make_inputs(self, model: torch.nn.Module, processor: Any, max_length: int, min_length: int) -> Inputs:
        assert isinstance(model, DecodeStep)
        self._cached = CachedInputs(model, processor, max_length=max_length, min_length=min_length)
        return self._cached

    def compared(self, samples: Sequence[Any], batch: int, sequence: int | None) -> Batch:
        """Return the later half of the tokens, with the cache of those before: one token has too few values to tell."""
        return self._cached.later_half(samples, batch, sequence)

    def answer(self, run: Run, batch: Batch) -> Sequence[torch.Tensor]:
        middle = batch["input_ids"].shape[1] // 2
        if not middle:
            return self.collect(run(batch), batch)
        made: list[object] = []

        def kept(first: Batch) -> object:
            made.append(run(first))
            return made[0]

        made.append(run(self._cached.split(batch, middle, kept)))
        logits = torch.cat([first_output(one, self.output_name) for one in made], dim=1)
        return self.collect(logits, batch)
