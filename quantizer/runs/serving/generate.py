"""Generation with an engine of one decoding step: it reads its own cache of keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quantizer.common.decoder_cache import CACHE, PRESENT
from quantizer.engines import Array, Engine, TensorSpec

CACHED = "text-generation-with-past"
"""The task of such engines."""


def empty_cache(inputs: Sequence[TensorSpec], rows: int) -> dict[str, Array]:
    """Return keys and values [rows x heads x 0 x width] of no tokens, for those of the inputs that are a cache."""
    cached = [spec for spec in inputs if spec.name.startswith(CACHE)]
    return {spec.name: np.zeros((rows, spec.shape[1] or 0, 0, spec.shape[3] or 0), spec.dtype) for spec in cached}


def greedy(engine: Engine, ids: Sequence[int], tokens: int, end: int | None) -> list[int]:
    """Return token ids with at most ``tokens`` more, the likeliest each time, up to and without ``end``."""
    whole, read = list(ids), list(ids)
    cache = empty_cache(engine.inputs, 1)
    for _ in range(tokens):
        given = {"input_ids": np.array([read]), "attention_mask": np.ones((1, len(whole)), dtype=np.int64), **cache}
        made = engine({spec.name: given[spec.name].astype(spec.dtype, copy=False) for spec in engine.inputs})
        cache = {name: made[f"{PRESENT}{name.removeprefix(CACHE)}"] for name in cache}
        token = int(made["logits"][0, -1].argmax())
        if token == end:
            break
        whole.append(token)
        read = [token]
    return whole
