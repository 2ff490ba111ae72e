"""The batches of a model in parts: those that calibrate it, and the inputs of each part at a shape.

Shapes: B rows, S tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.tasks import Batch, rows_at
from quantizer.tasks.seq2seq.parts import DECODER, ENCODER, WITH_PAST
from quantizer.tasks.seq2seq.writer import read_tokens
from quantizer.utils.dimension_names import CACHE, PRESENT
from quantizer.utils.progress import loop


@dataclass(frozen=True)
class PartBatches:
    """The inputs of all parts at one shape.

    Attributes:
        read: the batch of the encoder, which is that of the whole model.
        parts: the batch of each part, by its name.
        written: tokens that the decoder reads one by one [B x S].
        first: how many of them it reads at once at the beginning.
    """

    read: Batch
    parts: dict[str, Batch]
    written: Tensor
    first: int

    @property
    def steps(self) -> Batch:
        """The batch of ``Steps``."""
        return {**self.read, "written": self.written}


def calibration_batches(model: Any, batches: Sequence[Batch], tokens: int) -> list[Batch]:
    """Return the batches that calibrate a whole model: what its encoder reads, and what it writes itself for that.

    A decoder reads the tokens of a row at once, which gives the same ranges as one by one with a cache.
    """
    made = []
    with loop("write", unit="batch") as writing:
        for done, batch in enumerate(batches, start=1):
            ids = torch.cat(read_tokens(model, batch, tokens), dim=1)
            mask = batch.get("attention_mask")
            if mask is not None and mask.shape == ids.shape and ids.shape[1] > 1:
                # Of two sequences of one length it cannot be told whose padding a mask is of.
                ids = ids[:, :-1]
            made.append({**batch, "decoder_input_ids": ids})
            writing.reach(done, len(batches))
    return made


def part_batches(model: Any, parts: dict[str, nn.Module], read: Batch, steps: int) -> PartBatches:
    """Return what each part reads, for a batch of the encoder, after a few tokens were written."""
    rows = len(next(iter(read.values())))
    seen = read_tokens(model, rows_at(read, (0,)), steps, exactly=True)
    first, written = seen[0].shape[1], torch.cat(seen, dim=1).repeat(rows, 1)
    mask = {"encoder_attention_mask": read["attention_mask"]} if "attention_mask" in read else {}
    if mask and read["attention_mask"].shape == written.shape:
        # Values at tokens are told from others by their number.
        written = written[:, :-1]
    with torch.no_grad():
        encoded = {"encoder_hidden_states": parts[ENCODER](**read)["last_hidden_state"], **mask}
        made = parts[DECODER](input_ids=written[:, :-1], **encoded)
    past = {f"{CACHE}{name.removeprefix(PRESENT)}": one for name, one in made.items() if name.startswith(PRESENT)}
    batches = {
        ENCODER: read,
        DECODER: {"input_ids": written[:, :first], **encoded},
        WITH_PAST: {"input_ids": written[:, -1:], **mask, **past},
    }
    return PartBatches(read, batches, written, first)
