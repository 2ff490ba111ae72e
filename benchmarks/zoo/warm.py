"""What every process of the zoo would do again: imported once, before they are made.

The sources that all models of transformers share are read for the first proxy; that takes longer than a tiny model.
"""

from __future__ import annotations

import torch
from transformers import BertConfig, BertModel

from quantizer import Quantizer

__all__: list[str] = []

torch.set_num_threads(1)
Quantizer(preset="plain").proxy(
    BertModel(BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8))
)
