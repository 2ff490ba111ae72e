"""Folders of ``save()`` that were damaged or edited: refused with the place in the file, never another plan."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from toy_nets import net

from quantizer import Quantizer
from quantizer.errors import CalibrationError, QuantizerError
from quantizer.observe.snapshot import seen_document


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(_model(), [torch.randn(4, 16)], progress=False)
    return q.save(tmp_path / "saved")


def _edited(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    file = folder / "quantizer.yaml"
    document = yaml.safe_load(file.read_text())
    change(document)
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    return folder


@pytest.mark.parametrize("name", ["ranges.safetensors", "observed.safetensors"])
def test_one_flipped_bit_of_a_tensor_is_noticed(folder: Path, name: str) -> None:
    content = bytearray((folder / name).read_bytes())
    content[-3] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(QuantizerError, match=rf"{name} is damaged: .*SHA-256 differs"):
        Quantizer.load(folder)


def test_a_folder_from_before_there_were_checksums_is_read(folder: Path) -> None:
    kept = Quantizer.load(folder).scales()
    _edited(folder, lambda document: document.pop("sha256"))
    loaded = Quantizer.load(folder).scales()
    assert loaded.keys() == kept.keys()
    assert all(torch.equal(loaded[name], kept[name]) for name in kept)


def test_a_plan_that_is_not_utf8(folder: Path) -> None:
    (folder / "quantizer.yaml").write_bytes(b"format: 1\n\xff\xfe")
    with pytest.raises(QuantizerError, match=r"saved cannot be read: .*can't decode byte"):
        Quantizer.load(folder)


def test_a_plan_that_is_nested_too_deep_is_no_crash(folder: Path) -> None:
    (folder / "quantizer.yaml").write_text("[" * 100_000)
    with pytest.raises(QuantizerError, match="nested more than"):
        Quantizer.load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["sites"][0].update(multiply_adds="many"), r"sites\[0\].multiply_adds: expected a whole number"),
        (lambda d: d["sites"][0].update(multiply_adds=-1), r"sites\[0\].multiply_adds: expected 0 or more, got -1"),
        (lambda d: d["sites"][0].update(reads=3), r"sites\[0\].reads: expected a list, got 3"),
        (lambda d: d["sites"][0].update(quantized=False), r"sites\[0\].quantized: is False, which contradicts"),
        (lambda d: d["sites"][0].update(extra=1), r"sites\[0\]: unknown field 'extra'"),
        (lambda d: d["sites"].append(d["sites"][0]), r"sites\[2\].name: .* occurs twice"),
        (
            lambda d: d["sites"][1]["operands"][0].update(axis="x"),
            r"sites\[1\].operands\[0\].axis: expected a whole number or null, got 'x'",
        ),
        (
            lambda d: d["sites"][0]["operands"][1].update(axis=None),
            r"operands\[1\].axis: None .* does not fit scales \[24\]",
        ),
        (lambda d: d["sites"][0]["operands"][1].update(dtype="int9"), r"operands\[1\].dtype: expected one of int8"),
        (lambda d: d["sites"][0]["operands"][0].update(zero_point=3), "zero_point: expected none for int8, got 3"),
        (lambda d: d["sites"][0]["operands"][1].update(view={"shape": [2], "order": [1]}), "view.order: expected"),
        (lambda d: d["sites"][0]["operands"][0].update(name="other"), "the tensor .* belongs to no operand|scale: "),
        (lambda d: d["products"][0].update(reason="none such"), r"products\[0\].reason: expected one of"),
        (
            lambda d: d["products"][0].update(site=None),
            r"products\[0\].reason: is null for an operation outside of sites",
        ),
        (lambda d: d["fingerprint"]["0.bias"].__setitem__(0, [float("inf")]), "fingerprint of the weights .* damaged"),
        (lambda d: d["fingerprint"]["0.bias"].__setitem__(0, "16"), "fingerprint of the weights .* damaged"),
        (lambda d: d["fingerprint"]["0.bias"].__setitem__(3, 10**400), "fingerprint of the weights .* damaged"),
        (lambda d: d.update(regions=7), "regions: expected an object, got 7"),
        (lambda d: d.update(fallback={"groups": 1}), "the record of a fallback is damaged: "),
        (lambda d: d.update(more=7), "unknown field 'more'"),
        (lambda d: d.update(config={"dtype": "int9"}), r"cannot be loaded: [^\0]*dtype: got"),
        (lambda d: d.update(sha256=[1]), "sha256: expected an object, got a list"),
    ],
)
def test_an_edited_plan_is_told_by_its_place(
    folder: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(QuantizerError, match=message):
        Quantizer.load(_edited(folder, change))


@pytest.mark.parametrize("verb", ["quantize", "amp"])
@pytest.mark.parametrize(
    ("site", "edit", "message"),
    [
        (0, {"axis": 1}, r"0\.weight has the shape \[24, 16\], which does not fit its scales"),
        (1, {"axis": -1}, r"2\.weight has the shape \[8, 24\], which does not fit its scales"),
        (0, {"parameter": "2.weight"}, r"2\.weight has the shape \[8, 24\], which does not fit its scales"),
        (0, {"parameter": "0.weigh"}, r"another model, whose weight is '0\.weigh'; calibrate this model"),
        (1, {"parameter": "tp.weight"}, r"another model, which has a weight 'tp\.weight' .*no attribute `tp`"),
        (1, {"parameter": ".."}, r"another model, which has a weight '\.\.'"),
    ],
)
def test_an_edited_weight_is_none_of_the_model(
    folder: Path, verb: str, site: int, edit: dict[str, Any], message: str
) -> None:
    """What only the model can tell is told when there is one."""
    q = Quantizer.load(_edited(folder, lambda d: d["sites"][site]["operands"][1].update(edit)))
    with pytest.raises(QuantizerError, match=message):
        getattr(q, verb)(_model())(torch.zeros(2, 16))


def test_a_damaged_observation_changes_nothing(folder: Path) -> None:
    """Half of it would be worse than none: what was seen before counts alone."""
    _edited(folder, lambda document: document.pop("sha256"))
    tensors = load_file(folder / "observed.safetensors")
    text = bytes(tensors["document"].tolist()).replace(b'"count": 64', b'"count": -4')
    assert b'"count": -4' in text
    tensors["document"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    save_file(tensors, folder / "observed.safetensors")
    q = Quantizer.load(folder)
    with pytest.raises(QuantizerError, match=r"damaged: observed.groups\[0\].count: expected 0 or more, got -4"):
        q.calib(_model(), resume=True)


def test_a_product_of_no_site_is_refused(folder: Path) -> None:
    _edited(folder, lambda document: document.pop("sha256"))
    tensors = load_file(folder / "observed.safetensors")
    text = bytes(tensors["document"].tolist()).replace(b'"site": "0.', b'"site": "9.')
    tensors["document"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    save_file(tensors, folder / "observed.safetensors")
    with pytest.raises(QuantizerError, match=r"damaged: products of '9\..*', which is not a site"):
        Quantizer.load(folder).calib(_model(), resume=True)


# -- what of a plan does not fit together --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model with smoothed inputs, chosen integers, a shifted bias and a part of a parameter."""
    torch.manual_seed(0)
    model = net("self.last(x @ self.packed[4:].t())", packed=nn.Parameter(torch.randn(24, 16)), last=nn.Linear(20, 8))
    q = Quantizer(
        preset="plain",
        backend="onnxruntime",
        activations={"smoothquant_alpha": 0.5},
        weights={"rounding": "gptq"},
        bias_correction=True,
    )
    q.calibrate(model.eval(), [torch.randn(64, 16)], progress=False)
    return q.save(tmp_path_factory.mktemp("whole") / "saved")


