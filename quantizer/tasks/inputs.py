"""Batches for a model: of samples, filled to a size, random, and an example for export. Here of texts.

Shapes: B rows in a batch, S tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from typing import Protocol
from typing import TypeAlias

import torch

from quantizer.errors import TaskError

__all__ = ["EXAMPLE_ROWS", "Batch", "Inputs", "Sample", "TextInputs", "batch_shape", "longest_sequence"]

Batch: TypeAlias = dict[str, torch.Tensor]
"""The model's inputs by name: of texts each int64 [B x S], of images float32 [B x channels x height x width]."""
Sample: TypeAlias = str | Path
"""What one row of a batch is made of: a text, or the file of an image."""

EXAMPLE_ROWS = 2
EXAMPLE_TOKENS = 16
_CHARACTERS_PER_TOKEN = 8


def batch_shape(batch: Batch) -> tuple[int, int | None]:
    """Rows of a batch, and its tokens; None: it is of images."""
    first = next(iter(batch.values()))
    return first.shape[0], first.shape[1] if first.dim() == 2 else None


def longest_sequence(model: torch.nn.Module, config: Any) -> int | None:
    """Return how many tokens a model takes at once; None: it has no limit of its own.

    A table of positions with a row for padding has no token before or at that row: positions begin behind it.
    """
    most: int | None = getattr(config, "max_position_embeddings", None)
    for path, module in model.named_modules():
        is_table = isinstance(module, torch.nn.Embedding) and "position" in path.rpartition(".")[2]
        if is_table and module.num_embeddings == most and isinstance(module.padding_idx, int):
            return int(module.num_embeddings) - module.padding_idx - 1
    return most


class Inputs(Protocol):
    """Makes batches with the same inputs for the float model, a proxy and an engine."""

    names: tuple[str, ...]
    """The names of the inputs in every batch."""

    def order(self, samples: Sequence[Any]) -> list[int]:
        """In which order samples share batches with the least padding."""

    def batch(self, samples: Sequence[Any]) -> Batch:
        """Return one batch of samples."""

    def filled(self, samples: Sequence[Any], rows: int, sequence: int | None) -> Batch:
        """Return a batch of exactly so many rows and tokens; without samples it is random."""

    def check(self, samples: Sequence[Any]) -> None:
        """Look at samples without running anything.

        Raises:
            TaskError: one cannot be read.
        """

    def random(self, rows: int, sequence: int | None, seed: int = 0) -> Batch:
        """Random values, nothing masked; see ``Task.random_batch``."""

    def example(self, samples: Sequence[Any]) -> Batch:
        """Return a batch of two; see ``Task.example``."""


class TextInputs:
    """Makes batches with the same inputs for the float model, a proxy and an engine.

    Args:
        model: read for its accepted inputs and its config only; it is not kept.
        tokenizer: a transformers tokenizer.
        max_length: longer texts are cut to this many tokens.
        min_length: shorter batches are padded to this many tokens, for engines that have a lower limit.

    Raises:
        TaskError: lengths that cannot be.
    """

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
        # A tokenizer may give token types that the model has no use for; a forward with **kwargs would hide that.
        accepted = inspect.signature(model.forward).parameters
        names = list(tokenizer.model_input_names)
        known = [name for name in names if name in accepted]
        self.names: tuple[str, ...] = tuple(known if "input_ids" in known else names)

    def order(self, texts: Sequence[str]) -> list[int]:
        """By length: texts of like length share a batch."""
        return sorted(range(len(texts)), key=lambda at: (len(texts[at]), at))

    def batch(self, texts: Sequence[str], min_length: int | None = None) -> Batch:
        """Return one batch [B x S], S the length of its longest text, or ``min_length`` if that is more."""
        shortest = min_length or self.min_length
        options = {"truncation": True, "return_tensors": "pt"}
        encoded = self.tokenizer(list(texts), padding="longest", max_length=self.max_length, **options)
        if encoded["input_ids"].shape[1] < shortest:
            encoded = self.tokenizer(list(texts), padding="max_length", max_length=shortest, **options)
        return {name: encoded[name] for name in self.names if name in encoded}

    def check(self, texts: Sequence[str]) -> None:
        """Nothing: a text that was read can be tokenized."""

    def filled(self, texts: Sequence[str], rows: int, sequence: int | None) -> Batch:
        """Return a batch [rows x sequence], every second row filled with text to the end, the others cut or padded.

        Without texts its tokens are random.
        """
        tokens = self._tokens(sequence)
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
        """Random ordinary tokens [rows x sequence], nothing masked; see ``Task.random_batch``."""
        tokens = self._tokens(sequence)
        special = set(self.tokenizer.all_special_ids)
        ordinary = torch.tensor([token for token in range(self.vocabulary) if token not in special])
        picked = torch.randint(len(ordinary), (rows, tokens), generator=torch.Generator().manual_seed(seed))
        fill = {"input_ids": ordinary[picked], "attention_mask": torch.ones_like(picked)}
        return {name: fill[name] if name in fill else torch.zeros_like(picked) for name in self.names}

    def example(self, texts: Sequence[str]) -> Batch:
        """Return a batch of two [2 x S] with S at least 16 where the model allows it; see ``Task.example``."""
        tokens = min(max(EXAMPLE_TOKENS, self.min_length), self.max_length)
        if texts:
            return self.batch([texts[0], texts[1 % len(texts)]], min_length=tokens)
        batch = self.random(EXAMPLE_ROWS, tokens)
        # Half of the second row is padding, so that a trace sees a mask that masks something.
        self._pad(batch, slice(1, 2), tokens // 2)
        return batch

    def _pad(self, batch: Batch, rows: slice, start: int) -> None:
        """Make padding of what stands in some rows from a token on."""
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
    """Return the text of a row with those after it, until it surely has so many tokens."""
    words = texts[row % len(texts)]
    taken = 1
    while len(words) < tokens * _CHARACTERS_PER_TOKEN:
        words = f"{words} {texts[(row + taken) % len(texts)]}"
        taken += 1
    return words
