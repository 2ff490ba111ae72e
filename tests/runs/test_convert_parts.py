"""``quantizer convert`` of models in parts: an engine for each, checked, timed and loaded again to write text."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pbtxt import read_pbtxt

from quantizer.cli.main import main

for _package in ("transformers", "scipy", "torchmetrics", "onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(_package, reason="a conversion needs enginequant[hf,onnx,onnxruntime]")

import onnx
import onnxruntime
import transformers
from tiny_audio import tiny_recordings
from tiny_seq2seq import TEXTS, tiny_bart, tiny_t5, tiny_whisper

from quantizer import Quantizer
from quantizer.engines.candidates import cpu_candidates
from quantizer.errors import QuantizerError, TaskError
from quantizer.report import read_record
from quantizer.runs.convert import ConversionRequest, load_converted, measure
from quantizer.runs.convert.inputs import conversion_inputs
from quantizer.runs.convert.parts import part_maker
from quantizer.runs.convert.parts.limits import most_tokens
from quantizer.runs.convert.parts.loaded import ConvertedParts
from quantizer.tasks import load_model
from quantizer.tasks.seq2seq.parts import PARTS, WITH_PAST
from quantizer.tasks.seq2seq.writer import Writer

pytestmark = pytest.mark.usefixtures("exact_byte_products")

SMALL = ["--batch-size", "1", "2", "4", "--new-tokens", "6", "--backend", "onnxruntime"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    tiny_t5(folder / "t5")
    (folder / "texts.txt").write_text("\n".join(TEXTS * 12))
    (folder / "pairs.csv").write_text(
        "source,target\n" + "".join(f"{text},{TEXTS[number - 1]}\n" for number, text in enumerate(TEXTS))
    )
    return folder


@pytest.fixture(scope="module")
def converted(place: Path) -> Path:
    words = ["convert", "-m", str(place / "t5"), *SMALL, "--seq-len", "4", "8", "16", "-o", str(place / "made")]
    (place / "settings.yaml").write_text("preset: plain\nformats:\n  - {names: ['**.wo'], activations: dynamic}\n")
    words += ["--quantization", "--calibration", str(place / "texts.txt"), "--config", str(place / "settings.yaml")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_SECONDS", 0.1)
        assert main([*words, "--evaluation", f"text-pairs:{place / 'pairs.csv'}"]) == 0
    return place / "made"


def test_the_settings_of_a_file_are_those_of_all_parts(converted: Path) -> None:
    q = Quantizer.load(converted / "quantizer")
    plan = q.plan
    at_run_time = {path for path, entry in plan.items() if "with ranges at run time" in entry.reason}
    assert at_run_time == {path for path, entry in plan.items() if ".wo." in path}
    assert at_run_time
    nodes = [node.op_type for node in onnx.load(converted / "onnxruntime/onnx/encoder_model.onnx").graph.node]
    assert "DynamicQuantizeLinear" in nodes


def _read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def _loaded(folder: Path) -> ConvertedParts:
    loaded = load_converted(folder)
    assert isinstance(loaded, ConvertedParts)
    return loaded


def _right(source: Path, task: str, loaded: ConvertedParts, samples: list[Any], tokens: int) -> list[str]:
    """What the float model of transformers writes."""
    batch = {name: torch.from_numpy(value) for name, value in loaded.inputs(samples).items()}
    tokenizer = getattr(loaded.processor, "tokenizer", loaded.processor)
    made = Writer(load_model(str(source), task), tokens)(**batch)["sequences"]
    return [tokenizer.decode(row, skip_special_tokens=True).strip() for row in made]


def test_each_part_has_a_file_and_an_engine_under_the_usual_names(converted: Path) -> None:
    folder = converted / "onnxruntime"
    config = _read(folder / "config.json")
    assert list(config["parts"]) == list(PARTS)
    shapes: dict[str, dict[str, Any]] = {}
    for name, part in config["parts"].items():
        assert (folder / part["engine"]).is_file()
        session = onnxruntime.InferenceSession(folder / part["onnx"])
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
    assert _read(folder / "onnx" / "config.json")["model_type"] == "t5"
    assert "generate(['a text'])" in (folder / "README.md").read_text()


def test_triton_has_a_model_for_each_part(converted: Path) -> None:
    folder = converted / "onnxruntime"
    for name, part in _read(folder / "config.json")["parts"].items():
        model = folder / part["triton"]
        assert model.name == f"made-{name}"
        told = read_pbtxt((model / "config.pbtxt").read_text())
        session = onnxruntime.InferenceSession(model / "1" / "model.onnx")
        assert [one["name"][0] for one in told["input"]] == [one.name for one in session.get_inputs()]
        assert [one["name"][0] for one in told["output"]] == [one.name for one in session.get_outputs()]
        assert told["max_batch_size"] == [4]


def test_what_was_measured_is_written_down(converted: Path) -> None:
    document = _read(converted / "conversion.json")
    (result,) = document["backends"]
    facts = result["quantization"]
    assert facts["sites"]["linear"] == [17, 17]
    assert 0.5 < facts["multiply_adds"] <= 1
    assert facts["rows"] == 36
    assert [(one["batch"], one["sequence"]) for one in result["steps"]] == [(1, 4), (2, 8), (4, 16)]
    assert all(one["output"] == "logits" and one["sqnr_db"] > 30 for one in result["steps"])
    for name in ("proxy", "engine"):
        agreement = result["agreement"][name]
        assert agreement["rows"] == 32
        assert 0 <= agreement["texts"] <= agreement["tokens"] <= 1
    assert [list(one["milliseconds"]) for part in result["parts"] for one in part["latency"]] == [
        ["PyTorch float", "float engine", "engine"]
    ] * 9
    assert result["whole"]["tokens"] == 6
    assert min(result["whole"]["latency"]["milliseconds"].values()) > 0
    assert [(one["which"], one["metric"], one["rows"]) for one in result["scores"]] == [
        (which, "rouge_l", 3) for which in ("float", "proxy", "engine")
    ]
    assert set(result["scores"][2]["paired"]) == {"equal_tokens", "equal_texts"}
    record = read_record(converted / "onnxruntime" / "report.json")
    assert [(one.output, one.batch) for one in record.outputs] == [
        ("encoder_model: last_hidden_state", 2),
        ("decoder_model: logits", 2),
        ("decoder_with_past_model: logits", 2),
        ("token by token: logits", 2),
    ]
    assert record.covered_share == facts["multiply_adds"]
    assert record.inspection is not None
    assert record.inspection.verified
    assert record.latency is not None
    assert {one.name for one in record.latency.engines} == {one.name for one in record.size} == {"float", "engine"}


def test_loaded_engines_write_what_the_quantized_model_writes(converted: Path, place: Path) -> None:
    loaded = _loaded(converted / "onnxruntime")
    model = load_model(str(place / "t5"), "text-to-text")
    proxy = Quantizer.load(converted / "quantizer").quantize(model)
    batch = {name: torch.from_numpy(value) for name, value in loaded.inputs(TEXTS).items()}
    right = Writer(proxy, 6)(**batch)["sequences"]
    assert loaded.generate(TEXTS) == [loaded.processor.decode(row, skip_special_tokens=True) for row in right]
    shorter = loaded.generate(TEXTS[:1], 2)
    assert loaded.generate(TEXTS[:1])[0].startswith(shorter[0])
    beams = loaded.model.generate(**batch, max_new_tokens=6, num_beams=2)
    assert torch.equal(beams, proxy.generate(**batch, max_new_tokens=6, num_beams=2))


def test_what_the_engines_were_not_built_for_is_refused(converted: Path) -> None:
    loaded = _loaded(converted / "onnxruntime")
    with pytest.raises(QuantizerError, match="takes a list of texts or paths, and was given one"):
        loaded.generate("the cat")
    with pytest.raises(QuantizerError, match="5 samples at once, and these engines were built for 1 to 4"):
        loaded.generate(["the cat"] * 5)
    with pytest.raises(QuantizerError, match="7 tokens, and these engines were built to write 1 to 6"):
        loaded.generate(["the cat"], 7)


def test_a_folder_that_lacks_a_part_is_refused(converted: Path, tmp_path: Path) -> None:
    config = _read(converted / "onnxruntime" / "config.json")
    (tmp_path / "config.json").write_text(json.dumps({**config, "tokens": None}))
    with pytest.raises(QuantizerError, match=r"config\.json\.tokens: expected 1 or more, got None"):
        load_converted(tmp_path)


def _halved(made: dict[str, Any]) -> dict[str, Any]:
    return {name: value if name == "logits" else value / 2 for name, value in made.items()}


@pytest.mark.promise("It is an error if a part, or the logits token by token, are further from PyTorch's")
# Of an engine alone: test_convert.py.
@pytest.mark.nightly
@pytest.mark.parametrize("spoilt", [WITH_PAST, "generated"])
def test_engines_that_compute_something_else_are_not_delivered(
    spoilt: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, load = part_maker.engine_run, part_maker.load_engine

    def load_wrong(backend: str, path: Path, **options: Any) -> Any:
        engine = load(backend, path, **options)
        if path.stem != spoilt:
            return engine
        wrong = type("Wrong", (), {"__call__": lambda _, given: _halved(engine(given))})()
        wrong.name, wrong.inputs, wrong.output_names = engine.name, engine.inputs, engine.output_names
        return wrong

    monkeypatch.setattr(part_maker, "load_engine", load_wrong)
    if spoilt == "generated":
        # Each part is right by itself, and what it keeps for the next token is lost.
        monkeypatch.setattr(part_maker, "engine_run", lambda engine, batch: _halved(run(engine, batch)))
    assert main(["convert", "-m", str(place / "t5"), *SMALL, "-o", str(place / "wrong")]) != 0
    told = capsys.readouterr()
    assert f"error: {spoilt}: onnxruntime engine, batch 1" in " ".join((told.out + told.err).split())
    assert not (place / "wrong").exists()


REFUSED = {
    "a budget": (["--max-drop", "0.1", "--tuning", "text-pairs:{pairs}"], "nothing is put back to float"),
    "a task of one engine": (["--task", "fill-mask"], "--new-tokens 6: task fill-mask writes no text; leave it out"),
    "no tokens": (["--new-tokens", "0"], "--new-tokens 0: expected 1 or more"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_models_in_parts_cannot_have(what: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more, said = REFUSED[what]
    words = ["convert", "-m", str(place / "t5"), *SMALL, "--quantization", "--calibration", str(place / "texts.txt")]
    words += [word.format(pairs=place / "pairs.csv") for word in more]
    assert main([*words, "-o", str(place / "refused")]) != 0
    told = capsys.readouterr()
    assert said in " ".join((told.out + told.err).split())
    assert not (place / "refused").exists()


@pytest.mark.promise("`--new-tokens` says how many tokens are written at most, 128 by default, and batches are of 1, 4")
def test_default_sizes_and_limits_of_what_is_written(place: Path, tmp_path: Path) -> None:
    request = partial(ConversionRequest, model=str(place / "t5"), output=tmp_path / "out", backends=("onnxruntime",))
    assert conversion_inputs(request(), "out").batch == (1, 4, 8)
    t5, whisper = transformers.T5Config(), transformers.WhisperConfig(max_target_positions=100)
    assert most_tokens(None, t5, "--new-tokens") == 128
    assert most_tokens(None, whisper, "--new-tokens") == 92
    assert most_tokens(300, t5, "--new-tokens") == 300
    with pytest.raises(TaskError, match=r"--new-tokens 93: the decoder has 100 positions, .*; give 92 or less"):
        most_tokens(93, whisper, "--new-tokens")


@pytest.mark.nightly
def test_speech_is_converted_in_float_and_written_as_by_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_SECONDS", 0.1)
    source = tiny_whisper(tmp_path / "whisper")
    tones = sorted(tiny_recordings(tmp_path / "tones", 3, seed=1).rglob("*.wav"))
    assert main(["convert", "-m", str(source), *SMALL, "-o", str(tmp_path / "made")]) == 0
    loaded = _loaded(tmp_path / "made" / "onnxruntime")
    assert loaded.generate(tones) == _right(source, "speech-to-text", loaded, tones, 6)
    assert loaded.config["parts"][WITH_PAST]["inputs"][0]["shape"] == ["batch", 1]


@pytest.mark.promise("With `--backend auto` the engines of the backend that writes it the fastest are kept")
@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["openvino", "auto"])
def test_beams_are_searched_with_engines(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_SECONDS", 0.1)
    source = tiny_bart(tmp_path / "bart")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS * 12))
    words = ["convert", "-m", str(source), "--batch-size", "1", "2", "4", "--seq-len", "4", "8", "16"]
    words += ["--new-tokens", "6", "--quantization", "--calibration", str(tmp_path / "texts.txt")]
    # Of the two for OpenVINO the one for this CPU: without VNNI sums of products of two activations saturate.
    words += ["--backend", *(["auto", "onnxruntime"] if backend == "auto" else cpu_candidates((backend,))[0])]
    words += ["-o", str(tmp_path / "made")]
    assert main(words) == 0
    (result,) = _read(tmp_path / "made" / "conversion.json")["backends"]
    loaded = _loaded(tmp_path / "made" / result["backend"])
    assert len(loaded.generate(TEXTS)) == 3
    assert result["agreement"]["engine"]["tokens"] > 0.3
    choice = _read(tmp_path / "made" / "conversion.json")["choice"]
    assert (choice is None) == (backend != "auto")
