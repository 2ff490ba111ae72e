"""The batches that a model needs (of samples, filled to a size, random, an example for export), and those of texts.

Shapes: B samples in a batch, S tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch

from quantizer.errors import TaskError
from quantizer.utils.dimension_names import CACHE
from quantizer.utils.sizes import DataSizes

Batch: TypeAlias = dict[str, torch.Tensor]
"""The model's inputs by name: int64 [B x S] for texts, float32 [B x channels x height x width] for images,
[B x samples] or [B x steps x features] for recordings."""
Sample: TypeAlias = str | Path | tuple[str, ...]
"""The source of one row of a batch: a text, a text in words or parts, or the path of an image or a recording."""

EXAMPLE_ROWS = 2
EXAMPLE_TOKENS = 16
_CHARACTERS_PER_TOKEN = 8


def batch_shape(batch: Batch) -> tuple[int, int | None]:
    """Return the number of samples of a batch, and that of its tokens; None for images and other values.

    Tokens in a decoder's cache count, too.
    """
    first = next(iter(batch.values()))
    kept = next((value.shape[2] for name, value in batch.items() if name.startswith(CACHE)), None)
    if kept is not None:
        return first.shape[0], kept + first.shape[1]
    return first.shape[0], first.shape[1] if first.dim() == 2 and not first.is_floating_point() else None


def rows_at(batch: Batch, places: Sequence[int]) -> Batch:
    """Return a batch of some rows of another one; an input that is the same for all rows stays as it is.

    Such an input has another length along axis 0 than the first one: a fixed mask, say.
    """
    size = len(next(iter(batch.values())))
    return {name: value[list(places)] if len(value) == size else value for name, value in batch.items()}


def longest_sequence(model: torch.nn.Module, config: Any) -> int | None:
    """Return the longest sequence that a model accepts, in tokens; None: it has no limit of its own.

    If the table of positions has a padding row, positions begin after it: the rows up to it are for no token.
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

    def order(self, samples: Sequence[Any]) -> list[int]:
        """Return the indices of samples in the order in which batches need the least padding."""

    def batch(self, samples: Sequence[Any]) -> Batch:
        """Return one batch of samples."""

    def filled(self, samples: Sequence[Any], rows: int, sequence: int | None) -> Batch:
        """Return a batch of exactly ``rows`` rows and ``sequence`` tokens; without samples it is random."""

    def check(self, samples: Sequence[Any]) -> None:
        """Check samples without running the model.

        Raises:
            TaskError: a sample cannot be read.
        """

    def random(self, rows: int, sequence: int | None, seed: int = 0) -> Batch:
        """Return a batch of random values with nothing masked; see ``Task.random_batch``."""

    def example(self, samples: Sequence[Any]) -> Batch:
        """Return a batch of two samples; see ``Task.example``."""


class Feed(Protocol):
    """The data of a model without scores: a task, or the batches of a module that somebody gave in Python."""

    @property
    def inputs(self) -> Inputs:
        """The batches of the model."""

    @property
    def sizes(self) -> DataSizes | None:
        """The open axes of the inputs and their sizes in the data; None: those that the inputs of a task have."""

    @property
    def rows_apart(self) -> bool:
        """True if the model computes each row of a batch for itself, so that a batch may be cut."""

    def all_samples(self, mixed: Sequence[Any]) -> list[Any]:
        """Return the samples of rows."""

    def batches(self, rows: Sequence[Any], limit: int | None = None) -> list[Batch]:
        """Return rows as at most ``limit`` batches, in their own order."""

    def compared(self, samples: Sequence[Any], batch: int, sequence: int | None) -> Batch:
        """Return a batch of that size on which an engine's outputs are compared with PyTorch's."""

    def example(self) -> Batch:
        """Return a small batch for export."""

    def random_batch(self, batch: int, sequence: int | None = None, seed: int = 0) -> Batch:
        """Return a batch of that size to measure latency."""