def _copied(whole: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(whole, tmp_path / "copy"))
    return _edited(folder, lambda document: document.pop("sha256"))


def _call(**fields: Any) -> dict[str, Any]:
    return {"tensor": 0, "amax": 1.0, "scale": 0.1, "zero_point": None, **fields}


@pytest.mark.parametrize(
    ("site", "operand", "edit", "message"),
    [
        (0, None, {"line": -1}, r"sites\[0\]\.line: expected 0 or more, got -1"),
        (0, 0, {"role": "other"}, r"operands\[0\]\.role: expected activation or weight, got 'other'"),
        (0, 1, {"name": "input"}, r"operands: names must be unique, got input, input"),
        (0, 0, {"dynamic": True}, "dynamic: expected an integer activation without a scale"),
        (0, 0, {"smooth_axis": None}, "smooth_axis: expected exactly if there are smooth factors"),
        (0, 0, {"axis": 0}, r"axis: 0 with block_size None does not fit scales \[\]"),
        (0, 0, {"block_size": 4}, r"axis: None with block_size 4 does not fit scales \[\]"),
        (0, 1, {"block_size": 4}, r"axis: 0 with block_size 4 does not fit scales \[8\]"),
        (0, 1, {"parameter": None}, "parameter: is null for a quantized weight"),
        (0, 0, {"minimum": math.nan}, "minimum: expected a number, got NaN"),
        (0, 0, {"maximum": math.nan}, "maximum: expected a number, got NaN"),
        (0, 0, {"dtype": "uint8", "zero_point": 256}, "zero_point: expected 0 to 255 for uint8, got 256"),
        (0, 0, {"dtype": "uint8", "zero_point": -1}, "zero_point: expected 0 to 255 for uint8, got -1"),
        (1, 1, {"view": {"shape": [20, -16], "order": [1, 0], "offset": 64}}, "view: expected sizes and an offset of"),
        (1, 1, {"view": {"shape": [20, 16], "order": [1, 0], "offset": -1}}, "view: expected sizes and an offset of"),
        (1, 1, {"view": {"shape": [20, 16], "order": [1, 2], "offset": 0}}, "view.order: expected a permutation of 2"),
        (0, 1, {"calls": [_call()]}, "calls: expected only for an activation with one scale"),
        (
            0,
            0,
            {"calls": [_call(scale=0.0)]},
            r"calls\[0\]: expected a positive scale and an amax >= 0, got",
        ),
        (
            0,
            0,
            {"calls": [_call(amax=-1.0)]},
            r"calls\[0\]: expected a positive scale and an amax >= 0, got 0.1",
        ),
        (0, 0, {"calls": [_call(scale=math.inf)]}, r"calls\[0\]: expected a positive scale"),
        (0, 0, {"calls": [_call(zero_point=3)]}, r"calls\[0\]\.zero_point: expected a zero point of int8 as for all"),
        (
            0,
            0,
            {"dtype": "uint8", "zero_point": 3, "calls": [_call(zero_point=300)]},
            r"calls\[0\]\.zero_point: expected a zero point of uint8",
        ),
    ],
    ids=str,
)
def test_an_entry_that_does_not_fit_is_told(
    whole: Path, tmp_path: Path, site: int, operand: int | None, edit: dict[str, Any], message: str
) -> None:
    def change(document: dict[str, Any]) -> None:
        entry = document["sites"][site]
        (entry if operand is None else entry["operands"][operand]).update(edit)

    with pytest.raises(QuantizerError, match=message):
        Quantizer.load(_edited(_copied(whole, tmp_path), change))


