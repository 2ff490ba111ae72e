"""A tiny classifier, data and a configuration, as files: what a whole run needs."""

from __future__ import annotations

import csv
import random
from pathlib import Path
from typing import Any

import torch
import transformers

GOOD = ("good", "fine", "warm", "witty", "fresh")
BAD = ("bad", "dull", "cold", "slow", "stale")
COMMON = ("the", "film", "is", "was", "and", "a", "plot", "very", "quite", ".")


def tiny_run(folder: Path) -> dict[str, Any]:
    """Write a model and two files of rows; the mapping is a run of them."""
    torch.manual_seed(0)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *COMMON, *GOOD, *BAD]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    options = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.BertConfig(
        vocab_size=len(words), max_position_embeddings=64, initializer_range=0.3, **options
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder / "model")
    transformers.BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder / "model")
    write_rows(folder / "calibration.csv", 16, seed=1)
    write_rows(folder / "evaluation.csv", 24, seed=2)
    return {
        "model": {"source": str(folder / "model"), "task": "sequence-classification", "max_length": 32},
        "data": {
            "calibration": {"name": "text-csv", "path": str(folder / "calibration.csv")},
            "evaluation": {"name": "text-csv", "path": str(folder / "evaluation.csv")},
            "batch_size": 8,
        },
        "quantizer": {
            "preset": "plain",
            "backend": "openvino",
            "sites": {"residual_add": True},
            "exclude": {"names": ["classifier"]},
        },
        "export": {"dynamic": {"batch": [1, 2, 8], "sequence": [16, 16, 32]}},
        "report": {"latency_batch": 2, "latency_sequence": 16, "bootstrap": 50},
    }


def write_rows(path: Path, count: int, seed: int) -> None:
    """Write a file of texts, good and bad by turns."""
    pick = random.Random(seed)
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["text", "label"])
        for index in range(count):
            words = pick.choices(COMMON, k=pick.randint(3, 12)) + pick.choices(GOOD if index % 2 else BAD, k=2)
            writer.writerow([" ".join(words), index % 2])
