"""The task ``text-generation-with-past``: token by token, with keys and values of former tokens as inputs and outputs.

Shapes: B rows of a batch, S tokens, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from quantizer.tasks.inputs import Batch, Inputs
from quantizer.tasks.outputs import first_output
from quantizer.tasks.task import Run, tasks
from quantizer.tasks.tokens.decode_step import CachedInputs, DecodeStep
from quantizer.tasks.tokens.text_generation import TextGeneration


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
