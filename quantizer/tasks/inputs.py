"""``Inputs`` and ``Feed``, the sources of a model's batches, and ``TextInputs``, the batches of text models.

Shapes: B samples in a batch, S tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch

from quantizer.errors import TaskError
from quantizer.utils.dimension_names import CACHE
from quantizer.utils.signatures import signature_of
from quantizer.utils.sizes import Axes, DataSizes

Batch: TypeAlias = dict[str, torch.Tensor]
"""The model's inputs by name: int64 [B x S] for texts, float32 [B x channels x height x width] for images,
[B x samples] or [B x steps x features] for recordings."""
Sample: TypeAlias = str | Path | tuple[str, ...]
"""One model input before preprocessing: a text, a text in words or parts, or the path of an image or recording."""

RECORDING = "input_values"
"""The name of the input [B x samples] of models of raw recordings."""
EXAMPLE_BATCH_SIZE = 2
EXAMPLE_TOKENS = 16
_CHARACTERS_PER_TOKEN = 8


def batch_shape(batch: Batch) -> tuple[int, int | None]:
    """Return the number of samples of a batch, and the tokens of its texts or the values of its recordings.

    The second number is None for images and other inputs. Tokens in a decoder's cache also count.
    """
    name, first = next(iter(batch.items()))
    cache_length = next((value.shape[2] for name, value in batch.items() if name.startswith(CACHE)), None)
    if cache_length is not None:
        return first.shape[0], cache_length + first.shape[1]
    is_sequence = first.dim() == 2 and (not first.is_floating_point() or name == RECORDING)
    return first.shape[0], first.shape[1] if is_sequence else None


def rows_at(batch: Batch, places: Sequence[int]) -> Batch:
    """Return a batch with some rows of another one; inputs without a batch axis stay as they are.

    An input whose length along axis 0 differs from the first input's, such as a fixed mask, has no batch axis.
    """
    size = len(next(iter(batch.values())))
    return {name: value[list(places)] if len(value) == size else value for name, value in batch.items()}


def longest_sequence(model: torch.nn.Module, config: Any) -> int | None:
    """Return the most tokens that a model accepts; None: there is no limit.

    If the table of positions has a padding row, positions begin after it.
    """
    most: int | None = getattr(config, "max_position_embeddings", None)
    for path, module in model.named_modules():
        is_table = isinstance(module, torch.nn.Embedding) and "position" in path.rpartition(".")[2]
        if is_table and module.num_embeddings == most and isinstance(module.padding_idx, int):
            return int(module.num_embeddings) - module.padding_idx - 1
    return most


class Inputs(Protocol):
    """The batches of a model; the same for the float model, a proxy and an engine."""

    names: tuple[str, ...]
    """The names of the inputs in every batch."""

    @property
    def in_data(self) -> DataSizes | None:
        """The axes that vary in the data, and their sizes; None: the dynamic axes follow from an example."""
        return None

    @property
    def sizes(self) -> DataSizes | None:
        """``in_data`` without axes that the model fixes."""
        return None

    def keep_open(self, axes: Axes) -> None:
        """Keep only these axes of ``in_data`` dynamic; the model fixes the others."""
        return

    def order(self, samples: Sequence[Any]) -> list[int]:
        """Return the indices of samples in the order in which batches need the least padding."""

    def batch(self, samples: Sequence[Any]) -> Batch:
        """Return one batch of samples."""

    def filled(self, samples: Sequence[Any], batch_size: int, sequence: int | None) -> Batch:
        """Return a batch of exactly ``batch_size`` samples and ``sequence`` tokens; random values without samples."""

    def check(self, samples: Sequence[Any]) -> None:
        """Check samples without running the model.

        Raises:
            TaskError: a sample cannot be read.
        """

    def random(self, batch_size: int, sequence: int | None, seed: int = 0) -> Batch:
        """Return a batch of random values with nothing masked; see ``Task.random_batch``."""

    def example(self, samples: Sequence[Any]) -> Batch:
        """Return a batch of two samples; see ``Task.example``."""


class FileInputs(Inputs):
    """Base of batches that are read from files: images and recordings."""

    def order(self, paths: Sequence[Path]) -> list[int]:
        """Return the indices of files unchanged, for samples of one size: no order saves padding."""
        return list(range(len(paths)))

    def filled(self, paths: Sequence[Path], batch_size: int, sequence: int | None) -> Batch:
        """Return a batch of exactly ``batch_size`` files, repeated if there are fewer; random without files."""
        if not paths:
            return self.random(batch_size, sequence)
        return self.batch([paths[place % len(paths)] for place in range(batch_size)])

    def example(self, paths: Sequence[Path]) -> Batch:
        """Return a batch of two files; see ``Task.example``."""
        return self.filled(paths[:EXAMPLE_BATCH_SIZE], EXAMPLE_BATCH_SIZE, None)


class Feed(Protocol):
    """The data of a model: a task, or batches given in Python."""

    @property
    def inputs(self) -> Inputs:
        """The batches of the model."""

    @property
    def in_data(self) -> DataSizes | None:
        """The axes that vary in the data; see ``Inputs``."""

    @property
    def sizes(self) -> DataSizes | None:
        """The dynamic axes of the inputs and their sizes in the data; see ``Inputs``."""

    def keep_open(self, axes: Axes) -> None:
        """Keep only these axes dynamic; see ``Inputs``."""

    @property
    def samples_independent(self) -> bool:
        """True if the model computes each sample of a batch independently, so that a batch may be cut."""

    def all_samples(self, mixed: Sequence[Any]) -> list[Any]:
        """Return the model inputs of examples, texts and paths."""

    def batches(self, examples: Sequence[Any], limit: int | None = None) -> list[Batch]:
        """Return examples as at most ``limit`` batches, in their own order."""

    def compared(self, samples: Sequence[Any], batch: int, sequence: int | None) -> Batch:
        """Return a batch of the given size on which the outputs of an engine and of PyTorch are compared."""

    def example(self) -> Batch:
        """Return a small batch for export."""

    def random_batch(self, batch: int, sequence: int | None = None, seed: int = 0) -> Batch:
        """Return a random batch of the given size, for benchmarks."""


class TextInputs(Inputs):
    """The batches of a text model; the same for the float model, a proxy and an engine."""

    def __init__(self, model: torch.nn.Module, tokenizer: Any, *, max_length: int, min_length: int) -> None:
        config = getattr(model, "config", None)
        self.max_positions = longest_sequence(model, config)
        if not 1 <= min_length <= max_length:
            raise TaskError(
                f"min_length={min_length} and max_length={max_length}: expected 1 <= min_length <= max_length"
            )
        self._check_length(max_length, "max_length")
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.min_length = min_length
        self.vocabulary = min(len(tokenizer), getattr(config, "vocab_size", None) or len(tokenizer))
        # A tokenizer may return token types that the model does not use, and a forward with **kwargs would ignore them.
        accepted = signature_of(model.forward).parameters
        names = list(tokenizer.model_input_names)
        known = [name for name in names if name in accepted]
        self.names: tuple[str, ...] = tuple(known if "input_ids" in known else names)

    def order(self, texts: Sequence[Any]) -> list[int]:
        """Return the indices of texts by length, so that texts of similar length share a batch."""
        return sorted(range(len(texts)), key=lambda at: (len(self.whole(texts[at])), at))

    def batch(self, texts: Sequence[Any], min_length: int | None = None) -> Batch:
        """Return one batch [B x S]; S is the length of the longest text, at least ``min_length``."""
        shortest = min_length or self.min_length
        encoded = self.encoded(texts, padding="longest", max_length=self.max_length, return_tensors="pt")
        if encoded["input_ids"].shape[1] < shortest:
            encoded = self.encoded(texts, padding="max_length", max_length=shortest, return_tensors="pt")
        return {name: encoded[name] for name in self.names if name in encoded}

    def encoded(self, texts: Sequence[Any], **options: Any) -> Any:
        """Return the encoding of texts, truncated to ``max_length`` tokens; override it for other samples."""
        return self.tokenizer(list(texts), truncation=True, **options)

    def whole(self, sample: Any) -> str:
        """Return a sample as one text; words and parts are joined by spaces."""
        return " ".join(sample) if isinstance(sample, tuple) else str(sample)

    def require_fast(self) -> None:
        """Raise ``TaskError`` if the tokenizer cannot map tokens to the words of a text."""
        if not self.tokenizer.is_fast:
            raise TaskError(
                f"{type(self.tokenizer).__name__} does not map tokens to the words of a text: save the model "
                "with its fast tokenizer (tokenizer.json)"
            )

    def check(self, texts: Sequence[Any]) -> None:
        """Do nothing: every text can be tokenized."""

    def filled(self, texts: Sequence[Any], batch_size: int, sequence: int | None) -> Batch:
        """Return a batch [batch_size x sequence] that alternates full texts with cut or padded ones.

        Without texts the tokens are random, and every second sample is padded from its middle on.
        """
        tokens, texts = self._tokens(sequence), [self.whole(text) for text in texts]
        if not texts:
            batch = self.random(batch_size, tokens)
            self._pad(batch, slice(1, None, 2), (tokens + 1) // 2)
            return batch
        encoded = self.tokenizer(
            [
                _long(texts, place, tokens) if place % 2 == 0 else texts[place % len(texts)]
                for place in range(batch_size)
            ],
            padding="max_length",
            truncation=True,
            max_length=tokens,
            return_tensors="pt",
        )
        return {name: encoded[name] for name in self.names if name in encoded}

    def random(self, batch_size: int, sequence: int | None, seed: int = 0) -> Batch:
        """Return random ordinary tokens [batch_size x sequence] with nothing masked; see ``Task.random_batch``."""
        tokens = self._tokens(sequence)
        special = set(self.tokenizer.all_special_ids)
        ordinary = torch.tensor([token for token in range(self.vocabulary) if token not in special])
        picked = torch.randint(len(ordinary), (batch_size, tokens), generator=torch.Generator().manual_seed(seed))
        fill = {"input_ids": ordinary[picked], "attention_mask": torch.ones_like(picked)}
        return {name: fill[name] if name in fill else torch.zeros_like(picked) for name in self.names}

    def example(self, texts: Sequence[Any]) -> Batch:
        """Return a batch of two texts [2 x S], S at least 16 if ``max_length`` allows it; see ``Task.example``."""
        tokens = min(max(EXAMPLE_TOKENS, self.min_length), self.max_length)
        if texts:
            return self.batch([texts[0], texts[1 % len(texts)]], min_length=tokens)
        batch = self.random(EXAMPLE_BATCH_SIZE, tokens)
        # Half of the second sample is padding, so that the trace contains a mask with zeros.
        self._pad(batch, slice(1, 2), tokens // 2)
        return batch

    def _pad(self, batch: Batch, rows: slice, start: int) -> None:
        """Replace tokens of ``rows`` by padding, from position ``start`` on."""
        for name, padding in (("input_ids", self.tokenizer.pad_token_id), ("attention_mask", 0)):
            if name in batch:
                batch[name][rows, start:] = padding

    def _tokens(self, sequence: int | None) -> int:
        if sequence is None:
            raise TaskError("a batch of texts needs a number of tokens: set 'sequence'")
        self._check_length(sequence, "sequence")
        return sequence

    def _check_length(self, length: int, what: str) -> None:
        if self.max_positions is not None and length > self.max_positions:
            raise TaskError(f"{what}={length}, but the model has {self.max_positions} positions: lower it")


def _long(texts: Sequence[str], place: int, tokens: int) -> str:
    """Return a text joined with the texts after it, with enough characters for ``tokens`` tokens."""
    words = texts[place % len(texts)]
    joined = 1
    while len(words) < tokens * _CHARACTERS_PER_TOKEN:
        words = f"{words} {texts[(place + joined) % len(texts)]}"
        joined += 1
    return words
