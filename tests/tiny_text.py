"""The configuration of a tiny encoder of texts, and the words that its tokenizer knows."""

from __future__ import annotations

from typing import Any

from transformers import BertConfig

WORDS = [
    *("a", "the", "film", "plane", "cat", "dog", "is", "was", "good", "bad", "fine", "dull", "fast", "slow"),
    *("and", "not", "very", ".", ","),
]


def tiny_config(**options: Any) -> BertConfig:
    """A configuration of one layer, with options of its own."""
    return BertConfig(
        vocab_size=5 + len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        attn_implementation="eager",
        **options,
    )
