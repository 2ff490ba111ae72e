"""A tiny random encoder and classifier, and a word-level tokenizer, made here: no test needs a download."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertModel, BertTokenizer

WORDS = [
    *("a", "the", "film", "plane", "cat", "dog", "is", "was", "good", "bad", "fine", "dull", "fast", "slow"),
    *("and", "not", "very", ".", ","),
]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    return BertTokenizer(vocab=str(path))


def tiny_config(**options):
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


@pytest.fixture(scope="session")
def encoder():
    torch.manual_seed(0)
    return BertModel(tiny_config()).eval()


@pytest.fixture(scope="session")
def classifier():
    torch.manual_seed(0)
    return BertForSequenceClassification(tiny_config(num_labels=3)).eval()
