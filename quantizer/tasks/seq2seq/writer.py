"""Generation with parts: transformers' own ``generate``, over modules or engines in the place of a model's layers.

The base of tasks whose model writes text: an encoder that reads, and a decoder that writes token by token.

Shapes: N rows, B rows of a batch, S tokens that were written.

The batches of a model in parts: those that calibrate it, and the inputs of each part at a shape.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from quantizer.tasks.checkpoints import transformers_package
from quantizer.tasks.inputs import Batch, rows_at
from quantizer.tasks.outputs import first_output, whole_numbers
from quantizer.tasks.seq2seq.parts import DECODER, ENCODER, WITH_PAST, PartRun, cached, halves, keep, require_parts
from quantizer.tasks.task import CountedTask, Predictions
from quantizer.utils.dimension_names import CACHE, PRESENT
from quantizer.utils.progress import loop

_LEVEL = threading.Lock()
_generating = 0
_level = 0


class Writer(nn.Module):
    """A model as a module of what it writes: a batch -> ``sequences`` [B x S], without sampling."""

    def __init__(self, model: Any, tokens: int, *, exactly: bool = False) -> None:
        super().__init__()
        self.model = model
        self.tokens = tokens
        self.least: dict[str, int] = {"min_new_tokens": tokens} if exactly else {}

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        """Return the tokens of each row, filled with padding at its end."""
        return {"sequences": _generated(self.model, batch, self.tokens, **self.least)}


def in_parts(model: Any, parts: Mapping[str, PartRun]) -> Any:
    """Return a model of transformers that generates by its parts, whatever runs them."""
    kind = type(model)
    with torch.device("meta"):
        shell = kind(model.config)
    shell.generation_config = model.generation_config
    shell.__class__ = type(kind.__name__, (_InParts, kind), {})
    shell.parts = dict(parts)
    return shell.eval()


class _InParts:
    """The base of classes of transformers whose models run by their parts."""

    parts: Mapping[str, PartRun]

    @property
    def device(self) -> torch.device:
        """The device of its inputs: the layers of the class itself have no values, and do not run."""
        return torch.device("cpu")

    def get_encoder(self, *_: Any, **__: Any) -> nn.Module:
        """Return what runs as the encoder."""
        return _EncoderPart(self.parts[ENCODER])

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Any = None,
        **others: Any,
    ) -> Any:
        """Return the logits of the tokens that are read, as the class itself does; the cache is filled in place."""
        package = transformers_package()
        if encoder_outputs is None:
            read = {"input_ids": input_ids, "attention_mask": attention_mask, **others}
            encoder_outputs = self.get_encoder()(**read)
        assert decoder_input_ids is not None
        batch: Batch = {"input_ids": decoder_input_ids}
        if attention_mask is not None:
            batch["encoder_attention_mask"] = attention_mask
        if past_key_values is None:
            past_key_values = package.EncoderDecoderCache(package.DynamicCache(), package.DynamicCache())
        if past_key_values.get_seq_length():
            made = self.parts[WITH_PAST]({**batch, **cached(past_key_values, CACHE)})
        else:
            made = self.parts[DECODER]({**batch, "encoder_hidden_states": encoder_outputs[0]})
        for name, half in halves(past_key_values).items():
            keep(half, made, PRESENT, name)
        return package.modeling_outputs.Seq2SeqLMOutput(logits=made["logits"], past_key_values=past_key_values)


class _EncoderPart(nn.Module):
    """The encoder's part, called as the encoder of a model is."""

    def __init__(self, run: PartRun) -> None:
        super().__init__()
        self.run = run

    def forward(self, **kwargs: Any) -> Any:
        batch = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}
        made = self.run(batch)["last_hidden_state"]
        return transformers_package().modeling_outputs.BaseModelOutput(last_hidden_state=made)


class Steps(nn.Module):
    """A model as a module that reads tokens one by one with its own cache: it cannot stray from their path."""

    output_names = ("logits",)

    def __init__(self, model: Any, first: int, name: str) -> None:
        super().__init__()
        self.model = model
        self.first = first
        self.name = name

    def forward(self, written: Tensor, **batch: Tensor) -> dict[str, Tensor]:
        """Return the logits [B x S x V] at each of the tokens [B x S], for what the encoder reads."""
        package = transformers_package()
        cache = package.EncoderDecoderCache(package.DynamicCache(), package.DynamicCache())
        encoded, mask = self.model.get_encoder()(**batch), batch.get("attention_mask")
        options = {} if mask is None else {"attention_mask": mask}
        logits = [
            self.model(
                encoder_outputs=encoded, decoder_input_ids=ids, past_key_values=cache, use_cache=True, **options
            ).logits
            for ids in (written[:, : self.first], *written[:, self.first :, None].unbind(1))
        ]
        return {"logits": torch.cat(logits, dim=1)}


def read_tokens(model: Any, batch: Batch, tokens: int, *, exactly: bool = False) -> list[Tensor]:
    """Return what a float decoder reads while it writes: the first tokens [B x S], and each one [B x 1] after."""
    seen: list[Tensor] = []

    def look(_: nn.Module, __: tuple[Any, ...], given: dict[str, Any]) -> None:
        # A model may look at a recording for its language first, without a cache.
        if given.get("past_key_values") is not None:
            seen.append(given["decoder_input_ids"])

    hook = model.register_forward_pre_hook(look, with_kwargs=True)
    try:
        # One beam: the rows stay in their order.
        least = {"min_new_tokens": tokens} if exactly else {}
        _generated(model, batch, tokens, num_beams=1, **least)
    finally:
        hook.remove()
    return seen


def _generated(model: Any, batch: Batch, tokens: int, **options: int) -> Tensor:
    """Return what a model generates without sampling; hints of transformers on how it is called are for its callers."""
    with _without_hints():
        made: Tensor = model.generate(**batch, max_new_tokens=tokens, do_sample=False, **options)
    return made


@contextmanager
def _without_hints() -> Iterator[None]:
    """Let transformers tell errors alone, as long as any thread is inside: the level is one of the process."""
    global _generating, _level
    logging: Any = transformers_package().utils.logging
    with _LEVEL:
        if not _generating:
            _level = logging.get_verbosity()
            logging.set_verbosity_error()
        _generating += 1
    try:
        yield
    finally:
        with _LEVEL:
            _generating -= 1
            if not _generating:
                logging.set_verbosity(_level)


def written_tokens(sequences: Tensor, padding: int | None) -> list[Tensor]:
    """Return the tokens of each row without the padding at its end, B tensors [S]."""
    own = torch.ones_like(sequences) if padding is None else sequences != padding
    return [row[: int(kept.nonzero().max()) + 1 if kept.any() else 0] for row, kept in zip(sequences, own, strict=True)]


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
