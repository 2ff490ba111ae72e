"""The base of tasks whose model writes text: an encoder that reads, and a decoder that writes token by token.

Shapes: N rows, B rows of a batch, S tokens that were written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from quantizer.tasks.counted import CountedTask
from quantizer.tasks.inputs import Batch
from quantizer.tasks.outputs import first_output
from quantizer.tasks.seq2seq.parts import require_parts
from quantizer.tasks.seq2seq.writer import written_tokens
from quantizer.tasks.task import Predictions
from quantizer.tasks.tokens.parts import whole_numbers


class WritingTask(CountedTask):
    """Samples to the tokens that are written for them [N x S], scored by the text that these are.

    A model is called once a batch, and writes: see ``Writer``.
    """

    output_name = "sequences"
    in_parts: ClassVar[bool] = True

    def __init__(self, model: torch.nn.Module, processor: Any, **options: Any) -> None:
        super().__init__(model, processor, **options)
        self.tokenizer = getattr(processor, "tokenizer", processor)
        require_parts(model, self.example())

    def collect(self, result: object, batch: Batch) -> Sequence[torch.Tensor]:
        """Return the tokens that were written for each row, without padding."""
        return written_tokens(first_output(result, self.output_name), self.tokenizer.pad_token_id)

    def decide(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """Return the tokens [N x S]; -1 after the last of a row."""
        return whole_numbers(outputs)

    def texts(self, predictions: Predictions) -> list[str]:
        """Return what was written for each row, as text."""
        rows = [tokens[tokens >= 0].tolist() for tokens in predictions.decisions]
        return [" ".join(self.tokenizer.decode(tokens, skip_special_tokens=True).split()) for tokens in rows]

    def paired(self, float_predictions: Predictions, other: Predictions) -> dict[str, float]:
        """Return the share of tokens and of texts that are those of the float model."""
        pair = float_predictions.decisions, other.decisions
        return {"equal_tokens": equal_tokens(*pair), "equal_texts": equal_texts(*pair)}


def equal_tokens(right: npt.NDArray[Any], found: npt.NDArray[Any]) -> float:
    """Return the share of places where two models wrote the same token, of those where one of them wrote any.

    Args:
        right: tokens [N x S], -1 after the last of a row.
        found: the same of another model, maybe with another S.
    """
    one, other = _alike(right, found)
    there = (one >= 0) | (other >= 0)
    return float((one == other)[there].mean()) if there.any() else 1.0


def equal_texts(right: npt.NDArray[Any], found: npt.NDArray[Any]) -> float:
    """Return the share of rows for which two models wrote the same tokens; see ``equal_tokens``."""
    one, other = _alike(right, found)
    return float((one == other).all(axis=1).mean())


def _alike(*tokens: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    longest = max(one.shape[1] for one in tokens)
    return [np.pad(one, ((0, 0), (0, longest - one.shape[1])), constant_values=-1) for one in tokens]