FIRST = "last.forward.linear_0"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            f"{FIRST}/bias_shift",
            torch.zeros(8).double(),
            r"bias_shift: expected a tensor of float32 \[C\], got .*64",
        ),
        (f"{FIRST}/bias_shift", torch.zeros(2, 8), r"bias_shift: expected a tensor of float32 \[C\], got .* \[2, 8\]"),
        (f"{FIRST}/bias_shift", torch.full((8,), math.inf), "bias_shift: expected finite numbers"),
        (f"{FIRST}/weight/amax", torch.ones(8).double(), "amax: expected a tensor of float32, got torch.float64"),
        (f"{FIRST}/weight/amax", torch.ones(7), r"scale: expected the shape of amax, \[7\], got \[8\]"),
        (f"{FIRST}/weight/amax", None, "scale: expected scale and amax for a quantized operand"),
        (f"{FIRST}/weight/scale", None, "scale: expected scale and amax for a quantized operand"),
        (f"{FIRST}/weight/scale", torch.zeros(8), "scale: expected numbers above 0"),
        (f"{FIRST}/weight/scale", torch.full((8,), math.inf), "scale: expected numbers above 0"),
        (f"{FIRST}/weight/spread", torch.ones(7), r"spread: expected the shape of scale, \[8\], got \[7\]"),
        (f"{FIRST}/weight/smooth", None, "smooth_axis: expected exactly if there are smooth factors"),
        (f"{FIRST}/weight/smooth", torch.ones(1, 20), "smooth_axis: expected exactly if there are smooth factors"),
        (f"{FIRST}/weight/more", torch.ones(1), f"the tensor '{FIRST}/weight/more' belongs to no site or operand"),
        ("more", torch.ones(1), "the tensor 'more' belongs to no site or operand"),
    ],
    ids=str,
)
def test_a_tensor_that_does_not_fit_is_told(
    whole: Path, tmp_path: Path, name: str, value: Tensor | None, message: str
) -> None:
    folder = _copied(whole, tmp_path)
    tensors = load_file(folder / "ranges.safetensors")
    tensors.pop(name, None)
    save_file(tensors if value is None else {**tensors, name: value}, folder / "ranges.safetensors")
    with pytest.raises(QuantizerError, match=message):
        Quantizer.load(folder)


