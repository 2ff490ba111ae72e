"""What an engine is called with, and what lies beside a run until it is complete."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quantizer.algorithms.qat.checkpoint import write_checkpoint
from quantizer.cli.main import Terminated
from quantizer.engines import TensorSpec
from quantizer.errors import QuantizerError
from quantizer.pipeline.context import engine_inputs
from quantizer.pipeline.resume import resume_files
from quantizer.utils.files import said_complete


def test_an_engine_of_half_precision_takes_images_in_half() -> None:
    specs = (TensorSpec("pixel_values", np.dtype("float16"), (None, 3)), TensorSpec("ids", np.dtype("int64"), (None,)))
    engine: Any = SimpleNamespace(inputs=specs)
    made = engine_inputs(
        engine, {"pixel_values": torch.ones(2, 3) / 3, "ids": torch.arange(2), "unused": torch.ones(1)}
    )
    assert {name: (array.dtype.name, array.shape) for name, array in made.items()} == {
        "pixel_values": ("float16", (2, 3)),
        "ids": ("int64", (2,)),
    }
    assert made["pixel_values"][0, 0] == np.float16(1 / 3)


# -- what lies beside a run ----------------------------------------------------------------------------------------


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_only_the_checkpoints_go_with_a_training(tmp_path: Path) -> None:
    (tmp_path / "out.training").mkdir()
    (tmp_path / "out.training" / "notes").write_text("mine")
    with resume_files(tmp_path / "out", searches=True, trains=True) as kept:
        for name in ("last", "best"):
            write_checkpoint(kept.training / f"{name}.safetensors", nn.Linear(2, 2), {})
        kept.scores.get(["one"], lambda: 0.5)
    assert _names(tmp_path) == ["out.training"]
    assert _names(tmp_path / "out.training") == ["notes"]
    (tmp_path / "out.training" / "notes").unlink()
    with resume_files(tmp_path / "out", searches=True, trains=True) as kept:
        write_checkpoint(kept.training / "best.safetensors", nn.Linear(2, 2), {})
    assert not _names(tmp_path)


def _mine_as_a_checkpoint(folder: Path) -> None:
    (folder / "out.training").mkdir()
    (folder / "out.training" / "best.safetensors").write_text("mine")


def _mine_as_scores(folder: Path) -> None:
    (folder / "out.search").mkdir()
    (folder / "out.search" / "scores.json").write_text("mine")


def _a_file_as_the_folder(folder: Path) -> None:
    (folder / "out.training").write_text("mine")


def _a_file_as_the_scores(folder: Path) -> None:
    (folder / "out.search").write_text("mine")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_mine_as_a_checkpoint, r"best\.safetensors is not a checkpoint of a training"),
        (_mine_as_scores, r"out\.search contains 'scores\.json', which quantizer did not write"),
        (_a_file_as_the_folder, r"checkpoints cannot be written to .*out\.training"),
        (_a_file_as_the_scores, r"out\.search is not a folder"),
    ],
)
def test_what_others_put_there_is_told_before_the_work(tmp_path: Path, make: Any, message: str) -> None:
    make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(QuantizerError, match=message), resume_files(tmp_path / "out", searches=True, trains=True):
        pytest.fail("the work was begun")
    assert sorted(tmp_path.rglob("*")) == before


def _engines(folder: Path, error: type[BaseException] | None) -> None:
    with resume_files(folder / "out", searches=False, trains=False, keeps=True) as kept:
        kept.engines.get(["an engine"], lambda: None)
        if error is not None:
            raise error("stopped") if error is not KeyboardInterrupt else error


def test_engines_are_kept_after_an_interrupt_alone(tmp_path: Path) -> None:
    with pytest.raises(
        KeyboardInterrupt,
        match=r"the calibration, plans and engines are kept in .*out\.resume; run the same command again",
    ):
        _engines(tmp_path, KeyboardInterrupt)
    assert _names(tmp_path) == ["out.resume"]
    with pytest.raises(QuantizerError, match="stopped"):
        _engines(tmp_path, QuantizerError)
    assert not _names(tmp_path)
    _engines(tmp_path, None)
    assert not _names(tmp_path)


def test_a_folder_of_others_takes_no_engines(tmp_path: Path) -> None:
    (tmp_path / "out.resume").mkdir()
    (tmp_path / "out.resume" / "thesis.tex").touch()
    with pytest.raises(QuantizerError, match=r"out\.resume contains 'thesis\.tex', which quantizer did not write"):
        _engines(tmp_path, None)
    assert _names(tmp_path / "out.resume") == ["thesis.tex"]


def test_a_signal_to_end_stays_one(tmp_path: Path) -> None:
    def ended() -> None:
        with resume_files(tmp_path / "out", searches=True, trains=False) as kept:
            kept.scores.get(["one"], lambda: 0.5)
            raise Terminated

    with pytest.raises(Terminated, match=r"the scores are kept in .*out\.search; run the same command again"):
        ended()


def test_after_the_work_it_is_not_said_that_nothing_was_written(tmp_path: Path) -> None:
    def ended() -> None:
        with said_complete(tmp_path / "out"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"/out is complete$"):
        ended()


def test_a_name_that_is_too_long_for_the_files_beside_it_is_told_first(tmp_path: Path) -> None:
    with resume_files(tmp_path / ("n" * 246), searches=False, trains=False):
        pass
    for name in ("n" * 248, "\u00e9" * 124):
        with (
            pytest.raises(QuantizerError, match=r"its name has 248 bytes, .*; use a name of at most 246 bytes"),
            resume_files(tmp_path / name, searches=False, trains=False),
        ):
            raise AssertionError("work was done")