class TextInputs:
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
        # A tokenizer may give token types that the model does not use; a forward with **kwargs would not complain.
        accepted = inspect.signature(model.forward).parameters
        names = list(tokenizer.model_input_names)
        known = [name for name in names if name in accepted]
        self.names: tuple[str, ...] = tuple(known if "input_ids" in known else names)

    def order(self, texts: Sequence[Any]) -> list[int]:
        """Return the indices of texts by length, so that texts of similar length share a batch."""
        return sorted(range(len(texts)), key=lambda at: (len(self.whole(texts[at])), at))

    def batch(self, texts: Sequence[Any], min_length: int | None = None) -> Batch:
        """Return one batch [B x S]; S is the length of its longest text, or ``min_length`` if that is more."""
        shortest = min_length or self.min_length
        encoded = self.encoded(texts, padding="longest", max_length=self.max_length, return_tensors="pt")
        if encoded["input_ids"].shape[1] < shortest:
            encoded = self.encoded(texts, padding="max_length", max_length=shortest, return_tensors="pt")
        return {name: encoded[name] for name in self.names if name in encoded}

    def encoded(self, texts: Sequence[Any], **options: Any) -> Any:
        """Return what the tokenizer makes of samples, cut to ``max_length`` tokens; a subclass reads other samples."""
        return self.tokenizer(list(texts), truncation=True, **options)

    def whole(self, sample: Any) -> str:
        """Return a sample as one text: words and parts are joined by spaces."""
        return " ".join(sample) if isinstance(sample, tuple) else str(sample)

    def require_fast(self) -> None:
        """Raise ``TaskError`` if the tokenizer does not say from which part of a text its tokens are."""
        if not self.tokenizer.is_fast:
            raise TaskError(
                f"{type(self.tokenizer).__name__} does not say from which part of a text its tokens are: save the "
                "model with its fast tokenizer (tokenizer.json)"
            )

    def check(self, texts: Sequence[Any]) -> None:
        """Do nothing: every text can be tokenized."""

    def filled(self, texts: Sequence[Any], rows: int, sequence: int | None) -> Batch:
        """Return a batch [rows x sequence]: every second row is full of text, the others are one text, cut or padded.

        Without texts the tokens are random, and every second row is padded from its middle on.
        """
        tokens, texts = self._tokens(sequence), [self.whole(text) for text in texts]
        if not texts:
            made = self.random(rows, tokens)
            self._pad(made, slice(1, None, 2), (tokens + 1) // 2)
            return made
        encoded = self.tokenizer(
            [_long(texts, row, tokens) if row % 2 == 0 else texts[row % len(texts)] for row in range(rows)],
            padding="max_length",
            truncation=True,
            max_length=tokens,
            return_tensors="pt",
        )
        return {name: encoded[name] for name in self.names if name in encoded}

    def random(self, rows: int, sequence: int | None, seed: int = 0) -> Batch:
        """Return random ordinary tokens [rows x sequence] with nothing masked; see ``Task.random_batch``."""
        tokens = self._tokens(sequence)
        special = set(self.tokenizer.all_special_ids)
        ordinary = torch.tensor([token for token in range(self.vocabulary) if token not in special])
        picked = torch.randint(len(ordinary), (rows, tokens), generator=torch.Generator().manual_seed(seed))
        fill = {"input_ids": ordinary[picked], "attention_mask": torch.ones_like(picked)}
        return {name: fill[name] if name in fill else torch.zeros_like(picked) for name in self.names}

    def example(self, texts: Sequence[Any]) -> Batch:
        """Return a batch of two texts [2 x S], S at least 16 if ``max_length`` allows it; see ``Task.example``."""
        tokens = min(max(EXAMPLE_TOKENS, self.min_length), self.max_length)
        if texts:
            return self.batch([texts[0], texts[1 % len(texts)]], min_length=tokens)
        batch = self.random(EXAMPLE_ROWS, tokens)
        # Half of the second row is padding, so that a trace meets a mask that masks something.
        self._pad(batch, slice(1, 2), tokens // 2)
        return batch

    def _pad(self, batch: Batch, rows: slice, start: int) -> None:
        """Replace tokens of ``rows`` by padding, from position ``start`` on."""
        for name, padding in (("input_ids", self.tokenizer.pad_token_id), ("attention_mask", 0)):
            if name in batch:
                batch[name][rows, start:] = padding

    def _tokens(self, sequence: int | None) -> int:
        if sequence is None:
            raise TaskError("a batch of texts was asked for without a number of tokens: give 'sequence'")
        self._check_length(sequence, "sequence")
        return sequence

    def _check_length(self, length: int, what: str) -> None:
        if self.max_positions is not None and length > self.max_positions:
            raise TaskError(f"{what}={length}, but the model has {self.max_positions} positions: lower it")


def _long(texts: Sequence[str], row: int, tokens: int) -> str:
    """Return the text of a row joined with those after it, with enough characters for ``tokens`` tokens."""
    words = texts[row % len(texts)]
    taken = 1
    while len(words) < tokens * _CHARACTERS_PER_TOKEN:
        words = f"{words} {texts[(row + taken) % len(texts)]}"
        taken += 1
    return words