def test_calls_have_a_common_scale(whole: Path, tmp_path: Path) -> None:
    folder = _copied(whole, tmp_path)
    tensors = load_file(folder / "ranges.safetensors")
    for field in ("amax", "scale"):
        del tensors[f"{FIRST}/input/{field}"]
    save_file(tensors, folder / "ranges.safetensors")
    edit = {"quantized": False, "calls": [_call()]}
    with pytest.raises(QuantizerError, match="calls: expected only for an activation with one scale"):
        Quantizer.load(_edited(folder, lambda document: document["sites"][0]["operands"][0].update(edit)))


def test_a_site_that_stays_float_has_no_shift(whole: Path, tmp_path: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        for entry in (document["sites"][0], *document["sites"][0]["operands"]):
            entry["quantized"] = False

    with pytest.raises(QuantizerError, match="bias_shift: expected none for a site that is not quantized"):
        Quantizer.load(_edited(_copied(whole, tmp_path), change))


@pytest.mark.parametrize("name", ["sites", "products", "config", "scales_replaced", "fallback", "regions"])
def test_a_field_that_is_missing_is_told(whole: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(QuantizerError, match=f"{name} missing"):
        Quantizer.load(_edited(_copied(whole, tmp_path), lambda document: document.pop(name)))


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        ("batches", -1, r"observed\.batches: expected 0 or more, got -1"),
        ("chosen_at", -1, r"observed\.chosen_at: expected 0 or more, got -1"),
        ("rows", -1, r"observed\.rows: expected 0 or more, got -1"),
        *(
            (f"sites/{FIRST}/{field}", -1, rf"observed\.sites\.{FIRST}\.{field}: expected 0 or more, got -1")
            for field in ("calls", "fit", "multiply_adds", "sequence", "depth", "width", "rows", "head")
        ),
        (f"sites/{FIRST}/operands/input/group", 4, r"operands\.input\.group: got 4, but there are 4 groups"),
        (f"sites/{FIRST}/operands/input/group", -1, r"operands\.input\.group: got -1, but there are 4 groups"),
        (f"sites/{FIRST}/operands/input/tensors", [0, -2], r"input\.tensors: expected numbers >= -1, got \[0, -2\]"),
        ("sites/forward.matmul_0/operands/rhs/weight/view", [[20, 16], [1, 2], 64], "is not a view of a parameter"),
        ("sites/forward.matmul_0/operands/rhs/weight/view", [[20, 16], [1, 0], -1], "is not a view of a parameter"),
        ("sites/forward.matmul_0/operands/rhs/weight/view", [[20, -1], [1, 0], 64], "is not a view of a parameter"),
        (
            "sites/forward.matmul_0/operands/rhs/weight/computation",
            {"inputs": [], "steps": [], "output": 0, "buffers": []},
            r"weight\.computation\.inputs: expected the name of a parameter or buffer",
        ),
        ("groups/0/operands", ["none.input"], r"observed\.groups\[0\]\.operands: 'none\.input' is not an operand of"),
        ("groups/0/operands", [f"{FIRST}.none"], r"groups\[0\]\.operands: '.*none' is not an operand of a site"),
        ("groups/1/minimum", 1e9, r"observed\.groups\[1\]\.minimum: 1000000000\.0 is above the maximum"),
        ("groups/1/channels", [[1.0, 2.0], [3.0]], r"groups\[1\]\.channels: 2 minima, but 1 maxima"),
        ("groups/1/histogram/zeros", -1, r"groups\[1\]\.histogram\.zeros: expected 0 or more, got -1"),
        ("groups/1/histogram/row", 4, r"groups\[1\]\.histogram\.row: got 4, but there are 4 histograms of"),
        ("groups/1/histogram/row", -1, r"groups\[1\]\.histogram\.row: got -1, but there are 4 histograms"),
        ("groups/1/histogram/exponent", 1100, "got 1100, which is not the exponent of a bin width"),
        ("groups/1/histogram/exponent", -201, "got -201, which is not the exponent of a bin width"),
    ],
)
def test_statistics_that_do_not_fit_are_told_by_their_place(
    whole: Path, tmp_path: Path, keys: str, value: Any, message: str
) -> None:
    folder = _copied(whole, tmp_path)
    tensors = load_file(folder / "observed.safetensors")
    document = json.loads(bytes(tensors["document"].tolist()))
    *places, last = keys.split("/")
    entry = document
    for place in places:
        entry = entry[int(place) if place.isdecimal() else place]
    assert entry.get(last) != value
    entry[last] = value
    tensors["document"] = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)
    save_file(tensors, folder / "observed.safetensors")
    torch.manual_seed(0)
    with pytest.raises(QuantizerError, match=message):
        Quantizer.load(folder).calib(_model(), resume=True)


def test_a_range_may_be_of_all_calls(whole: Path) -> None:
    document = json.loads(bytes(load_file(whole / "observed.safetensors")["document"].tolist()))
    document["sites"][FIRST]["operands"]["input"]["tensors"] = [-1]
    assert seen_document(document, 4).sites[FIRST].operands["input"].tensors == (-1,)


@pytest.mark.parametrize("batches", [None, 3, "data", {"input": torch.zeros(2, 16)}])
def test_what_is_no_iterable_of_batches(batches: Any) -> None:
    with pytest.raises(CalibrationError, match=r"the calibration data is a .*; pass an iterable of batches"):
        Quantizer(preset="plain", backend="openvino").calibrate(_model(), batches)


class _Hungry(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # More than any address space: no system gives it, whatever it promises to others.
        return self.linear(x).expand(2**45, -1, -1).contiguous()


def test_too_little_memory_is_told_plainly() -> None:
    with pytest.raises(CalibrationError, match=r"too little memory for batch 0 .*: use smaller batches"):
        Quantizer(preset="plain", backend="openvino").calibrate(_Hungry().eval(), [torch.zeros(4, 16)], progress=False)
