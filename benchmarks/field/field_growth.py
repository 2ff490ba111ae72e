"""How quantizing and running grow: with layers, with rows of calibration, and with tokens.

An encoder of MiniLM's width with random weights; the figures of a tool are measured in one process.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from in_turns import in_turns
from subjects import Batch, Subject
from tools import REFERENCE, TOOLS

__all__ = ["GROWN", "grown"]

GROWN = ("quantize-dynamic", "quantize-static", "model-optimizer", "nncf", "pt2e", "openvino", "auto")
"""The tools that are measured."""
_LAYERS, _ROWS, _TOKENS = (2, 6, 12), (32, 128, 512), (32, 128, 512)
_USUAL = (6, 128)
_BATCH, _LENGTH = 8, 128
_CALLS = 10


def grown(tool: str) -> dict[str, Any]:
    """Return the seconds that a tool quantizes for, by layers and by rows, and its latency and speed-up by tokens."""
    torch.set_num_threads(1)
    # What the first call of a process imports and compiles belongs to no size.
    _made(tool, (1, _BATCH))
    by_layers = {layers: (layers, _USUAL[1]) for layers in _LAYERS}
    by_rows = {rows: (_USUAL[0], rows) for rows in _ROWS}
    found = {sizes: _made(tool, sizes) for sizes in dict.fromkeys([*by_layers.values(), *by_rows.values()])}
    return {
        "layers": {layers: found[sizes][0] for layers, sizes in by_layers.items()},
        "rows": {rows: found[sizes][0] for rows, sizes in by_rows.items()},
        "tokens": found[_USUAL][1],
    }


def _made(tool: str, sizes: tuple[int, int]) -> tuple[float, dict[int, dict[str, float]]]:
    """Return the seconds of quantizing so many layers by so many rows, and the latency by tokens of the usual ones."""
    subject = _subject(*sizes)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        made = TOOLS[tool].make(subject, Path(folder))
        seconds = time.perf_counter() - started
        if sizes != _USUAL:
            return seconds, {}
        base = Path(folder) / "reference"
        base.mkdir()
        run, reference = made.load(), TOOLS[REFERENCE].make(subject, base).load()
        found = {tokens: in_turns(run, reference, _batch(_BATCH, tokens), _CALLS) for tokens in _TOKENS}
        return seconds, found


def _subject(layers: int, rows: int) -> Subject:
    torch.manual_seed(0)
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 12}
    model = transformers.BertModel(transformers.BertConfig(num_hidden_layers=layers, **sizes)).eval()

    def unscored(*_: Any) -> Any:
        raise NotImplementedError("a model with random weights has no score")

    return Subject(
        title="",
        metric="",
        model=model,
        calibration=[_batch(_BATCH, _LENGTH) for _ in range(rows // _BATCH)],
        inputs=lambda batch: _batch(batch, _LENGTH),
        predict=unscored,
        figures=unscored,
    )


def _batch(rows: int, tokens: int) -> Batch:
    ids = torch.randint(1000, 30000, (rows, tokens))
    return {"input_ids": ids, "token_type_ids": torch.zeros_like(ids), "attention_mask": torch.ones_like(ids)}
