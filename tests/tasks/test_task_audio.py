"""Tasks of recordings: what is read, brought to one rate and length, and how classes and words are scored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from scipy.io import wavfile
from tiny_audio import CLASSES, RATE, tiny_ast, tiny_ctc, tiny_recordings, tiny_wav2vec2

from quantizer.errors import TaskError
from quantizer.tasks import (
    Audio,
    Recordings,
    Speech,
    Task,
    batch_shape,
    build_task,
    load_examples,
    load_model,
    load_processor,
    read_checkpoint,
    read_recordings,
)
from quantizer.tasks.audio import AudioInputs, read_recording
from quantizer.tasks.outputs import is_token

SECONDS = 1
MADE = {"wav2vec2": tiny_wav2vec2, "ast": tiny_ast, "ctc": tiny_ctc}
TASKS = {"wav2vec2": "audio-classification", "ast": "audio-classification", "ctc": "automatic-speech-recognition"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("audio")
    return {name: str(make(folder / name)) for name, make in MADE.items()}


@pytest.fixture(scope="module")
def built(models: dict[str, str]) -> dict[str, Task]:
    return {
        name: build_task(
            TASKS[name], load_model(source, TASKS[name]), load_processor(source, TASKS[name]), seconds=SECONDS
        )
        for name, source in models.items()
    }


def _write(path: Path, wave: np.ndarray, rate: int = RATE) -> Path:
    wavfile.write(path, rate, wave)
    return path


def test_a_model_of_speech_reads_no_text(models: dict[str, str]) -> None:
    with pytest.raises(TaskError, match="Wav2Vec2ForCTC has audio inputs, and task 'fill-mask' needs text inputs"):
        read_checkpoint(models["ctc"], "fill-mask")


@pytest.mark.parametrize("name", MADE)
def test_batches_hold_what_the_pipeline_gives_the_model(
    models: dict[str, str], built: dict[str, Task], tmp_path: Path, name: str
) -> None:
    """A recording as long as the engine takes: the values are the extractor's own, to the last bit."""
    wave = np.random.default_rng(0).normal(0, 0.1, RATE * SECONDS).astype(np.float32)
    batch = built[name].inputs.batch([_write(tmp_path / "one.wav", wave)])
    extractor = transformers.AutoFeatureExtractor.from_pretrained(models[name])
    expected = extractor(wave, sampling_rate=RATE, return_tensors="pt")
    assert set(batch) == set(expected)
    for key, value in expected.items():
        assert torch.equal(batch[key], value.to(batch[key].dtype)), key


