"""What an ``attention_mask`` means: padding is left out where it is certain, and nothing anywhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.observe.statistics import flat_output, padding_mask, read_mask, without_padding

BATCH, LENGTH = 3, 8


def tokens(lengths: tuple[int, ...] = (8, 5, 2), *, left: bool = False) -> dict[str, Tensor]:
    """Ids with 0 for padding, and their mask."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 50, (len(lengths), LENGTH), generator=generator)
    places = torch.arange(LENGTH)
    mask = places < torch.tensor(lengths)[:, None]
    mask = mask.flip(1) if left else mask
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


@pytest.mark.parametrize("left", [False, True])
def test_padding_of_a_tokenizer_is_told(left: bool) -> None:
    batch = tokens(left=left)
    found = padding_mask(batch)
    assert found is not None
    assert torch.equal(found, batch["attention_mask"].bool())
    embedded = {"inputs_embeds": torch.randn(BATCH, LENGTH, 16), "attention_mask": batch["attention_mask"]}
    assert padding_mask(embedded) is not None
    assert padding_mask({"attention_mask": batch["attention_mask"]}, (batch["input_ids"],)) is not None


def _causal(dtype: torch.dtype) -> dict[str, Tensor]:
    ids = torch.randint(1, 50, (LENGTH, LENGTH))
    return {"input_ids": ids, "attention_mask": torch.ones(LENGTH, LENGTH).tril().to(dtype)}


def _changed(**changes: Any) -> dict[str, Tensor]:
    return {**tokens(), **changes}


MASK = tokens()["attention_mask"]
MAX_LENGTH = tokens((6, 5, 2))

DOUBTFUL: dict[str, tuple[dict[str, Tensor], str]] = {
    "booleans": (_changed(attention_mask=MASK.bool()), "booleans may be True for tokens or for padding"),
    "booleans, true for padding": (
        _changed(attention_mask=~MASK.bool()),
        "booleans may be True for tokens or for padding",
    ),
    "additive": (_changed(attention_mask=(1 - MASK) * -1e4), "added to scores"),
    "floats": (_changed(attention_mask=MASK.float()), "added to scores"),
    "causal": (_causal(torch.long), "square"),
    "of each head": (_changed(attention_mask=MASK[:, None, None]), "4 axes"),
    "segments": (_changed(attention_mask=MASK * 2), "values other than 0 and 1"),
    "holes": (_changed(attention_mask=MASK * torch.tensor([1, 0, 1, 1, 1, 1, 1, 1])), "tokens are not contiguous"),
    "both sides": (_changed(attention_mask=torch.cat([MASK[:2], MASK[2:].flip(1)])), "same side"),
    "an empty row": (_changed(attention_mask=MASK * torch.tensor([[1], [1], [0]])), "same side"),
    "the other way round": (_changed(attention_mask=1 - MASK), "tokens are not contiguous|same side"),
    "the other way round, all padded": (
        {**MAX_LENGTH, "attention_mask": 1 - MAX_LENGTH["attention_mask"]},
        "have the same token",
    ),
    "of a cache": (_changed(input_ids=torch.ones(BATCH, 1).long()), "no other input"),
    "a decoder": (
        _changed(decoder_input_ids=torch.ones(BATCH, LENGTH).long()),
        "decoder's inputs have the same length",
    ),
}


@pytest.mark.parametrize("kind", DOUBTFUL)
def test_a_mask_of_another_meaning_leaves_nothing_out(kind: str) -> None:
    batch, reason = DOUBTFUL[kind]
    found, doubt = read_mask(batch)
    assert found is None
    assert doubt is not None
    assert any(part in doubt for part in reason.split("|"))


@pytest.mark.parametrize("mask", [torch.ones(3, 8), torch.zeros(3, 8), torch.ones(3, 8).bool(), MASK * 0 + 1])
def test_a_mask_that_hides_nothing_is_no_doubt(mask: Tensor) -> None:
    assert read_mask(_changed(attention_mask=mask)) == (None, None)


