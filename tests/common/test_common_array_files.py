"""Files of named arrays: what is a batch, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quantizer.errors import CalibrationError
from quantizer.utils.batches import array_batches


def test_a_file_is_cut_into_batches(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(10).reshape(5, 2), y=np.arange(5))
    batches = array_batches(tmp_path / "a.npz", 2)
    assert [len(batch["x"]) for batch in batches] == [2, 2, 1]
    assert torch.equal(torch.cat([batch["y"] for batch in batches]), torch.arange(5))
    assert [len(batch["x"]) for batch in array_batches(tmp_path / "a.npz", 2, samples=3)] == [2, 1]
    save_file({"x": torch.arange(4.0)}, tmp_path / "b.safetensors")
    assert torch.equal(array_batches(tmp_path / "b.safetensors", 8)[0]["x"], torch.arange(4.0))


def test_each_file_of_a_folder_is_a_batch(tmp_path: Path) -> None:
    for number, length in enumerate((7, 5)):
        np.savez(tmp_path / f"{number}.npz", x=np.zeros((3, length)))
    (tmp_path / "notes.txt").write_text("not read")
    assert [list(batch["x"].shape) for batch in array_batches(tmp_path, 2)] == [[3, 7], [3, 5]]
    assert len(array_batches(tmp_path, 2, samples=3)) == 1


def test_what_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.npz").write_text("no archive")
    (tmp_path / "bad.safetensors").write_text("no tensors")
    np.savez(tmp_path / "objects.npz", x=np.array([{}, {}], dtype=object))
    np.savez(tmp_path / "rows.npz", x=np.zeros((3, 1)), y=np.zeros(4))
    np.savez(tmp_path / "number.npz", x=np.zeros(()))
    np.savez(tmp_path / "words.npz", x=np.array(["a"]))
    for name, match in {
        "empty": r"contains no \.npz or \.safetensors files",
        "none.npz": "is not an existing",
        "bad.npz": "damaged",
        "bad.safetensors": "damaged",
        "objects.npz": "damaged or contains an array without numbers",
        "words.npz": "damaged or contains an array without numbers",
        "rows.npz": r"differ in the number of samples \(axis 0\), or have none: x \[3, 1\], y \[4\]",
        "number.npz": "differ in the number of samples",
    }.items():
        with pytest.raises(CalibrationError, match=match):
            array_batches(tmp_path / name, 2)
