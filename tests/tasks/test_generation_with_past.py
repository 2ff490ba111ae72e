"""Decoding token by token: the cache goes in and out, and the score is that of a text that is read at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from quantizer import Quantizer
from quantizer.cli.main import main
from quantizer.engines import load_engine
from quantizer.errors import QuantizerError, TaskError
from quantizer.pipeline.load import load_converted
from quantizer.tasks import Plain, Task, batch_shape, build_task, load_model
from quantizer.tasks.text_generation import DecodeStep

TASK = "text-generation-with-past"
PLAIN = [Plain("the cat is fast and the dog is not very slow ."), Plain("a good film , not a bad plane .")]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
NAMES = [f"{layer}.{kind}" for layer in (0, 1) for kind in ("key", "value")]


@pytest.fixture(scope="module")
def folder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    at: Path = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=64, **SIZES)
    LlamaForCausalLM(config).save_pretrained(at)
    tokenizer.save_pretrained(at)
    return at


@pytest.fixture(scope="module")
def step(folder: Path) -> DecodeStep:
    model = load_model(str(folder), TASK)
    assert isinstance(model, DecodeStep)
    return model


@pytest.fixture(scope="module")
def task(step: DecodeStep, tokenizer: Any) -> Task:
    return build_task(TASK, step, tokenizer, max_length=32, batch_size=2)


def test_a_step_after_a_cache_is_what_the_model_computes_at_once(folder: Path, step: DecodeStep, task: Task) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    whole = task.batches(PLAIN[:1])[0]
    length = whole["input_ids"].shape[1]
    with torch.no_grad():
        right = model(input_ids=whole["input_ids"], attention_mask=whole["attention_mask"]).logits
        assert torch.equal(step(**whole)["logits"], right)
        for kept in (1, length // 2, length - 1):
            part = task.inputs.split(whole, kept)
            assert part["past_key_values.1.value"].shape == (1, 2, kept, 8)
            made = step(**part)
            torch.testing.assert_close(made["logits"], right[:, kept:], rtol=0, atol=1e-6)
            assert made["present.0.key"].shape == (1, 2, length, 8)


def test_outputs_are_compared_on_half_of_the_tokens_after_a_cache(step: DecodeStep, task: Task) -> None:
    batch = task.compared([example.text for example in PLAIN], 3, 16)
    assert batch["input_ids"].shape == (3, 8)
    assert batch["past_key_values.0.key"].shape == (3, 2, 8, 8)
    assert step(**batch)["logits"].shape[:2] == (3, 8)


def test_batches_to_time_read_one_token(task: Task) -> None:
    assert task.input_names == ("input_ids", "attention_mask", *(f"past_key_values.{name}" for name in NAMES))
    for batch in (task.random_batch(3, 16), task.inputs.filled([example.text for example in PLAIN], 3, 16)):
        assert batch_shape(batch) == (3, 16)
        assert batch["input_ids"].shape == (3, 1)
        assert batch["past_key_values.0.key"].shape == (3, 2, 15, 8)
        assert float(batch["past_key_values.0.key"].abs().sum()) > 0
    example = task.example()
    assert 1 < example["input_ids"].shape[1] != example["past_key_values.0.key"].shape[2] > 1


def test_the_score_is_that_of_a_text_that_is_read_at_once(folder: Path, step: DecodeStep, task: Task) -> None:
    model = load_model(str(folder), "text-generation")
    at_once = build_task("text-generation", model, task.inputs.tokenizer, max_length=32, batch_size=2)
    right = at_once.score(at_once.predict(lambda batch: model(**batch), PLAIN), PLAIN)
    calls: list[tuple[int, int]] = []

    def run(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        calls.append((batch["input_ids"].shape[1], batch["past_key_values.0.key"].shape[2]))
        made: dict[str, torch.Tensor] = step(**batch)
        return made

    assert task.score(task.predict(run, PLAIN), PLAIN) == pytest.approx(right, rel=1e-5)
    (first, none), (second, kept) = calls
    assert (none, kept) == (0, first)
    assert second in (first, first + 1)

    def forgetful(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: value * (name == "logits") for name, value in run(batch).items()}

    assert task.score(task.predict(forgetful, PLAIN), PLAIN) != pytest.approx(right, rel=1e-5)


def test_a_cache_that_forgets_is_refused(tokenizer: Any) -> None:
    config = MistralConfig(vocab_size=len(tokenizer), num_key_value_heads=2, sliding_window=4, **SIZES)
    with pytest.raises(TaskError, match="MistralForCausalLM keeps DynamicSlidingWindowLayer of former tokens"):
        DecodeStep(MistralForCausalLM(config).eval())


@pytest.mark.filterwarnings("ignore:attention_mask .* may not be 1 for tokens")
def test_ranges_do_not_depend_on_how_a_text_was_split(step: DecodeStep, task: Task) -> None:
    whole = task.batches(PLAIN[:1])[0]
    middle = whole["input_ids"].shape[1] // 2
    first = {name: value[:, :middle] if value.dim() == 2 else value for name, value in whole.items()}

    def ranges(*batches: dict[str, torch.Tensor]) -> dict[str, float]:
        settings = {"calibrator": "max", "smoothquant_alpha": None}
        quantizer = Quantizer(backend="onnxruntime", preset="plain", activations=settings)
        quantizer.calibrate(step, list(batches) * 32, progress=False)
        operands = [(site.name, one) for site in quantizer.plan.values() for one in site.operands]
        return {f"{name}.{one.name}": float(one.amax.max()) for name, one in operands if one.amax is not None}

    at_once, in_two = ranges(whole), ranges(first, task.inputs.split(whole, middle))
    assert len(at_once) > 20
    assert at_once == pytest.approx(in_two, rel=1e-5)
    assert at_once != pytest.approx(ranges(first), rel=1e-5)


@pytest.mark.nightly
def test_a_file_takes_any_cache_under_the_usual_names(step: DecodeStep, task: Task, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs enginequant[onnxruntime]")
    quantizer = Quantizer(backend="onnxruntime", preset="plain")
    quantizer.calibrate(step, [*task.batches(PLAIN)] * 16, progress=False)
    proxy = quantizer.quantize(step)
    session = onnxruntime.InferenceSession(quantizer.export(proxy, tmp_path / "step.onnx", task.example()))
    assert {one.name: one.shape for one in session.get_inputs()} == {
        "input_ids": ["batch", "sequence"],
        "attention_mask": ["batch", "total_sequence"],
        **{f"past_key_values.{name}": ["batch", 2, "past_sequence", 8] for name in NAMES},
    }
    assert [one.name for one in session.get_outputs()] == ["logits", *(f"present.{name}" for name in NAMES)]
    whole = task.batches(PLAIN[:1])[0]
    for kept in (0, 1, whole["input_ids"].shape[1] - 1):
        batch = task.inputs.split(whole, kept)
        found = session.run(None, {name: value.numpy() for name, value in batch.items()})
        with torch.no_grad():
            for value, right in zip(found, proxy(**batch).values(), strict=True):
                np.testing.assert_allclose(value, right.numpy(), atol=1e-5)


def test_a_converted_decoder_writes_what_transformers_does(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs enginequant[onnxruntime]")
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(example.text for example in PLAIN * 16), encoding="utf-8")
    words = ["convert", "-m", str(folder), "--task", TASK, "--output", str(tmp_path / "out")]
    words += ["--batch-size", "1", "1", "2", "--seq-len", "4", "8", "16", "--backend", "onnxruntime"]
    assert main(words) == 0
    loaded = load_converted(tmp_path / "out" / "onnxruntime")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    encoded = loaded.processor("the cat", return_tensors="pt")
    ids = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    right = model.generate(**ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)[0]
    assert loaded.generate("the cat", 8) == loaded.processor.decode(right)
    assert loaded(["the cat is fast"])["logits"].shape[:1] == (1,)
    with pytest.raises(QuantizerError, match="and 16 new tokens exceed the 16 tokens that this engine was built for"):
        loaded.generate("the cat", 16)
    assert load_engine("onnxruntime", tmp_path / "out" / "onnxruntime" / "model.engine").output_names[0] == "logits"
