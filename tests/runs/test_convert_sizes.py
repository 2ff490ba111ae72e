"""The sizes that engines are built for where nothing is said: those whose outputs a check can hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig, BertConfig, GPT2Config

from quantizer.pipeline.convert_options import Sizes, conversion_configs


@pytest.mark.parametrize(
    ("config", "architecture", "given", "sizes"),
    [
        # 512 tokens with 49,152 values each are 100 MB a row.
        (GPT2Config(vocab_size=49152), "GPT2LMHeadModel", None, (1, 4, 4)),
        (GPT2Config(vocab_size=49152, n_positions=64), "GPT2LMHeadModel", None, (1, 8, 32)),
        (GPT2Config(vocab_size=10**7), "GPT2LMHeadModel", None, (1, 1, 1)),
        (GPT2Config(vocab_size=49152), "GPT2LMHeadModel", (1, 8, 64), (1, 8, 64)),
        (BertConfig(vocab_size=30522), "BertForMaskedLM", None, (1, 8, 8)),
        (BertConfig(vocab_size=30522), "BertForSequenceClassification", None, (1, 8, 32)),
    ],
)
def test_rows_are_fewer_where_the_output_holds_the_vocabulary(
    tmp_path: Path, config: AutoConfig, architecture: str, given: Sizes | None, sizes: Sizes
) -> None:
    small = {"n_embd": 32, "n_layer": 1, "n_head": 2, "hidden_size": 24, "num_hidden_layers": 1}
    config.update({"architectures": [architecture], **small})
    config.save_pretrained(tmp_path)
    asked = {"model": str(tmp_path), "output": tmp_path / "out", "backend": ("onnxruntime",)}
    (made,) = conversion_configs(asked if given is None else {**asked, "batch_size": given})
    assert made.export.dynamic.batch == sizes