def test_a_square_mask_of_a_tokenizer_is_told_by_its_tokens() -> None:
    lengths = (8, 3, 5, 2, 7, 7, 6, 1)
    assert padding_mask(tokens(lengths)) is not None
    # Also where it looks as if each saw those before it.
    assert padding_mask(tokens(tuple(range(1, 9)))) is not None


def test_an_operand_of_another_batch_comes_back_whole() -> None:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    mask[:, 5:] = False
    shared = torch.randn(1, LENGTH, 16)
    assert without_padding(shared, mask) is shared
    assert without_padding(torch.randn(BATCH, LENGTH, 16), mask).shape == (BATCH * 5, 16)


def test_channels_are_no_sequence() -> None:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    mask[:, 5:] = False
    other = torch.randn(BATCH, 4, LENGTH)
    assert without_padding(other, mask, channels_last=True) is other
    assert without_padding(torch.randn(BATCH, LENGTH, LENGTH), mask, channels_last=True).shape == (BATCH * 5, LENGTH)


# -- what follows from it ------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """Reads its mask as it is told to; padding has huge values."""

    def __init__(self, additive: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self._additive = additive

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        query, key, value = self.qkv(self.embed(input_ids)).chunk(3, -1)
        scores = query @ key.transpose(-1, -2) + self._additive(attention_mask)
        found: Tensor = self.out(scores.softmax(-1) @ value)
        return found


READ: dict[str, tuple[Any, Any]] = {
    "additive": (lambda mask: (1 - mask) * -1e4, lambda mask: mask[:, None]),
    "true for padding": (lambda mask: mask == 0, lambda mask: mask[:, None].float() * -1e4),
    "causal": (
        lambda mask: torch.ones(len(mask), LENGTH).tril().long(),
        lambda mask: (1.0 - mask[None]) * -1e4,
    ),
}


@pytest.mark.parametrize("kind", READ)
def test_ranges_are_those_without_a_mask(kind: str) -> None:
    """With the mask taken for what it is not, the ranges would be those of padding, or of half the positions."""
    given, additive = READ[kind]
    lengths = (8, 5, 2, 7, 7, 6, 1, 4)
    batch = tokens(lengths)
    if kind == "causal":
        batch["input_ids"] = torch.randint(1, 50, (LENGTH, LENGTH), generator=torch.Generator().manual_seed(1))
    batch["attention_mask"] = given(batch["attention_mask"])
    model = Encoder(additive).eval()
    q = Quantizer(preset="plain", backend="openvino", activations={"calibrator": "max"})
    proxy = q.calib(model)
    with torch.no_grad(), pytest.warns(UserWarning, match="attention_mask .* may not be 1 for tokens") as told:
        first, expected = [proxy(**batch) for _ in range(2)]
    assert torch.equal(first, expected)
    assert len(told) == 1
    found = next(operand for operand in q.plan["qkv.forward.linear_0"].operands if operand.name == "input")
    embedded = model.embed(batch["input_ids"]).detach()
    assert found.maximum == float(embedded.max())
    assert found.minimum == float(embedded.min())
    with torch.no_grad():
        error = q.quantize(model)(**batch) - expected
    assert 20 * float(torch.log10(expected.norm() / error.norm())) > 25
    torch.testing.assert_close(flat_output(expected, padding_mask(batch)), expected.double().flatten())


def test_a_mask_of_zeros_to_be_added_leaves_no_empty_range() -> None:
    model = Encoder(lambda mask: mask[:, None]).eval()
    batch = {**tokens((8, 8, 8)), "attention_mask": torch.zeros(BATCH, LENGTH)}
    q = Quantizer(preset="plain", backend="openvino", activations={"calibrator": "max"})
    q.calibrate(model, [batch])
    scales = [o.scale for site in q.plan.values() for o in site.operands if o.quantized]
    ranges = {float(scale) for scale in scales if scale is not None and scale.numel() == 1}
    assert 1.0 not in ranges