def test_filling_does_not_scale_a_recording(built: dict[str, Task], models: dict[str, str], tmp_path: Path) -> None:
    """Without a mask the extractor would take the filling for a part of the recording."""
    wave = np.random.default_rng(0).normal(0.2, 0.1, RATE // 4).astype(np.float32)
    whole = _write(tmp_path / "whole.wav", np.resize(wave, RATE))
    batch = built["wav2vec2"].inputs.batch([_write(tmp_path / "short.wav", wave), whole])
    assert set(batch) == {"input_values"}
    own = transformers.AutoFeatureExtractor.from_pretrained(models["wav2vec2"])(wave, sampling_rate=RATE)
    values = batch["input_values"][0].numpy()
    np.testing.assert_allclose(values[: RATE // 4], own["input_values"][0], atol=1e-5)
    assert not values[RATE // 4 :].any()
    masked = built["ctc"].inputs.batch([tmp_path / "short.wav", whole])
    assert masked["attention_mask"].sum(dim=1).tolist() == [RATE // 4, RATE]


def _noise(place: Path, lengths: list[int]) -> list[Path]:
    pick = np.random.default_rng(0)
    return [
        _write(place / f"{number}.wav", pick.normal(0, 0.1, length).astype(np.float32))
        for number, length in enumerate(lengths)
    ]


def test_a_batch_is_as_long_as_its_longest_recording(built: dict[str, Task], tmp_path: Path) -> None:
    short, middle, long, tiny = _noise(tmp_path, [4000, 6001, 2 * RATE, 100])
    for name in ("wav2vec2", "ctc"):
        inputs = built[name].inputs
        assert all(value.shape == (2, 6001) for value in inputs.batch([short, middle]).values())
        assert inputs.batch([short, long])["input_values"].shape == (2, RATE * SECONDS)
        # The convolutions of these models need 10 x 8 x 4 values.
        assert inputs.batch([tiny])["input_values"].shape == (1, 320)
        assert built[name].has_lengths
    # A window of the spectrogram has 400 values.
    assert built["ast"].inputs.batch([short, tiny])["input_values"].shape == (2, 64, 32)
    assert not built["ast"].has_lengths


def test_recordings_of_similar_length_share_a_batch(models: dict[str, str], tmp_path: Path) -> None:
    """Calibration would otherwise read padding, which a model without a mask takes for sound."""
    source, name = models["wav2vec2"], "audio-classification"
    task = build_task(name, load_model(source, name), load_processor(source, name), batch_size=2, seconds=SECONDS)
    paths = _noise(tmp_path, [9000, 4000, 9000, 4000])
    batches = [batch["input_values"] for batch in task.sample_batches(paths)]
    # The batch of the first recording is the first.
    assert [tuple(batch.shape) for batch in batches] == [(2, 9000), (2, 4000)]
    assert all((batch != 0).all() for batch in batches)
    assert len(task.sample_batches(paths, limit=1)) == 1


def test_batches_of_a_requested_length(built: dict[str, Task], tmp_path: Path) -> None:
    paths = _noise(tmp_path, [4000, 5000])
    for name in ("wav2vec2", "ctc"):
        inputs = built[name].inputs
        batch = inputs.filled(paths, 3, 8000)
        assert batch_shape(batch) == (3, 8000)
        # Not shorter than the data, and not longer than the engine accepts.
        assert batch_shape(inputs.filled(paths, 2, 320)) == (2, 4000)
        assert batch_shape(inputs.filled(paths, 2, None)) == batch_shape(inputs.example(paths)) == (2, RATE * SECONDS)
        assert batch_shape(inputs.filled([], 2, 320)) == batch_shape(inputs.random(2, 1)) == (2, 320)
        assert (batch["input_values"][0] != 0).all()
    assert batch["attention_mask"].sum(dim=1).tolist() == [8000, 5000, 8000]


def test_the_usual_length_is_the_median_of_the_data(built: dict[str, Task], tmp_path: Path) -> None:
    inputs = built["ctc"].inputs
    assert isinstance(inputs, AudioInputs)
    sizes = inputs.sizes_of(_noise(tmp_path, [4000, 5000, 9000]))
    assert sizes is not None
    assert sizes.ranges == {"sequence": (320, 5000, RATE * SECONDS)}
    inputs.keep_open({name: {0: "batch"} for name in inputs.names})
    try:
        assert inputs.batch(_noise(tmp_path, [4000]))["attention_mask"].shape == (1, RATE * SECONDS)
        assert not built["ctc"].has_lengths
    finally:
        assert inputs.in_data is not None
        inputs.keep_open(inputs.in_data.axes)
    assert built["ctc"].has_lengths


def test_the_shortest_recording_is_that_of_the_model(models: dict[str, str]) -> None:
    config = transformers.HubertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, conv_dim=(8,) * 7
    )
    model = transformers.HubertModel(config).eval()
    extractor = transformers.Wav2Vec2FeatureExtractor()
    # One step of HuBERT sees 400 values.
    assert AudioInputs(model, extractor, seconds=1, min_length=1).recordings.shortest == 400
    assert AudioInputs(model, extractor, seconds=1, min_length=5000).recordings.shortest == 5000
    only = AudioInputs(model, extractor, seconds=400 / RATE, min_length=1)
    assert (only.recordings.shortest, only.in_data) == (400, None)


def test_what_is_too_long_is_cut(built: dict[str, Task], tmp_path: Path) -> None:
    long = _write(tmp_path / "long.wav", np.ones(3 * RATE, dtype=np.float32))
    assert built["wav2vec2"].inputs.batch([long])["input_values"].shape == (1, RATE)


@pytest.mark.parametrize("rate", [8000, 44100])
def test_another_rate_is_brought_to_the_extractors(built: dict[str, Task], tmp_path: Path, rate: int) -> None:
    def tone(at: int) -> np.ndarray:
        return np.sin(2 * np.pi * 440 * np.arange(at // 2) / at).astype(np.float32)

    recordings = built["wav2vec2"].inputs.recordings
    wave = recordings.wave(_write(tmp_path / "tone.wav", tone(rate), rate))
    assert abs(len(wave) - RATE // 2) <= 1
    # At the ends the filter sees silence around the recording.
    assert np.abs(wave - tone(RATE)[: len(wave)])[200:-200].max() < 0.01


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([0, 16384, -32768], dtype=np.int16), [0, 0.5, -1]),
        (np.array([128, 192, 0], dtype=np.uint8), [0, 0.5, -1]),
        (np.array([0, 2**30, -(2**31)], dtype=np.int32), [0, 0.5, -1]),
        (np.array([0, 0.5, -1], dtype=np.float64), [0, 0.5, -1]),
        (np.array([[0, 0], [16384, 0], [0, -32768]], dtype=np.int16), [0, 0.25, -0.5]),
    ],
    ids=["16 bits", "8 bits", "32 bits", "floats", "two channels"],
)
def test_all_kinds_of_samples(tmp_path: Path, values: np.ndarray, expected: list[float]) -> None:
    rate, wave = read_recording(_write(tmp_path / "some.wav", values))
    assert rate == RATE
    assert wave.tolist() == expected


def test_files_that_are_no_recordings(tmp_path: Path) -> None:
    whole = _write(tmp_path / "whole.wav", np.zeros(1000, dtype=np.int16)).read_bytes()
    for name, content, message in (
        ("text.wav", b"no sound", "text.wav cannot be read as a recording"),
        ("cut.wav", whole[:1000], r"cut.wav cannot be read as a recording \(Reached EOF prematurely"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TaskError, match=message):
            read_recording(tmp_path / name)
    with pytest.raises(TaskError, match=r"absent\.wav cannot be read as a recording .*ffmpeg -i FILE absent\.wav"):
        read_recording(tmp_path / "absent.wav")
    with pytest.raises(TaskError, match=r"empty\.wav holds no values"):
        read_recording(_write(tmp_path / "empty.wav", np.zeros(0, dtype=np.int16)))
    with pytest.raises(TaskError, match=r"nan\.wav holds values that are not finite"):
        read_recording(_write(tmp_path / "nan.wav", np.array([np.nan], dtype=np.float32)))


def test_folders_and_files_of_recordings(tmp_path: Path) -> None:
    folder = tiny_recordings(tmp_path / "tones", 6, seed=0)
    examples = load_examples("audio-folder", path=folder)
    assert {example.label for example in examples} == set(CLASSES)
    assert [example.path for example in examples] == read_recordings(folder)
    (tmp_path / "list.csv").write_text("path,label\ntones/low/0.wav,low\ntones/middle/1.wav,1\n")
    listed = load_examples("audio-csv", path=tmp_path / "list.csv")
    assert listed == [Audio(folder / "low" / "0.wav", "low"), Audio(folder / "middle" / "1.wav", "1")]
    (tmp_path / "none").mkdir()
    with pytest.raises(TaskError, match=r"none holds no recordings; expected .*CLASS/FILE with files that end in"):
        load_examples("audio-folder", path=tmp_path / "none")


def test_files_of_transcripts(tmp_path: Path) -> None:
    wav = _write(tmp_path / "a.wav", np.zeros(10, dtype=np.int16))
    (tmp_path / "t.csv").write_text("file,sentence\na.wav, two  words\n")
    (tmp_path / "t.jsonl").write_text(json.dumps({"path": "a.wav", "text": "two words"}) + "\n")
    for name in ("t.csv", "t.jsonl"):
        assert load_examples("transcripts", path=tmp_path / name) == [Speech(wav, "two words")]


def test_classes_are_scored_by_their_names(built: dict[str, Task], tmp_path: Path) -> None:
    examples = load_examples("audio-folder", path=tiny_recordings(tmp_path, 6, seed=0))
    # The order in which the task reads them.
    examples.sort(key=lambda example: len(read_recording(example.path)[1]))
    task = built["wav2vec2"]
    expected = task.targets(examples)
    right = task.predict(_classes(list(expected)), examples)
    assert task.score(right, examples) == 1.0
    wrong = task.predict(_classes([*expected[:3], *(expected[3:] + 1) % 3]), examples)
    assert task.score(wrong, examples) == 0.5
    assert task.paired(right, wrong)["label_flips"] == 0.5
    with pytest.raises(TaskError, match="the label 'loud' is no class of the model"):
        task.targets([Audio(examples[0].path, "loud")])


def _classes(numbers: list[int]) -> Callable[[dict[str, torch.Tensor]], object]:
    """Return a model that says these classes of the recordings of one batch."""
    return lambda batch: {"logits": torch.nn.functional.one_hot(torch.tensor(numbers), len(CLASSES)).float()}


def _says(task: Task, *texts: str) -> Callable[[dict[str, torch.Tensor]], object]:
    """Return a model that spells these texts from the start of each recording of a batch, with blanks between."""
    vocabulary = task._tokenizer.get_vocab()  # type: ignore[attr-defined]

    def run(batch: dict[str, torch.Tensor]) -> object:
        logits = torch.zeros(len(texts), 49, len(vocabulary))
        logits[:, :, 0] = 1
        for row, text in enumerate(texts):
            for at, letter in enumerate(text.replace(" ", "|")):
                logits[row, 2 * at, vocabulary[letter]] = 2
        return {"logits": logits}

    return run


@pytest.fixture
def speech(tmp_path: Path) -> list[Speech]:
    noise = np.random.default_rng(0).normal(0, 0.1, RATE).astype(np.float32)
    return [Speech(_write(tmp_path / f"{n}.wav", noise), text) for n, text in enumerate(("a bad cab", "a dad"))]


def test_word_errors_are_counted_over_all_rows(built: dict[str, Task], speech: list[Speech]) -> None:
    task = built["ctc"]
    right = task.predict(_says(task, "a bad cab", "a dad"), speech)
    assert right.outputs.shape == (2, 49, 13)
    assert task.score(right, speech) == 0.0
    # One word wrong and one missing of three, one too many of two: 3 of 5.
    wrong = task.predict(_says(task, "a bed", "a dad dad"), speech)
    assert task.counts(wrong, speech).tolist() == [[2, 3], [1, 2]]  # type: ignore[attr-defined]
    assert task.score(wrong, speech) == pytest.approx(0.6)
    low, high = task.difference_interval(right, wrong, speech, 200)
    assert 0.5 - 1e-9 <= low <= 0.6 <= high <= 2 / 3 + 1e-9
    assert 0 < task.paired(right, wrong)["label_flips"] < 0.5
    assert not task.higher_is_better


def test_letters_that_follow_each_other_need_a_blank(built: dict[str, Task], speech: list[Speech]) -> None:
    """What the model repeats is one letter, as in the pipeline of transformers."""
    task = built["ctc"]
    tokens = task._tokenizer.convert_tokens_to_ids(list("aa|bb"))  # type: ignore[attr-defined]
    logits = torch.nn.functional.one_hot(torch.tensor([tokens] * 2), 13).float()
    found = task.predict(lambda batch: {"logits": logits}, [Speech(example.path, "a b") for example in speech])
    assert task.score(found, [Speech(example.path, "a b") for example in speech]) == 0.0


def test_what_fills_a_recording_is_not_heard(built: dict[str, Task], tmp_path: Path) -> None:
    task = built["ctc"]
    quarter = np.random.default_rng(0).normal(0, 0.1, RATE // 4).astype(np.float32)
    examples = [
        Speech(_write(tmp_path / "quarter.wav", quarter), "abc"),
        Speech(_write(tmp_path / "whole.wav", np.resize(quarter, RATE)), "abc"),
    ]
    found = task.predict(_says(task, "abcabcabcabc abc", "abc"), examples)
    # 13 of the 49 steps: 7 letters with blanks between.
    assert is_token(found.outputs).sum(axis=-1).tolist() == [13, 49]
    tokens = found.decisions[0]
    assert task._tokenizer.decode(tokens[tokens >= 0].tolist()) == "abcabca"  # type: ignore[attr-defined]


def test_transcripts_that_do_not_fit(built: dict[str, Task], speech: list[Speech], tmp_path: Path) -> None:
    with pytest.raises(
        TaskError,
        match=r"its words have the letter 'A', which the tokenizer does not have; .* "
        r"abcdefgh",
    ):
        built["ctc"].targets([Speech(speech[0].path, "A BAD CAB")])
    long = Speech(_write(tmp_path / "long.wav", np.zeros(2 * RATE, dtype=np.int16)), "abc")
    with pytest.raises(
        TaskError,
        match=r"long\.wav is 2\.0 s long, but recordings are read up to 1 s only: "
        r"increase seconds",
    ):
        built["ctc"].targets([long])


def test_what_gives_no_steps(built: dict[str, Task], speech: list[Speech]) -> None:
    with pytest.raises(TaskError, match=r"expected \[batch, steps, tokens\]"):
        built["ctc"].predict(lambda batch: {"logits": torch.zeros(2, 3)}, speech)


def test_extractors_and_lengths_that_do_not_fit(models: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="SeamlessM4TFeatureExtractor is not supported"):
        Recordings(transformers.SeamlessM4TFeatureExtractor(), 1)
    assert Recordings(transformers.WhisperFeatureExtractor(), None).seconds == 30
    assert Recordings(transformers.Wav2Vec2FeatureExtractor(), None).seconds == 10
    model = load_model(models["wav2vec2"], "audio-classification")
    with pytest.raises(TaskError, match=r"accepts input_values, .* WhisperFeatureExtractor returns input_features"):
        build_task("audio-classification", model, transformers.WhisperFeatureExtractor(), seconds=1)
    with pytest.raises(TaskError, match=r"does not accept recordings of 0\.001 s .*: set another number of seconds"):
        build_task("audio-classification", model, transformers.Wav2Vec2FeatureExtractor(), seconds=0.001)
    transformers.Wav2Vec2Config(architectures=["Wav2Vec2ForCTC"]).save_pretrained(tmp_path)
    with pytest.raises(TaskError, match="cannot load the feature extractor"):
        load_processor(str(tmp_path), "automatic-speech-recognition")


def test_the_word_error_rate_is_that_of_jiwer(built: dict[str, Task], speech: list[Speech]) -> None:
    jiwer = pytest.importorskip("jiwer", reason="compares with jiwer where it is installed")
    task = built["ctc"]
    pick = np.random.default_rng(0)
    words = ["a", "bad", "cab", "dad", "fed", "bed"]
    for _ in range(20):
        examples = [Speech(example.path, " ".join(pick.choice(words, 4))) for example in speech]
        said = [" ".join(pick.choice(words, pick.integers(1, 6))) for _ in examples]
        found = task.predict(_says(task, *said), examples)
        assert task.score(found, examples) == pytest.approx(jiwer.wer([example.text for example in examples], said))


@pytest.mark.parametrize(
    ("at", "damage"),
    [
        (22, b"\0\0"),  # no channels
        (32, b"\0\0\0\0"),  # no bits
        (24, b"\0\0\0\0"),  # no rate
        (24, b"\xff\xff\xff\xff"),
        (12, b"nada"),  # no format
        (36, b"nada"),  # no data
        (16, b"\2\0\0\0"),
    ],
)
def test_a_recording_with_a_damaged_header(tmp_path: Path, at: int, damage: bytes) -> None:
    content = bytearray(_write(tmp_path / "one.wav", np.zeros(400, np.int16)).read_bytes())
    content[at : at + len(damage)] = damage
    (tmp_path / "one.wav").write_bytes(content)
    with pytest.raises(TaskError, match=r"one\.wav (cannot be read as a recording|has a rate of)"):
        read_recording(tmp_path / "one.wav")
