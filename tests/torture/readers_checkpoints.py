"""Checkpoints: of a training here, and models, tokenizers and quantized models in the folders of transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny_run import tiny_run
from torch import nn

from quantizer import Quantizer
from quantizer.algorithms.qat.checkpoint import read_checkpoint, read_facts, write_checkpoint
from quantizer.tasks import load_model, load_tokenizer
from torture import mutations
from torture.kinds import Kind, kind
from torture.readers_plans import data, model

_TENSORS = (mutations.raw, mutations.safetensors_header)


def _trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    q, small = Quantizer(preset="plain", backend="openvino"), model()
    q.calibrate(small, [data()], progress=False)
    proxy = q.qat(small, scales="learned")
    optimizer = torch.optim.AdamW(proxy.parameters(), lr=1e-3)
    proxy(data()).square().mean().backward()
    optimizer.step()
    return proxy, optimizer


def _make_training(folder: Path) -> None:
    proxy, optimizer = _trained()
    write_checkpoint(folder / "last.safetensors", proxy, {"step": 3, "scores": [0.5, 0.25]}, optimizer)


def _read_training(folder: Path) -> None:
    proxy, optimizer = _trained()
    read_facts(folder / "last.safetensors")
    read_checkpoint(folder / "last.safetensors", proxy, optimizer)
    proxy(data()).square().mean().backward()
    optimizer.step()


def _make_folder(folder: Path) -> None:
    tiny_run(folder)


def _read_folder(folder: Path) -> None:
    loaded = load_model(str(folder / "model"), "sequence-classification")
    tokenizer = load_tokenizer(str(folder / "model"))
    del loaded, tokenizer


kind(Kind(name="training", make=_make_training, files=("last.safetensors",), how=_TENSORS, read=_read_training))
kind(
    Kind(
        name="folder",
        make=_make_folder,
        files=("model/config.json", "model/tokenizer.json", "model/tokenizer_config.json"),
        how=(mutations.raw, mutations.text, mutations.json_text, mutations.json_text),
        read=_read_folder,
    )
)
kind(Kind(name="weights", make=_make_folder, files=("model/model.safetensors",), how=_TENSORS, read=_read_folder))
