"""The bytes of several models in one file: each is found again, and what they share is stored once."""

from __future__ import annotations

import json

import numpy as np
import pytest

from quantizer.engines.openvino import compiled_models
from quantizer.engines.openvino.compiled_models import parts_of, share_bytes

RANDOM = np.random.default_rng(0)
WEIGHTS = RANDOM.bytes(200_000)
OTHERS = RANDOM.bytes(150_000)


def stored_and_found(*parts: bytes) -> tuple[int, list[bytes]]:
    """How many bytes are stored, and what is found in them."""
    stored, ranges = share_bytes([memoryview(part) for part in parts])
    content = bytes(stored)
    return len(content), [part.tobytes() for part in parts_of(content, ranges)]


@pytest.mark.parametrize(
    ("parts", "most"),
    [
        ([WEIGHTS], 200_000),
        ([WEIGHTS, WEIGHTS, WEIGHTS], 200_000),
        ([b"one" + WEIGHTS + b"end", b"another" + WEIGHTS, WEIGHTS + b"text" * 9], 200_100),
        ([WEIGHTS + OTHERS, OTHERS + WEIGHTS], 350_000),
        ([WEIGHTS + bytes(90_000) + OTHERS, WEIGHTS + bytes(70_000) + OTHERS], 440_000),
        ([WEIGHTS + OTHERS, WEIGHTS[:100_000] + b"x" + WEIGHTS[100_001:] + OTHERS[:77_777]], 350_001),
        ([WEIGHTS, OTHERS], 350_000),
        ([b"short", b"shorter", b"s"], 13),
        ([bytes(500_000), bytes(400_000) + b"1"], 900_001),
        ([b"ab" * 100_000, b"ba" * 90_000], 200_001),
    ],
    ids=[
        "one model",
        "equal ones",
        "weights at other places",
        "in another order",
        "zeros between",
        "one byte differs",
        "nothing in common",
        "short ones",
        "zeros alone",
        "a pattern",
    ],
)
def test_each_part_is_found_again(parts: list[bytes], most: int) -> None:
    size, found = stored_and_found(*parts)
    assert found == parts
    assert size <= most


def test_any_mix_of_pieces_is_found_again() -> None:
    random = np.random.default_rng(1)
    pieces = [random.bytes(int(size)) for size in random.integers(1, 60_000, 12)]
    for _ in range(20):
        parts = [b"".join(pieces[index] for index in random.integers(0, len(pieces), 10)) for _ in range(3)]
        size, found = stored_and_found(*parts)
        assert found == parts
        assert size <= sum(map(len, parts))


def test_what_is_far_away_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_models, "_AHEAD", 2**15)
    monkeypatch.setattr(compiled_models, "_BEHIND", 2**15)
    first = np.random.default_rng(3).bytes(1_000_000)
    other = first[600_000:] + first[:600_000]
    size, found = stored_and_found(first, other)
    assert found == [first, other]
    assert size < 1.1 * len(first)


def test_what_one_model_has_several_times_is_stored_once() -> None:
    mask = OTHERS[:100_000]
    pieces = [WEIGHTS[start : start + 40_000] for start in range(0, len(WEIGHTS), 40_000)]
    other = b"".join(piece + mask for piece in pieces)
    size, found = stored_and_found(WEIGHTS, other, other)
    assert found == [WEIGHTS, other, other]
    assert size < len(WEIGHTS) + 1.2 * len(mask)


def test_many_short_pieces_are_no_long_note() -> None:
    random = np.random.default_rng(2)
    first = random.bytes(2_000_000)
    starts = random.integers(0, len(first) - 20_000, 100)
    other = b"".join(first[start : start + 20_000] + b"-" for start in starts)
    stored, ranges = share_bytes([memoryview(first), memoryview(other)])
    assert len(stored) < 1.01 * len(first)
    assert len(json.dumps(ranges)) < 200 * 22


@pytest.mark.parametrize("ranges", [[], [()], [((0, 6),)], [((3, 2),)], [((-1, 2),)], [((2, 2),)]], ids=str)
def test_ranges_outside(ranges: list[tuple[tuple[int, int], ...]]) -> None:
    with pytest.raises(ValueError, match=r"exceed the 5 stored bytes|no model is listed"):
        parts_of(b"12345", ranges)
