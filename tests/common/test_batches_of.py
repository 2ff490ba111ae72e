"""Data in the forms that people have it in, and what is said where it cannot be read."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import ConvNet, Mlp
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from quantizer import Quantizer
from quantizer.errors import CalibrationError, CalibrationWarning
from quantizer.utils.batches import BATCH_ROWS, MOST_ROWS, batches_of, beside, length_of, row_count

X = torch.randn(70, 32, generator=torch.Generator().manual_seed(3))
CLASSES = torch.arange(70) % 10


class _Pair(NamedTuple):
    values: Tensor
    length: int


class _Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x if mask is None else x * mask


class _Scored(nn.Module):
    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        return x


class _Two(nn.Module):
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return ids * mask


class _Any(nn.Module):
    def forward(self, *args: Any, **keywords: Any) -> Tensor:
        return args[0]


class _Streamed(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(X)


def _inputs(model: nn.Module, data: Any, rows: int | None = None) -> Tensor:
    """All rows that a model of one input gets, one below the other."""
    found = [batch[0] if isinstance(batch, tuple | list) else batch for batch in batches_of(model, data, rows)]
    assert all(isinstance(batch, Tensor) for batch in found)
    return torch.cat(found)


# -- forms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(X, id="tensor"),
        pytest.param(X.numpy(), id="array"),
        pytest.param(X.double().numpy(), id="doubles"),
        pytest.param(TensorDataset(X), id="dataset"),
        pytest.param(TensorDataset(X, CLASSES), id="labelled-dataset"),
        pytest.param(_Streamed(), id="iterable-dataset"),
        pytest.param(DataLoader(TensorDataset(X), batch_size=16), id="loader"),
        pytest.param(DataLoader(TensorDataset(X, CLASSES), batch_size=16), id="labelled-loader"),
        pytest.param([X[:40], X[40:]], id="list-of-tensors"),
        pytest.param([X[:40].numpy(), X[40:].numpy()], id="list-of-arrays"),
        pytest.param([(X.numpy(), CLASSES.numpy())], id="labelled-arrays"),
        pytest.param([(X, ["cat"] * 70)], id="names-for-labels"),
    ],
)
def test_every_form_gives_the_same_rows(data: Any) -> None:
    assert torch.equal(_inputs(Mlp(), data), X)


def test_rows_of_a_tensor_and_a_dataset_come_in_batches() -> None:
    for data in (X, X.numpy(), TensorDataset(X)):
        assert [row_count(batch) for batch in batches_of(Mlp(), data)] == [BATCH_ROWS, BATCH_ROWS, 6]
        assert length_of(data) == 3


def test_a_batch_without_arrays_or_label_is_handed_on_as_it_is() -> None:
    batch = {"input_ids": CLASSES, "note": None}
    (found,) = batches_of(Mlp(), [batch])
    assert found is batch


def test_arrays_in_a_mapping_get_the_type_of_the_model() -> None:
    (found,) = batches_of(Mlp().half(), [{"x": np.ones((2, 32)), "ids": np.arange(2)}])
    assert found["x"].dtype == torch.float16
    assert found["ids"].dtype == torch.int64


def test_a_dataset_leaves_the_random_numbers_alone() -> None:
    model, before = Mlp(), torch.get_rng_state()
    _inputs(model, TensorDataset(X))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("data", [X, X.numpy(), TensorDataset(X), DataLoader(TensorDataset(X, CLASSES), batch_size=16)])
def test_calibration_takes_them_all(data: Any) -> None:
    whole, q = Quantizer(preset="plain", backend="openvino"), Quantizer(preset="plain", backend="openvino")
    model = Mlp().eval()
    whole.calibrate(model, [X])
    q.calibrate(model, data)
    assert str(q.ranges) == str(whole.ranges)


# -- labels ----------------------------------------------------------------------------------------------------------


def test_a_label_is_dropped_where_forward_has_no_place_for_it() -> None:
    ids = torch.ones(4, 8)
    mapped = {"ids": ids, "mask": ids}
    for given in ((ids, ids, torch.zeros(4)), (mapped, torch.zeros(4)), ({**mapped, "labels": ids}, torch.zeros(4))):
        (batch,) = batches_of(_Two(), [given])
        values = list(batch.values() if isinstance(batch, dict) else batch)
        assert len(values) == 2
    (batch,) = batches_of(_Two(), [{**mapped, "labels": torch.zeros(4)}])
    assert batch.keys() == mapped.keys()


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (_Masked(), (X, torch.ones_like(X))),
        (_Scored(), (X, CLASSES)),
        (_Two(), (X, torch.ones_like(X))),
        (_Any(), (X, X)),
        (_Any(), {"x": X, "labels": CLASSES}),
    ],
)
def test_what_the_model_takes_is_no_label(model: nn.Module, batch: Any) -> None:
    (found,) = batches_of(model, [batch])
    assert found is batch


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        (
            _Masked(),
            (X, CLASSES),
            r"int64\[70\]\): it is unclear whether the last part is a label or the input",
        ),
        (_Masked(), (X, CLASSES), r'\[x for x, _ in loader\]  With .*: +\[\{"x": x, "mask": mask\} for x, mask in'),
        (_Any(), (X, CLASSES), r"a label or one more input of _Any\.forward\. .*\[a for a, _ in loader\]"),
        (Mlp(), (CLASSES, X), r"Mlp\.forward takes one input \(x\): it is unclear which .*\[x for x, _ in loader\]"),
        (Mlp(), (X, CLASSES, CLASSES), r"it is unclear which parts are inputs.*\[x for x, \*_ in loader\]"),
        (_Two(), (X, X, X), r"_Two\.forward takes 2 inputs.*\[\(ids, mask\) for ids, mask, _ in loader\]"),
        (Mlp(), (X[0], 3), r"batch 0 .*\(float32\[32\], int 3\), which is one sample, not a batch: .*DataLoader"),
    ],
)
def test_what_cannot_be_told_is_an_error_with_its_cure(model: nn.Module, batch: Any, message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        list(batches_of(model, [batch]))


# -- how much is read ------------------------------------------------------------------------------------------------


def test_rows_stops_a_loader_without_end() -> None:
    endless = itertools.repeat((X, CLASSES))
    assert len(_inputs(Mlp(), endless, rows=100)) == 140
    taken: list[Tensor] = []
    # What is not asked for is not read either: a stream may wait for ever.
    list(batches_of(Mlp(), (taken.append(X) or X for _ in itertools.count()), samples=70))
    assert len(taken) == 1


def test_rows_of_sorted_data_are_spread_over_it() -> None:
    ordered = torch.arange(70.0).reshape(70, 1)
    for data in (ordered, ordered.numpy(), TensorDataset(ordered)):
        assert _inputs(Mlp(), data, rows=7).flatten().tolist() == [0, 10, 20, 30, 40, 50, 60]
        assert length_of(data, 40) == 2
    assert len(_inputs(Mlp(), ordered, rows=100)) == 70


def test_data_of_unknown_length_ends() -> None:
    with pytest.warns(CalibrationWarning, match=f"reading stopped after {MOST_ROWS} samples: pass samples=") as said:
        read = _inputs(Mlp(), itertools.repeat(X[:64]))
    assert len(read) == MOST_ROWS
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(_inputs(Mlp(), iter([X[:64]] * (MOST_ROWS // 64)))) == MOST_ROWS
        assert len(_inputs(Mlp(), [X[:64]] * (MOST_ROWS // 64 + 1))) == MOST_ROWS + 64


@pytest.mark.parametrize("rows", [0, -1])
def test_rows_has_to_be_a_number_of_rows(rows: int) -> None:
    with pytest.raises(CalibrationError, match=f"samples={rows}: expected the number of samples to read"):
        Quantizer(preset="plain").calibrate(Mlp().eval(), X, samples=rows)


# -- data that fails ---------------------------------------------------------------------------------------------------


class _Broken(Dataset[Tensor]):
    def __len__(self) -> int:
        return 70

    def __getitem__(self, place: int) -> Tensor:
        if place >= 64:
            raise OSError(f"row {place} is gone")
        return X[place]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (_Broken(), "failed after 2 batches, with OSError: row 64 is gone"),
        (DataLoader(_Broken(), batch_size=64), "failed after 1 batch, with OSError: row 64 is gone"),
        (DataLoader(TensorDataset(X), collate_fn=math.sqrt), "failed after 0 batches, with TypeError: must be real"),
        (np.array(["a", "b"]), r"batch 0 of the calibration data has an array of <U1, which torch cannot convert"),
        (torch.tensor(3.0), "is a single number: pass an array or tensor of samples"),
        (_Broken, "the calibration data is a type; pass an iterable of batches"),
        (X[:0], "the calibration data is empty: at least one batch is needed"),
        (iter([]), "the calibration data is empty: at least one batch is needed"),
        (TensorDataset(X[:0]), "the calibration data is empty: at least one batch is needed"),
        (DataLoader(TensorDataset(X[:0])), "the calibration data is empty: at least one batch is needed"),
    ],
)
def test_data_that_fails_is_an_error_that_says_where(data: Any, message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        Quantizer(preset="plain").calibrate(Mlp().eval(), data)


def test_data_that_fails_leaves_an_earlier_calibration_in_use() -> None:
    q, model = Quantizer(preset="plain", backend="openvino"), Mlp().eval()
    q.calibrate(model, X)
    before = str(q.ranges)
    with pytest.raises(CalibrationError, match="failed after 2 batches"):
        q.calibrate(model, _Broken())
    assert str(q.ranges) == before


def test_causes_takes_the_same_data() -> None:
    q, model = Quantizer(preset="plain", backend="openvino"), ConvNet().eval()
    data = DataLoader(TensorDataset(torch.rand(8, 3, 16, 16), CLASSES[:8]), batch_size=8)
    q.calibrate(model, data)
    assert len(q.diagnose(model, data, num=1)) <= 1
    with pytest.raises(CalibrationError, match=r"diagnose\(\) needs data"):
        q.diagnose(model, [])


def test_tensors_are_moved_to_the_device_of_the_model() -> None:
    """A device without values stands for a GPU; what is there already is the same object."""
    here, there = torch.zeros(2), torch.device("meta")
    batch = {"x": here, "nested": (here, [here]), "pair": _Pair(here, 1), "number": 3}
    assert beside(here.device, batch) is batch
    found = beside(there, batch)
    assert (found["number"], found["pair"].length) == (3, 1)
    moved = [found["x"], found["nested"][0], found["nested"][1][0], found["pair"].values]
    assert {tensor.device for tensor in moved} == {there}
    assert beside(nn.Linear(2, 2), batch) is batch
    # Lengths, say, that belong on the CPU.
    apart = {"x": torch.zeros(2, device=there), "lengths": here}
    assert beside(there, apart) is apart
    apart = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    assert beside(apart, batch) is batch
