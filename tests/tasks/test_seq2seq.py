"""Encoders with decoders: their parts compute what they compute whole, and their tasks score what they write."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_audio import tiny_recordings
from tiny_seq2seq import TEXTS, tiny_bart, tiny_t5, tiny_whisper

from quantizer import Quantizer
from quantizer.errors import TaskError
from quantizer.tasks import Predictions, Rewritten, Speech, Task, build_task, load_examples, load_model, load_processor
from quantizer.tasks.seq2seq.parts import DECODER, ENCODER, WITH_PAST, parts_of, require_parts
from quantizer.tasks.seq2seq.writer import Steps, Writer, equal_texts, equal_tokens, in_parts, read_tokens

MADE: dict[str, Callable[[Path], Path]] = {"t5": tiny_t5, "bart": tiny_bart, "whisper": tiny_whisper}
TASKS = {"t5": "text-to-text", "bart": "text-to-text", "whisper": "speech-to-text"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("seq2seq")
    return {name: str(make(folder / name)) for name, make in MADE.items()}


@pytest.fixture(scope="module")
def built(sources: dict[str, str]) -> dict[str, tuple[Any, Task]]:
    made = {}
    for name, source in sources.items():
        model, processor = load_model(source, TASKS[name]), load_processor(source, TASKS[name])
        made[name] = model, build_task(TASKS[name], model, processor, max_length=32, batch_size=3)
    return made


@pytest.fixture(scope="module")
def reads(built: dict[str, tuple[Any, Task]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    tones = sorted(tiny_recordings(tmp_path_factory.mktemp("tones"), 3, seed=1).rglob("*.wav"))
    samples = {"t5": list(TEXTS), "bart": list(TEXTS), "whisper": tones}
    return {name: task.sample_batches(samples[name])[0] for name, (_, task) in built.items()}


def _runs(model: Any) -> dict[str, Any]:
    def run(part: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        with torch.no_grad():
            return part(**batch)

    return {name: partial(run, part) for name, part in parts_of(model).items()}


@pytest.mark.parametrize("name", MADE)
def test_parts_write_what_the_model_writes(name: str, built: dict[str, tuple[Any, Task]], reads: Any) -> None:
    model, batch = built[name][0], reads[name]
    off = Quantizer().proxy(model)
    right = Writer(model, 8, exactly=True)(**batch)["sequences"]
    assert len({tuple(row) for row in right.tolist()}) > 1
    seen = read_tokens(model, batch, 8, exactly=True)
    first, ids = seen[0].shape[1], torch.cat(seen, dim=1)
    assert first == (3 if name == "whisper" else 1)
    with torch.no_grad():
        logits = Steps(model, first, "whole")(written=ids, **batch)["logits"]
        for whole in (model, off):
            taken = in_parts(model, _runs(whole))
            assert torch.equal(Writer(taken, 8, exactly=True)(**batch)["sequences"], right)
            assert torch.equal(Steps(taken, first, "parts")(written=ids, **batch)["logits"], logits)


def test_a_part_that_is_wrong_writes_something_else(built: dict[str, tuple[Any, Task]], reads: Any) -> None:
    model, batch = built["t5"][0], reads["t5"]
    ids = torch.cat(read_tokens(model, batch, 8, exactly=True), dim=1)
    right = Steps(model, 1, "whole")(written=ids, **batch)["logits"]
    for wrong in (ENCODER, DECODER, WITH_PAST):
        runs = _runs(model)

        def spoilt(run: Any, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {key: value * (1 if key == "logits" else 0.5) for key, value in run(given).items()}

        runs[wrong] = partial(spoilt, runs[wrong])
        found = Steps(in_parts(model, runs), 1, "parts")(written=ids, **batch)["logits"]
        assert not torch.allclose(found, right, atol=1e-3)


def test_parts_have_the_names_that_usual_runtimes_take(built: dict[str, tuple[Any, Task]], reads: Any) -> None:
    model, batch = built["t5"][0], reads["t5"]
    seen: dict[str, tuple[list[str], list[str]]] = {}

    def look(name: str, run: Any, given: dict[str, torch.Tensor]) -> Any:
        made = run(given)
        seen[name] = list(given), list(made)
        return made

    runs = {name: partial(look, name, run) for name, run in _runs(model).items()}
    Writer(in_parts(model, runs), 3, exactly=True)(**batch)
    own, cross = ([f"0.{half}.key", f"0.{half}.value"] for half in ("decoder", "encoder"))
    past = [f"past_key_values.{name}" for name in (*own, *cross)]
    present = [f"present.{name}" for name in (*own, *cross)]
    assert {name: (set(given), made) for name, (given, made) in seen.items()} == {
        "encoder_model": ({"input_ids", "attention_mask"}, ["last_hidden_state"]),
        "decoder_model": ({"input_ids", "encoder_attention_mask", "encoder_hidden_states"}, ["logits", *present]),
        "decoder_with_past_model": ({"input_ids", "encoder_attention_mask", *past}, ["logits", *present[:2]]),
    }


@pytest.mark.filterwarnings("ignore:attention_mask .* may not be 1 for tokens")
@pytest.mark.nightly
def test_ranges_are_those_of_decoding_token_by_token(built: dict[str, tuple[Any, Task]], reads: Any) -> None:
    model, batch = built["t5"][0], {name: value[:1] for name, value in reads["t5"].items()}
    seen = read_tokens(model, batch, 6, exactly=True)

    def ranges(batch: dict[str, torch.Tensor], module: torch.nn.Module) -> dict[str, float]:
        settings = {"calibrator": "max", "smoothquant_alpha": None}
        quantizer = Quantizer(backend="onnxruntime", preset="plain", activations=settings)
        quantizer.calibrate(module, [batch] * 32, progress=False)
        operands = [(site.name, one) for site in quantizer.plan.values() for one in site.operands]
        return {f"{name}.{one.name}": float(one.amax.max()) for name, one in operands if one.amax is not None}

    ids = torch.cat(seen, dim=1)
    once = ranges({**batch, "decoder_input_ids": ids}, model)
    one_by_one = ranges({**batch, "written": ids}, Steps(model, 1, "parts"))
    assert len(once) > 10
    assert once == pytest.approx({name.removeprefix("model."): one for name, one in one_by_one.items()}, rel=1e-5)


def test_texts_are_scored_by_their_longest_common_words(built: dict[str, tuple[Any, Task]]) -> None:
    task = built["t5"][1]
    tokenizer = task.tokenizer  # type: ignore[attr-defined]
    examples = [Rewritten("a cat", "The cat is fast"), Rewritten("a dog", "a dog")]
    ids = tokenizer(["the cat was fast", "a dog"], padding=True, return_tensors="pt")["input_ids"]
    found = task.predict(lambda batch: {"sequences": ids[[0, 1]]}, examples)
    assert task.texts(found) == ["the cat was fast", "a dog"]  # type: ignore[attr-defined]
    assert task.score(found, examples) == pytest.approx((0.75 + 1) / 2)
    other = Predictions(found.outputs, np.where(found.decisions == found.decisions[0, 2], 5, found.decisions))
    paired = task.paired(found, other)
    assert 0 < paired["equal_tokens"] < 1
    assert paired["equal_texts"] == 0.5
    assert task.paired(found, found) == {"equal_tokens": 1.0, "equal_texts": 1.0}


def test_tokens_after_the_end_of_one_text_are_not_equal() -> None:
    right = np.array([[4, 5, -1], [6, -1, -1]])
    assert equal_tokens(right, right[:, :2]) == 1.0
    assert equal_tokens(right, np.array([[4, 5, 7, 8], [6, -1, -1, -1]])) == pytest.approx(3 / 5)
    assert equal_texts(right, np.array([[4, 5, 7, 8], [6, -1, -1, -1]])) == 0.5


def test_words_of_recordings_are_compared_without_case(built: dict[str, tuple[Any, Task]], tmp_path: Path) -> None:
    task = built["whisper"][1]
    (tones,) = sorted(tiny_recordings(tmp_path, 1, seed=1).rglob("*.wav"))
    ids = task.tokenizer("a bad cab")["input_ids"]  # type: ignore[attr-defined]
    examples = [Speech(tones, "A bad, bad cab!")]
    found = task.predict(lambda batch: {"sequences": torch.tensor([ids])}, examples)
    assert task.score(found, examples) == 0.25
    long = tiny_recordings(tmp_path / "long", 1, seed=1, rate=4000)
    assert task.score(found, [Speech(next(long.rglob("*.wav")), "a bad cab")]) == 0.0


def test_pairs_of_texts_are_read(tmp_path: Path) -> None:
    (tmp_path / "pairs.csv").write_text("id,document,summary\n1,a long text,short\n")
    (tmp_path / "pairs.jsonl").write_text('{"source": "a long text", "target": "short"}\n')
    for name in ("pairs.csv", "pairs.jsonl"):
        assert load_examples("text-pairs", path=tmp_path / name) == [Rewritten("a long text", "short")]


def test_models_that_cannot_be_taken_apart_are_refused(built: dict[str, tuple[Any, Task]], reads: Any) -> None:
    class Forgetful(transformers.T5ForConditionalGeneration):
        def forward(self, **given: Any) -> Any:
            made = super().forward(**given)
            made["past_key_values"] = None
            return made

    config = built["t5"][0].config
    with pytest.raises(TaskError, match="Forgetful keeps NoneType of former tokens, expected all"):
        require_parts(Forgetful(config).eval(), reads["t5"])
    one = transformers.LlamaConfig(vocab_size=24, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(TaskError, match="LlamaForCausalLM is not an encoder-decoder model"):
        require_parts(transformers.LlamaForCausalLM(one).eval(), reads["t5"])
