"""Steps of 8 bits, one a byte, and of 4 bits, two a byte."""

from __future__ import annotations

import pytest
import torch

from quantizer.numerics.weight_codes import byte_codes, pack_pairs, packed_size, unpack_pairs


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_bytes_are_the_rounded_and_shifted_values() -> None:
    values = torch.tensor([[-3.0, -0.2, 0.0], [0.3, 1.1, 90.0]])
    codes = byte_codes(values, 0.25, 7)
    assert codes.dtype == torch.uint8
    assert codes.tolist() == [[0, 6, 7], [8, 11, 255]]
    assert byte_codes(values.t(), 0.25, 7).tolist() == codes.t().tolist()


@pytest.mark.parametrize("shape", [(16, 16), (3, 5), (1,), (0,), ()], ids=str)
def test_what_was_packed_comes_back(shape):
    steps = torch.randint(-8, 8, shape, dtype=torch.int8)
    packed = pack_pairs(steps)
    assert packed.dtype == torch.uint8
    assert packed.shape == (packed_size(steps.numel()),)
    assert torch.equal(unpack_pairs(packed, steps.shape), steps)


def test_every_pair_has_its_byte():
    first, second = torch.meshgrid(torch.arange(-8, 8), torch.arange(-8, 8), indexing="ij")
    steps = torch.stack([first, second], dim=-1).to(torch.int8)
    packed = pack_pairs(steps)
    assert len(packed.unique()) == 256
    # The first of two is in the lower half, as in ONNX.
    assert packed[0] == 0x88
    assert packed[15] == 0x78
    assert torch.equal(unpack_pairs(packed, steps.shape), steps)
