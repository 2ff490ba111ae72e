"""Batches for a model: tokenised texts, random tokens, and an example for export.

Shapes: B sequences in a batch, S tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any
from typing import TypeAlias

import torch

from quantizer.errors import TaskError

__all__ = ["Batch", "TextInputs"]

Batch: TypeAlias = dict[str, torch.Tensor]
"""The model's inputs by name, each int64 [B x S]."""

EXAMPLE_ROWS = 2
EXAMPLE_TOKENS = 16


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
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
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

    def tokenize(self, texts: Sequence[str], min_length: int | None = None) -> Batch:
        """One batch [B x S], S the length of its longest text, or ``min_length`` if that is more."""
        shortest = min_length or self.min_length
        options = {"truncation": True, "return_tensors": "pt"}
        encoded = self.tokenizer(list(texts), padding="longest", max_length=self.max_length, **options)
        if encoded["input_ids"].shape[1] < shortest:
            encoded = self.tokenizer(list(texts), padding="max_length", max_length=shortest, **options)
        return {name: encoded[name] for name in self.names if name in encoded}

    def exact(self, texts: Sequence[str], length: int) -> Batch:
        """One batch [B x length]: longer texts are cut, shorter ones padded."""
        self._check_length(length, "length")
        encoded = self.tokenizer(
            list(texts), padding="max_length", truncation=True, max_length=length, return_tensors="pt"
        )
        return {name: encoded[name] for name in self.names if name in encoded}

    def random(self, batch: int, sequence: int, seed: int = 0) -> Batch:
        """Random ordinary tokens [batch x sequence], nothing masked; see ``Task.random_batch``."""
        self._check_length(sequence, "sequence")
        special = set(self.tokenizer.all_special_ids)
        ordinary = torch.tensor([token for token in range(self.vocabulary) if token not in special])
        picked = torch.randint(len(ordinary), (batch, sequence), generator=torch.Generator().manual_seed(seed))
        fill = {"input_ids": ordinary[picked], "attention_mask": torch.ones_like(picked)}
        return {name: fill[name] if name in fill else torch.zeros_like(picked) for name in self.names}

    def example(self, texts: Sequence[str]) -> Batch:
        """A batch of two [2 x S] with S at least 16 where the model allows it; see ``Task.example``."""
        tokens = min(max(EXAMPLE_TOKENS, self.min_length), self.max_length)
        if texts:
            return self.tokenize([texts[0], texts[1 % len(texts)]], min_length=tokens)
        batch = self.random(EXAMPLE_ROWS, tokens)
        # Half of the second row is padding, so that a trace sees a mask that masks something.
        batch["input_ids"][1, tokens // 2 :] = self.tokenizer.pad_token_id
        if "attention_mask" in batch:
            batch["attention_mask"][1, tokens // 2 :] = 0
        return batch

    def _check_length(self, length: int, what: str) -> None:
        if self.max_positions is not None and length > self.max_positions:
            raise TaskError(f"{what}={length}, but the model has {self.max_positions} positions: lower it")
