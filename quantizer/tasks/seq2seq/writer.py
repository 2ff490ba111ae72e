"""Text generation with the parts of a model: transformers' own ``generate``, over modules or engines.

Also ``WritingTask``, the base class of such tasks, and the batches that calibrate and check the parts.

Shapes: N samples, B samples in a batch, S generated tokens, V tokens of the vocabulary.
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
    """A model as a module that generates greedily: a batch -> ``sequences`` [B x S]."""

    def __init__(self, model: Any, tokens: int, *, exactly: bool = False) -> None:
        super().__init__()
        self.model = model
        self.tokens = tokens
        self.least: dict[str, int] = {"min_new_tokens": tokens} if exactly else {}

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        """Return the tokens of each sample, padded at the end."""
        return {"sequences": _generated(self.model, batch, self.tokens, **self.least)}


def in_parts(model: Any, parts: Mapping[str, PartRun]) -> Any:
    """Return a transformers model whose ``generate`` calls the given parts."""
    kind = type(model)
    with torch.device("meta"):
        shell = kind(model.config)
    shell.generation_config = model.generation_config
    shell.__class__ = type(kind.__name__, (_InParts, kind), {})
    shell.parts = dict(parts)
    return shell.eval()


class _InParts:
    """The base of transformers classes whose forward calls the parts of a model."""

    parts: Mapping[str, PartRun]

    @property
    def device(self) -> torch.device:
        """The device of its inputs; the layers of the class are empty and never run."""
        return torch.device("cpu")

    def get_encoder(self, *_: Any, **__: Any) -> nn.Module:
        """Return the part that runs as the encoder."""
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
        """Return the logits of the given tokens, like the original class; the cache is filled in place."""
        package = transformers_package()
        if encoder_outputs is None:
            encoder_inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **others}
            encoder_outputs = self.get_encoder()(**encoder_inputs)
        assert decoder_input_ids is not None
        batch: Batch = {"input_ids": decoder_input_ids}
        if attention_mask is not None:
            batch["encoder_attention_mask"] = attention_mask
        if past_key_values is None:
            past_key_values = package.EncoderDecoderCache(package.DynamicCache(), package.DynamicCache())
        if past_key_values.get_seq_length():
            outputs = self.parts[WITH_PAST]({**batch, **cached(past_key_values, CACHE)})
        else:
            outputs = self.parts[DECODER]({**batch, "encoder_hidden_states": encoder_outputs[0]})
        for name, half in halves(past_key_values).items():
            keep(half, outputs, PRESENT, name)
        return package.modeling_outputs.Seq2SeqLMOutput(logits=outputs["logits"], past_key_values=past_key_values)


class _EncoderPart(nn.Module):
    """The encoder part with the interface of a transformers encoder."""

    def __init__(self, run: PartRun) -> None:
        super().__init__()
        self.run = run

    def forward(self, **kwargs: Any) -> Any:
        batch = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}
        hidden = self.run(batch)["last_hidden_state"]
        return transformers_package().modeling_outputs.BaseModelOutput(last_hidden_state=hidden)


class Steps(nn.Module):
    """A model as a module that reads given tokens one by one, with its cache, so that all models read the same."""

    output_names = ("logits",)

    def __init__(self, model: Any, first: int, name: str) -> None:
        super().__init__()
        self.model = model
        self.first = first
        self.name = name

    def forward(self, written: Tensor, **batch: Tensor) -> dict[str, Tensor]:
        """Return the logits [B x S x V] at each of the tokens [B x S], for an encoder input."""
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
    """Return the tokens that a float decoder reads while it generates: the first [B x S], then one by one [B x 1]."""
    tokens_read: list[Tensor] = []

    def look(_: nn.Module, __: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        # A model may first detect the language of a recording, without a cache.
        if keywords.get("past_key_values") is not None:
            tokens_read.append(keywords["decoder_input_ids"])

    hook = model.register_forward_pre_hook(look, with_kwargs=True)
    try:
        # One beam keeps the order of samples.
        least = {"min_new_tokens": tokens} if exactly else {}
        _generated(model, batch, tokens, num_beams=1, **least)
    finally:
        hook.remove()
    return tokens_read


def _generated(model: Any, batch: Batch, tokens: int, **options: int) -> Tensor:
    """Return the greedily generated tokens of a model, without the hints that transformers logs."""
    with _without_hints():
        generated: Tensor = model.generate(**batch, max_new_tokens=tokens, do_sample=False, **options)
    return generated


@contextmanager
def _without_hints() -> Iterator[None]:
    """Silence transformers below errors while any thread is inside; the log level is global."""
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
    """Return the tokens of each sample without padding at the end, B tensors [S]."""
    own = torch.ones_like(sequences) if padding is None else sequences != padding
    return [
        row[: int(is_own.nonzero().max()) + 1 if is_own.any() else 0]
        for row, is_own in zip(sequences, own, strict=True)
    ]


class WritingTask(CountedTask):
    """Samples to generated tokens [N x S], scored by their text.

    A model is called once per batch; see ``Writer``.
    """

    output_name = "sequences"
    in_parts: ClassVar[bool] = True

    def __init__(self, model: torch.nn.Module, processor: Any, **options: Any) -> None:
        super().__init__(model, processor, **options)
        self.tokenizer = getattr(processor, "tokenizer", processor)
        require_parts(model, self.example())

    def collect(self, result: object, batch: Batch) -> Sequence[torch.Tensor]:
        """Return the generated tokens of each sample, without padding."""
        return written_tokens(first_output(result, self.output_name), self.tokenizer.pad_token_id)

    def decide(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """Return the tokens [N x S], padded with -1."""
        return whole_numbers(outputs)

    def texts(self, predictions: Predictions) -> list[str]:
        """Return the generated text of each sample."""
        examples = [tokens[tokens >= 0].tolist() for tokens in predictions.decisions]
        return [" ".join(self.tokenizer.decode(tokens, skip_special_tokens=True).split()) for tokens in examples]

    def paired(self, float_predictions: Predictions, other: Predictions) -> dict[str, float]:
        """Return the shares of tokens and of texts on which both models agree."""
        pair = float_predictions.decisions, other.decisions
        return {"equal_tokens": equal_tokens(*pair), "equal_texts": equal_texts(*pair)}


def equal_tokens(reference: npt.NDArray[Any], other_tokens: npt.NDArray[Any]) -> float:
    """Return the share of positions where two models generated the same token, among those where either generated one.

    Args:
        reference: tokens [N x S], padded with -1.
        other_tokens: tokens of the other model, possibly with another S.
    """
    first, second = _alike(reference, other_tokens)
    present = (first >= 0) | (second >= 0)
    return float((first == second)[present].mean()) if present.any() else 1.0


def equal_texts(reference: npt.NDArray[Any], other_tokens: npt.NDArray[Any]) -> float:
    """Return the share of samples for which two models generated the same tokens; see ``equal_tokens``."""
    first, second = _alike(reference, other_tokens)
    return float((first == second).all(axis=1).mean())


def _alike(*tokens: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    longest = max(array.shape[1] for array in tokens)
    return [np.pad(array, ((0, 0), (0, longest - array.shape[1])), constant_values=-1) for array in tokens]


@dataclass(frozen=True)
class PartBatches:
    """The inputs of all parts at one shape.

    Attributes:
        read: the batch of the encoder, which is that of the whole model.
        parts: the batch of each part, by its name.
        written: tokens that the decoder reads one by one [B x S].
        first: the number of tokens that it reads at once at the beginning.
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
    """Return the batches that calibrate a whole model: encoder inputs, and the tokens generated from them.

    The decoder reads all tokens at once, which gives the same ranges as one by one with a cache.
    """
    result = []
    with loop("write", unit="batch") as writing:
        for done, batch in enumerate(batches, start=1):
            ids = torch.cat(read_tokens(model, batch, tokens), dim=1)
            mask = batch.get("attention_mask")
            if mask is not None and mask.shape == ids.shape and ids.shape[1] > 1:
                # With equal lengths, the mask could be that of either sequence.
                ids = ids[:, :-1]
            result.append({**batch, "decoder_input_ids": ids})
            writing.reach(done, len(batches))
    return result


