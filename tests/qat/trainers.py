"""A tiny classifier in the ``Trainer`` of transformers; run as a script, a training that is killed after 5 steps."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from calibrated import make_calibrated
from helpers import batch, tiny
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.algorithms.qat.callback import QATCallback


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random tokens with labels that depend on them."""

    def __init__(self, rows: int = 32) -> None:
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(3, 99, (rows, 8), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        ids = self.ids[row]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[0] % 3}


def calibrated(model: nn.Module, **config: Any) -> Quantizer:
    return make_calibrated(
        model, [batch("bert-classification")], backend="openvino", sites={"residual_add": True}, **config
    )


def trainer(proxy: nn.Module, folder: Path, **options: Any) -> transformers.Trainer:
    """8 steps, a checkpoint after each third."""
    callbacks = options.pop("callbacks", [QATCallback()])
    arguments = {
        "max_steps": 8,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_steps": 3,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    } | options
    made = transformers.Trainer(
        proxy,
        transformers.TrainingArguments(str(folder), **arguments),
        train_dataset=Rows(),
        eval_dataset=Rows(12),
        callbacks=callbacks,
    )
    made.remove_callback(transformers.PrinterCallback)
    return made


class Kill(transformers.TrainerCallback):
    """No handler runs, nothing is flushed."""

    def on_step_end(self, args: Any, state: transformers.TrainerState, control: Any, **keywords: Any) -> None:
        if state.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    model = tiny("bert-classification", train=True)
    q = calibrated(model)
    q.save(folder / "quantizer")
    trainer(q.qat(model, scales="learned"), folder / "run", callbacks=[QATCallback(), Kill()]).train()
