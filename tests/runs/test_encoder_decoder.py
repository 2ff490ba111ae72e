"""Encoder-decoder models, which become three engines, by ``quantizer convert`` and ``quantizer run``."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from quantizer.cli.main import main

for _package in ("transformers", "onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(_package, reason="a conversion needs enginequant[hf,onnx,onnxruntime]")

import onnx
import onnxruntime
import transformers
from helpers import read_json
from pbtxt import read_pbtxt
from tiny_audio import tiny_recordings
from tiny_seq2seq import TEXTS, tiny_bart, tiny_t5, tiny_whisper

import quantizer
from quantizer import Quantizer
from quantizer.config import RunConfig, load_run
from quantizer.engines.for_this_cpu import cpu_candidates
from quantizer.errors import QuantizerError, TaskError
from quantizer.pipeline import benchmark, model_graphs, run_engines
from quantizer.pipeline.convert_options import conversion_configs
from quantizer.pipeline.load import ConvertedParts, load_converted
from quantizer.pipeline.model_graphs import most_tokens
from quantizer.pipeline.open_axes import with_written_sizes
from quantizer.report import read_record
from quantizer.tasks import load_model
from quantizer.tasks.seq2seq.parts import DECODER, PARTS, WITH_PAST
from quantizer.tasks.seq2seq.writer import Writer
from quantizer.utils.files.temporary import OLD, new_name

pytestmark = pytest.mark.usefixtures("exact_byte_products")

SMALL = ["--batch-size", "1", "2", "4", "--new-tokens", "6", "--backend", "onnxruntime"]
AHEAD = find_spec("tensorrt_rtx_bindings") is not None and not torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "_LATENCY_SECONDS", 0.1)


def _settings(place: Path) -> dict[str, Any]:
    rows = {"name": "text-pairs", "path": str(place / "pairs.csv")}
    return {
        "model": {"source": str(place / "t5"), "task": "text-to-text", "max_length": 16, "new_tokens": 6},
        "data": {"calibration": rows, "evaluation": rows, "batch_size": 4},
        "quantizer": {"backend": "onnxruntime", "preset": "plain"},
        "export": {"dynamic": {"batch": [1, 2, 4], "sequence": [4, 8, 16]}},
        "report": {"latency_batch": 3, "latency_sequence": 8, "bootstrap": 50},
        "output": str(place / "out"),
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    tiny_t5(folder / "t5")
    (folder / "texts.txt").write_text("\n".join(TEXTS * 12))
    for name, times in (("pairs", 4), ("few", 1), ("more", 2)):
        rows = "".join(f"{text},{TEXTS[number - 1]}\n" for number, text in enumerate(TEXTS)) * times
        (folder / f"{name}.csv").write_text(f"source,target\n{rows}")
    fallback = {"amp": {"batches": 1}, "fallback": {"num": 2}}
    (folder / "run.yaml").write_text(yaml.safe_dump(_settings(folder) | fallback))
    (folder / "settings.yaml").write_text("preset: plain\nformats:\n  - {names: ['**.wo'], activations: dynamic}\n")
    return folder


@pytest.fixture(scope="module")
def converted(place: Path) -> Path:
    words = ["convert", "-m", str(place / "t5"), *SMALL, "--seq-len", "4", "8", "16", "-o", str(place / "made")]
    words += ["--quantization", "--calibration", str(place / "texts.txt"), "--config", str(place / "settings.yaml")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "_LATENCY_SECONDS", 0.1)
        assert main([*words, "--evaluation", f"text-pairs:{place / 'few.csv'}"]) == 0
    return place / "made" / "onnxruntime"


@pytest.fixture(scope="module")
def made(place: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "_LATENCY_SECONDS", 0.1)
        assert main(["run", str(place / "run.yaml")]) == 0
    return place / "out"


def _loaded(folder: Path) -> ConvertedParts:
    loaded = load_converted(folder)
    assert isinstance(loaded, ConvertedParts)
    return loaded


def _writes_what_it_quantized(folder: Path, place: Path) -> None:
    loaded = _loaded(folder)
    proxy = Quantizer.load(folder / "quantizer").quantize(load_model(str(place / "t5"), "text-to-text"))
    batch = {name: torch.from_numpy(value) for name, value in loaded.inputs(TEXTS).items()}
    right = Writer(proxy, 6)(**batch)["sequences"]
    assert loaded.generate(TEXTS) == [loaded.processor.decode(row, skip_special_tokens=True) for row in right]
    beams = loaded.model.generate(**batch, max_new_tokens=6, num_beams=2)
    assert torch.equal(beams, proxy.generate(**batch, max_new_tokens=6, num_beams=2))


# -- a conversion ------------------------------------------------------------------------------------------------------


def test_the_settings_of_a_file_are_those_of_all_graphs(converted: Path) -> None:
    plan = Quantizer.load(converted / "quantizer").plan
    at_run_time = {path for path, entry in plan.items() if "with ranges at run time" in entry.reason}
    assert at_run_time == {path for path, entry in plan.items() if ".wo." in path}
    assert at_run_time
    nodes = [node.op_type for node in onnx.load(converted / "onnx/encoder_model.onnx").graph.node]
    assert "DynamicQuantizeLinear" in nodes


def test_each_graph_has_a_file_and_an_engine_under_the_usual_names(converted: Path) -> None:
    config = read_json(converted / "config.json")
    assert list(config["parts"]) == list(PARTS)
    shapes: dict[str, dict[str, Any]] = {}
    for name, part in config["parts"].items():
        assert (converted / part["engine"]).is_file()
        session = onnxruntime.InferenceSession(converted / part["onnx"])
        shapes[name] = {one.name: one.shape for one in session.get_inputs()}
        assert [one["name"] for one in part["outputs"]] == [one.name for one in session.get_outputs()]
        assert all(check["sqnr_db"] is None or check["sqnr_db"] > 30 for check in part["checks"])
    states = ["batch", 4, "encoder_sequence", 8]
    assert shapes == {
        "encoder_model": {"input_ids": ["batch", "sequence"], "attention_mask": ["batch", "sequence"]},
        "decoder_model": {
            "input_ids": ["batch", "sequence"],
            "encoder_hidden_states": ["batch", "encoder_sequence", 32],
            "encoder_attention_mask": ["batch", "encoder_sequence"],
        },
        "decoder_with_past_model": {
            "input_ids": ["batch", 1],
            "encoder_attention_mask": ["batch", "encoder_sequence"],
            "past_key_values.0.decoder.key": ["batch", 4, "past_sequence", 8],
            "past_key_values.0.decoder.value": ["batch", 4, "past_sequence", 8],
            "past_key_values.0.encoder.key": states,
            "past_key_values.0.encoder.value": states,
        },
    }
    assert read_json(converted / "onnx" / "config.json")["model_type"] == "t5"
    card = (converted / "README.md").read_text()
    assert "samples = ['a text']" in card
    assert "model.generate(samples)" in card


def test_triton_has_a_model_for_each_graph(converted: Path) -> None:
    for name, part in read_json(converted / "config.json")["parts"].items():
        model = converted / part["triton"]
        assert model.name == f"made-{name}"
        told = read_pbtxt((model / "config.pbtxt").read_text())
        session = onnxruntime.InferenceSession(model / "1" / "model.onnx")
        assert [one["name"][0] for one in told["input"]] == [one.name for one in session.get_inputs()]
        assert [one["name"][0] for one in told["output"]] == [one.name for one in session.get_outputs()]
        assert told["max_batch_size"] == [4]


def test_what_is_written_is_compared_token_by_token(converted: Path) -> None:
    """Latency, scores and the rest of the record, as of a run: tests/goldens."""
    config = read_json(converted / "config.json")
    assert config["quantization"]["sites"]["linear"] == [17, 17]
    assert 0.5 < config["quantization"]["multiply_adds"] <= 1
    assert (config["quantization"]["samples"], config["tokens"]) == (36, 6)
    steps = config["generated"]["checks"]
    assert {(one["batch"], one["sequence"]) for one in steps} == {(1, 4), (2, 8), (4, 16)}
    assert all(one["sqnr_db"] > 30 for one in steps)
    agreement = config["generated"]["agreement"]["engine"]
    assert agreement["samples"] == 3
    assert 0 <= agreement["texts"] <= agreement["tokens"] <= 1
    assert [one.form for one in read_record(converted / "report.json").agreement] == ["engine"]


def test_loaded_engines_write_what_the_quantized_model_writes(converted: Path, made: Path, place: Path) -> None:
    for folder in (converted, made):
        _writes_what_it_quantized(folder, place)
    loaded = _loaded(converted)
    many = [TEXTS[at % 3] for at in range(5)]
    assert loaded.generate(many) == [loaded.generate([text])[0] for text in many]
    assert loaded.generate(TEXTS[:1])[0].startswith(loaded.generate(TEXTS[:1], 2)[0])
    with pytest.raises(QuantizerError, match=r"the engines of an encoder-decoder model; use .*load_converted"):
        quantizer.load(made)


def test_what_the_engines_were_not_built_for_is_refused(converted: Path, tmp_path: Path) -> None:
    loaded = _loaded(converted)
    with pytest.raises(QuantizerError, match="takes a list of texts or paths, but got one text"):
        loaded.generate("the cat")
    with pytest.raises(QuantizerError, match=r"generate\(\) got no samples, expected at least one"):
        loaded.generate([])
    with pytest.raises(QuantizerError, match=r"text-to-text, for which transformers .* use generate\(\[\.\.\.\]\)"):
        quantizer.load_pipeline(converted)
    with pytest.raises(QuantizerError, match="7 tokens, but these engines were built to generate 1 to 6"):
        loaded.generate(["the cat"], 7)
    (tmp_path / "config.json").write_text(json.dumps({**read_json(converted / "config.json"), "tokens": None}))
    with pytest.raises(QuantizerError, match=r"config\.json\.tokens: expected 1 or more, got None"):
        load_converted(tmp_path)


def _halved(made: dict[str, Any]) -> dict[str, Any]:
    return {name: value if name == "logits" else value / 2 for name, value in made.items()}


# Of an engine alone: test_convert.py.
@pytest.mark.nightly
@pytest.mark.parametrize("spoilt", [WITH_PAST, "generated"])
def test_engines_that_compute_something_else_are_not_delivered(
    spoilt: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, load = model_graphs.engine_run, run_engines.load_engine

    def load_wrong(backend: str, path: Path, **options: Any) -> Any:
        engine = load(backend, path, **options)
        if path.stem != spoilt:
            return engine
        wrong = type("Wrong", (), {"__call__": lambda _, given: _halved(engine(given))})()
        wrong.name, wrong.inputs, wrong.output_names = engine.name, engine.inputs, engine.output_names
        return wrong

    monkeypatch.setattr(run_engines, "load_engine", load_wrong)
    if spoilt == "generated":
        # Each graph is right by itself, and what it keeps for the next token is lost.
        monkeypatch.setattr(model_graphs, "engine_run", lambda engine, batch: _halved(run(engine, batch)))
    folder = place / f"wrong-{spoilt}"
    assert main(["convert", "-m", str(place / "t5"), *SMALL, "-o", str(folder)]) != 0
    told = capsys.readouterr()
    assert f"{spoilt}: onnxruntime engine, batch " in " ".join((told.out + told.err).split())
    assert not list(folder.rglob("*.engine"))


@pytest.mark.nightly
def test_speech_is_converted_in_float_and_written_as_by_transformers(tmp_path: Path) -> None:
    source = tiny_whisper(tmp_path / "whisper")
    tones = sorted(tiny_recordings(tmp_path / "tones", 3, seed=1).rglob("*.wav"))
    assert main(["convert", "-m", str(source), *SMALL, "-o", str(tmp_path / "made")]) == 0
    loaded = _loaded(tmp_path / "made" / "onnxruntime")
    batch = {name: torch.from_numpy(value) for name, value in loaded.inputs(tones).items()}
    tokenizer = getattr(loaded.processor, "tokenizer", loaded.processor)
    right = Writer(load_model(str(source), "speech-to-text"), 6)(**batch)["sequences"]
    assert loaded.generate(tones) == [tokenizer.decode(row, skip_special_tokens=True).strip() for row in right]
    assert loaded.config["parts"][WITH_PAST]["inputs"][0]["shape"] == ["batch", 1]


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["openvino", "auto"])
def test_beams_are_searched_with_engines(backend: str, tmp_path: Path) -> None:
    source = tiny_bart(tmp_path / "bart")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS * 12))
    words = ["convert", "-m", str(source), "--batch-size", "1", "2", "4", "--seq-len", "4", "8", "16"]
    words += ["--new-tokens", "6", "--quantization", "--calibration", str(tmp_path / "texts.txt")]
    # Of the two for OpenVINO the one for this CPU: without VNNI sums of products of two activations saturate.
    words += ["--backend", *(["auto", "onnxruntime"] if backend == "auto" else cpu_candidates((backend,))[0])]
    words += ["-o", str(tmp_path / "made")]
    assert main(words) == 0
    (report,) = (tmp_path / "made").glob("*/report.json")
    assert len(_loaded(report.parent).generate(TEXTS)) == 3
    record = read_record(report)
    assert next(one.tokens for one in record.agreement if one.form == "engine") > 0.3
    assert (record.choice is None) == (backend != "auto")


@pytest.mark.nightly
def test_engines_that_do_not_run_here_are_told_as_such(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_engines, "runs_here", lambda _: False)
    words = ["--quantization", "--calibration", str(place / "texts.txt"), "--config", str(place / "settings.yaml")]
    assert main(["convert", "-m", str(place / "t5"), *SMALL, *words, "-o", str(place / "elsewhere")]) == 0
    folder = place / "elsewhere" / "onnxruntime"
    config, record = read_json(folder / "config.json"), read_record(folder / "report.json")
    assert config["verified"] == "not verified: built ahead of time, and this machine has no GPU"
    assert all((folder / part["engine"]).is_file() for part in config["parts"].values())
    assert [one.form for one in record.agreement] == ["proxy"]
    assert record.latency is None
    assert [(one.output, one.engine) for one in record.outputs] == [
        (f"{name}: {output}", False)
        for name, output in zip(PARTS, ("last_hidden_state", "logits", "logits"), strict=True)
    ]
    assert record.engine.verified.startswith("not verified")


@pytest.mark.nightly
@pytest.mark.skipif(not AHEAD, reason="needs enginequant[tensorrt-rtx] on a machine without a GPU")
def test_graphs_are_built_for_a_gpu_elsewhere(place: Path) -> None:
    (place / "plain.yaml").write_text("preset: plain\n")
    words = ["--quantization", "--calibration", str(place / "texts.txt"), "--config", str(place / "plain.yaml")]
    words += ["--batch-size", "1", "2", "4", "--seq-len", "4", "8", "16", "--new-tokens", "6", "-o", str(place / "rtx")]
    words += ["--backend", "tensorrt-rtx", "--compute-capability", "sm89"]
    assert main(["convert", "-m", str(place / "t5"), *words]) == 0
    folder = place / "rtx" / "tensorrt-rtx"
    config = read_json(folder / "config.json")
    assert config["compute_capability"] == "sm89"
    assert list(config["generated"]["agreement"]) == ["proxy", "simulation"]
    for name, part in config["parts"].items():
        script = folder / part["gpu_check"]
        assert script == folder / "on_gpu" / name / "run_on_gpu.sh"
        settings = (script.parent / "gpu" / "settings.sh").read_text()
        assert "CAPABILITY=sm89" in settings
        cases = re.search(r"CASES='?([^'\n]*)", settings)
        least, usual = (read_json(script.parent / "gpu" / case / "case.json") for case in cases[1].split())
        # Caches are compared at the least shape: dozens of them would fill the folder.
        assert len(least["outputs"]) == len(part["outputs"])
        assert len(usual["outputs"]) == 1
    hidden = next(one for one in config["parts"][DECODER]["inputs"] if one["name"] == "encoder_hidden_states")
    assert hidden["dtype"] == "float16"


# -- a run -------------------------------------------------------------------------------------------------------------


def test_loading_puts_back_what_a_kill_left_aside(made: Path) -> None:
    made.rename(new_name(made).with_suffix(OLD))
    assert isinstance(load_converted(made), ConvertedParts)
    assert made.is_dir()


def test_the_configuration_of_a_run_is_the_one_to_repeat_it(made: Path) -> None:
    again = load_run(made / "config.yaml")
    assert again.export.dynamic.batch == (1, 2, 4)
    assert again.quantizer.preset == "plain"
    assert main(["validate", str(made / "config.yaml")]) == 0


def test_groups_fall_back_by_sensitivity(made: Path) -> None:
    record = read_record(made / "report.json")
    assert len(record.sensitivity) > 2
    assert len(record.fallback.groups) == 2
    low = {site.name for site in record.coverage if site.quantized}
    ranked = {row.group: row.sites for row in record.sensitivity}
    assert not low & {site for group in record.fallback.groups for site in ranked[group]}


# Of a model that is one engine: test_run_search.py, test_engine_budget.py.
@pytest.mark.nightly
def test_groups_fall_back_until_what_is_written_scores_as_well(place: Path) -> None:
    settings = _settings(place) | {"output": str(place / "searched"), "amp": {"batches": 1}}
    settings["data"]["tuning"] = {"name": "text-pairs", "path": str(place / "few.csv")}
    settings["quantizer"]["activations"] = {"percentile": 60.0}
    (place / "searched.yaml").write_text(
        yaml.safe_dump(settings | {"fallback": {"max_drop": 0.0, "max_evaluations": 6}})
    )
    assert main(["run", str(place / "searched.yaml")]) == 0
    record = read_record(place / "searched" / "report.json")
    assert record.fallback.evaluations
    assert record.fallback.checks[-1].samples == 1
    _writes_what_it_quantized(place / "searched", place)


# -- sizes and limits --------------------------------------------------------------------------------------------------


def test_sizes_that_nobody_said_fit_what_writes_token_by_token(place: Path) -> None:
    said = _settings(place)
    plain = {key: said[key] for key in ("model", "quantizer")} | {"data": {**said["data"], "batch_size": 16}}
    sized = with_written_sizes(RunConfig.model_validate(plain))
    assert sized.export.dynamic.batch == (1, 4, 16)
    assert (sized.report.latency_batch, sized.report.latency_sequence) == (4, 128)
    del plain["data"]["batch_size"]
    sized = with_written_sizes(RunConfig.model_validate(plain))
    assert (sized.data.batch_size, sized.export.dynamic.batch) == (4, (1, 4, 8))
    # The same again, whether it was said or not.
    assert with_written_sizes(RunConfig.model_validate(sized.model_dump(mode="json"))) == sized
    said |= {"export": {}, "report": {"latency_batch": 16}}
    sized = with_written_sizes(RunConfig.model_validate(said))
    assert (sized.export.dynamic.batch, sized.report.latency_batch) == ((1, 4, 16), 16)


def test_default_sizes_and_limits_of_what_is_written(place: Path, tmp_path: Path) -> None:
    (config,) = conversion_configs(
        {"model": str(place / "t5"), "output": tmp_path / "out", "backend": ("onnxruntime",)}
    )
    assert config.export.dynamic.batch == (1, 4, 8)
    t5, whisper = transformers.T5Config(), transformers.WhisperConfig(max_target_positions=100)
    assert most_tokens(None, t5) == 128
    assert most_tokens(None, whisper) == 92
    assert most_tokens(300, t5) == 300
    with pytest.raises(TaskError, match=r"new_tokens: got 93, but the decoder has 100 positions, .*at most 92"):
        most_tokens(93, whisper)