def part_batches(model: Any, parts: dict[str, nn.Module], read: Batch, steps: int) -> PartBatches:
    """Return the inputs of each part for an encoder batch, after ``steps`` generated tokens."""
    batch_size = len(next(iter(read.values())))
    tokens_read = read_tokens(model, rows_at(read, (0,)), steps, exactly=True)
    first, written = tokens_read[0].shape[1], torch.cat(tokens_read, dim=1).repeat(batch_size, 1)
    mask = {"encoder_attention_mask": read["attention_mask"]} if "attention_mask" in read else {}
    if mask and read["attention_mask"].shape == written.shape:
        # Axes of tokens are recognized by their length.
        written = written[:, :-1]
    with torch.no_grad():
        encoded = {"encoder_hidden_states": parts[ENCODER](**read)["last_hidden_state"], **mask}
        outputs = parts[DECODER](input_ids=written[:, :-1], **encoded)
    past = {
        f"{CACHE}{name.removeprefix(PRESENT)}": value for name, value in outputs.items() if name.startswith(PRESENT)
    }
    batches = {
        ENCODER: read,
        DECODER: {"input_ids": written[:, :first], **encoded},
        WITH_PAST: {"input_ids": written[:, -1:], **mask, **past},
    }
    return PartBatches(read, batches, written, first)
