"""A tiny random encoder and classifier, and a word-level tokenizer, made here: no test needs a download."""

from __future__ import annotations

import pytest
import torch
from tiny_text import WORDS, tiny_config
from transformers import BertForSequenceClassification, BertModel, BertTokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    return BertTokenizer(vocab=str(path))


@pytest.fixture(scope="session")
def encoder():
    torch.manual_seed(0)
    return BertModel(tiny_config()).eval()


@pytest.fixture(scope="session")
def classifier():
    torch.manual_seed(0)
    return BertForSequenceClassification(tiny_config(num_labels=3)).eval()
