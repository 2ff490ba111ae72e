"""The tasks ``text-generation`` and ``text-generation-with-past``: predictions of the next token, scored by perplexity.

``text-generation`` reads a whole text at once. ``text-generation-with-past`` has the keys and values of former tokens
as inputs and outputs.

Shapes: N samples, B samples in a batch, S tokens that are read, P tokens in the cache, H heads of keys, D their width,
V tokens of the vocabulary.
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
from quantizer.tasks.datasets.examples import Example, Plain
from quantizer.tasks.inputs import Batch, Inputs, Sample, TextInputs
from quantizer.tasks.outputs import first_output, flips, per_token, whole_numbers
from quantizer.tasks.task import CountedTask, Predictions, Run, examples_of_kind, tasks
from quantizer.utils.dimension_names import CACHE, PRESENT

_KINDS = ("key", "value")


class DecodeStep(nn.Module):
    """A causal language model with its cache as tensors, under the names of ONNX Runtime GenAI and Optimum."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.config = model.config
        self.generation_config = model.generation_config
        self._cache = transformers_package().DynamicCache
        cache = self._cache(config=model.config)
        with torch.no_grad():
            outputs = model(input_ids=torch.zeros(1, 1, dtype=torch.long), past_key_values=cache, use_cache=True)
        layers = getattr(outputs.past_key_values, "layers", ())
        other_kinds = {type(layer).__name__ for layer in layers if type(layer).__name__ != "DynamicLayer"}
        if not layers or other_kinds:
            raise TaskError(
                f"{type(model).__name__} keeps {', '.join(sorted(other_kinds)) or 'no cache'} of former tokens, "
                "expected all their keys and values: use task text-generation, which reads a whole text at once"
            )
        self.sizes = tuple((tuple(layer.keys.shape), tuple(layer.values.shape)) for layer in layers)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **past: Tensor) -> dict[str, Tensor]:
        """Return the logits [B x S x V], and keys and values of all tokens [B x H x P + S x D].

        Args:
            input_ids: the tokens to read [B x S].
            attention_mask: 1 for visible tokens, those in the cache first [B x P + S].
            past: keys and values of the tokens before [B x H x P x D].
        """
        cache = self._cache()
        for layer in range(len(past) // 2):
            cache.update(past[f"past_key_values.{layer}.key"], past[f"past_key_values.{layer}.value"], layer)
        result = self.model(input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True)
        outputs = {"logits": result.logits}
        for number, layer in enumerate(result.past_key_values.layers):
            outputs[f"present.{number}.key"] = layer.keys
            outputs[f"present.{number}.value"] = layer.values
        return outputs

    def empty_cache(self, batch_size: int) -> Batch:
        """Return a cache of no tokens."""
        return {
            f"{CACHE}.{layer}.{kind}": torch.zeros(batch_size, size[1], 0, size[3])
            for layer, sizes in enumerate(self.sizes)
            for kind, size in zip(_KINDS, sizes, strict=True)
        }


def next_cache(result: Any) -> Batch:
    """Return the cache for the next step, from the outputs of a model, proxy or engine."""
    outputs: Mapping[str, Any] = result
    names = [name for name in outputs if name.startswith(f"{PRESENT}.")]
    return {f"{CACHE}{name.removeprefix(PRESENT)}": first_output(outputs, name) for name in names}


class CachedInputs(TextInputs):
    """Batches of texts with a cache, empty for calibration and scores.

    For checks and benchmarks, the cache has all tokens but the last. Ranges do not depend on how many tokens a call
    reads, so texts that are read at once are enough for calibration.
    """

    def __init__(self, model: DecodeStep, tokenizer: Any, *, max_length: int, min_length: int) -> None:
        super().__init__(model, tokenizer, max_length=max_length, min_length=min_length)
        if "attention_mask" not in self.names:
            raise TaskError(
                f"{type(tokenizer).__name__} returns no attention_mask, which distinguishes tokens from padding"
            )
        self._model = model
        self._texts = TextInputs(model, tokenizer, max_length=max_length, min_length=min_length)
        self.names = (*self.names, *model.empty_cache(1))

    def batch(self, texts: Sequence[Any], min_length: int | None = None) -> Batch:
        """Return one batch of texts [B x S] with an empty cache."""
        batch = self._texts.batch(texts, min_length)
        return {**batch, **self._model.empty_cache(len(batch["input_ids"]))}

    def filled(self, texts: Sequence[Any], batch_size: int, sequence: int | None) -> Batch:
        """Return the last tokens of a batch [batch_size x sequence], and the cache of the tokens before."""
        return self._last(self._texts.filled(texts, batch_size, sequence))

    def later_half(self, texts: Sequence[Any], batch_size: int, sequence: int | None) -> Batch:
        """Return the later half of the tokens of a batch [batch_size x sequence], and the cache of the first half."""
        batch = self._texts.filled(texts, batch_size, sequence)
        return self.split(batch, batch["input_ids"].shape[1] // 2)

    def random(self, batch_size: int, sequence: int | None, seed: int = 0) -> Batch:
        """Return the last of random tokens [batch_size x sequence], and the cache of the tokens before."""
        return self._last(self._texts.random(batch_size, sequence, seed))

    def example(self, texts: Sequence[Any]) -> Batch:
        """Return the later tokens of two texts, and the cache of the tokens before."""
        batch = self._texts.example(texts)
        return self.split(batch, max(batch["input_ids"].shape[1] // 2 - 1, 1))

    def split(self, batch: Batch, kept: int, run: Any = None) -> Batch:
        """Return the tokens of a batch from ``kept`` on, and the cache of the tokens before.

        Args:
            batch: a batch [B x S] without a cache, or with an empty one.
            kept: the number of tokens in the cache.
            run: computes the cache; None: the float model.
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
    """Texts to the loss of each next token and the most likely token [N x S x 2], scored by perplexity.

    The model reads a whole text at once, as in the prefill phase; no token is generated.
    """

    name = "text-generation"
    auto_class = "AutoModelForCausalLM"
    output_name = "logits"
    metric_name = "perplexity"
    higher_is_better = False
    gives_vocabulary = True

    def samples(self, examples: Sequence[Example]) -> list[Sample]:
        return [example.text for example in examples_of_kind(examples, Plain, self.name)]

    def targets(self, examples: Sequence[Example]) -> npt.NDArray[Any]:
        """Return the texts [N]; their own tokens are the targets."""
        return np.array([example.text for example in examples_of_kind(examples, Plain, self.name)], dtype=object)

    def collect(self, result: object, batch: Batch) -> Sequence[torch.Tensor]:
        logits = first_output(result, self.output_name)
        ids = batch["input_ids"]
        samples = zip(per_token(logits, batch), per_token(ids, batch), strict=True)
        return [_next_tokens(own_logits, own_ids) for own_logits, own_ids in samples]

    def decide(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """Return the most likely next tokens [N x S], padded with -1."""
        return whole_numbers(outputs[..., 1])

    def counts(self, predictions: Predictions, examples: Sequence[Example]) -> npt.NDArray[np.float64]:
        """Return the sum of the losses of each sample's tokens in nats, and their number [N x 2]."""
        losses = predictions.outputs[..., 0]
        is_token = ~np.isnan(losses)
        if not is_token.any():
            raise TaskError("no text has two tokens or more, so there is no next token to score: use longer texts")
        return np.stack([np.nansum(losses, axis=-1, dtype=np.float64), is_token.sum(axis=-1)], axis=-1)

    def ratio(self, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the perplexity: e to the mean loss."""
        return np.exp(sums[..., 0] / np.maximum(sums[..., 1], 1))

    def paired(self, float_predictions: Predictions, other: Predictions) -> dict[str, float]:
        """Return the share of positions where the most likely token differs."""
        return {"label_flips": flips(float_predictions, other, float_predictions.decisions >= 0)}


def _next_tokens(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the loss of each token after the first, and the most likely token [S - 1 x 2], from logits [S x V]."""
    losses = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
    return torch.stack([losses, logits[:-1].argmax(dim=-1).float()], dim=-1)


@tasks.add("text-generation-with-past")
class TextGenerationWithPast(TextGeneration):
    """Texts to the loss of each next token and the most likely token [N x S x 2], scored by perplexity.

    The first half of a text is read into an empty cache, the second half with that cache. The score thus includes
    errors of a cache in low precision, and of an engine that misreads it.
    """

    name = "text-generation-with-past"
    gives_vocabulary = False  # an engine is checked and timed with one token per sample

    @classmethod
    def module_of(
        cls, model: torch.nn.Module, tokenizer: Any = None, texts: Mapping[str, str] | None = None
    ) -> torch.nn.Module:
        """Return one decoding step of the model, with its cache as inputs and outputs."""
        return DecodeStep(model)

    def make_inputs(self, model: torch.nn.Module, processor: Any, max_length: int, min_length: int) -> Inputs:
        assert isinstance(model, DecodeStep)
        self._cached = CachedInputs(model, processor, max_length=max_length, min_length=min_length)
        return self._cached

    def compared(self, samples: Sequence[Any], batch: int, sequence: int | None) -> Batch:
        """Return the later half of the tokens with the cache of the first half: one token has too few values to
        compare.
        """
        return self._cached.later_half(samples, batch, sequence)

    def answer(self, run: Run, batch: Batch) -> Sequence[torch.Tensor]:
        middle = batch["input_ids"].shape[1] // 2
        if not middle:
            return self.collect(run(batch), batch)
        results: list[object] = []

        def kept(first: Batch) -> object:
            results.append(run(first))
            return results[0]

        results.append(run(self._cached.split(batch, middle, kept)))
        logits = torch.cat([first_output(result, self.output_name) for result in results], dim=1)
        return self.collect(logits, batch)
