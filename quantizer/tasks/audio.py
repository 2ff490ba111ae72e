"""Tasks on recordings: classification, and speech recognition with CTC, scored by the word error rate.

Shapes: N samples of a task, B recordings in a batch, T time steps of the longest recording, V tokens of the vocabulary,
R values of a file in time, C channels.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib import import_module
from math import ceil, gcd
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quantizer.errors import MissingDependencyError, TaskError
from quantizer.tasks.classification import FileClassification, compare_classifiers
from quantizer.tasks.datasets.examples import Audio, Example, Speech
from quantizer.tasks.inputs import Batch, FileInputs, Inputs, Sample
from quantizer.tasks.outputs import first_output, is_token
from quantizer.tasks.task import CountedTask, Predictions, examples_of_kind, tasks
from quantizer.utils.signatures import signature_of
from quantizer.utils.sizes import BATCH, SEQUENCE, Axes, DataSizes


def word_errors(texts: Iterable[str], targets: Iterable[str]) -> npt.NDArray[np.float64]:
    """Return the edit distance in words of each text, and the number of words of its target [N x 2]."""
    rate = import_module("torchmetrics.functional.text").word_error_rate
    counts = []
    for text, target in zip(texts, targets, strict=True):
        count = len(target.split())
        counts.append((round(float(rate(text, target)) * count), count))
    return np.array(counts, dtype=np.float64)


def error_rate(sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return word error rates [...] from sums of ``word_errors`` [... x 2]."""
    return np.asarray(sums[..., 0] / sums[..., 1])


_SECONDS = 10.0
"""The default length of recordings, in seconds."""
_WINDOW_SECONDS = 0.025
"""The window of spectrograms, for which a recording must not be too short."""
_MASK = "attention_mask"
_HIGHEST_RATE = 768_000
# Filters of warnings are global to the process.
_READING = threading.Lock()
_RAW = "Wav2Vec2FeatureExtractor"
"""The feature extractor whose arrays are as long as the recording."""
_EXTRACTORS = (_RAW, "ASTFeatureExtractor", "WhisperFeatureExtractor")


class Recordings:
    """Model inputs from audio files, resampled to one rate; a batch is as long as its longest recording.

    Args:
        extractor: a transformers feature extractor.
        seconds: the length to which recordings are cut; None: that of the extractor, or 10.
        shortest: shorter batches are padded to this number of values. None: all batches have the length ``seconds``, as
            always for spectrograms.

    Raises:
        TaskError: the extractor is of another kind, or the length is shorter than one value in time.
    """

    def __init__(self, extractor: Any, seconds: float | None, shortest: int | None = None) -> None:
        require_extractor(extractor)
        self.extractor = extractor
        self.rate = int(extractor.sampling_rate)
        self.seconds = float(seconds or getattr(extractor, "chunk_length", None) or _SECONDS)
        self.samples = round(self.seconds * self.rate)
        if self.samples < 1:
            raise TaskError(f"seconds={seconds}, expected at least one sample at {self.rate} Hz")
        self.shortest = self.samples
        if shortest is not None and type(extractor).__name__ == _RAW:
            self.shortest = min(shortest, self.samples)

    def arrays(self, paths: Sequence[Path]) -> dict[str, npt.NDArray[Any]]:
        """Return the extractor's arrays for files, by name, each cut or padded at its end.

        Raises:
            TaskError: a file cannot be read as a recording.
        """
        return self.extracted([self.wave(path)[: self.samples] for path in paths])

    def allowed(self, length: int) -> int:
        """Return the nearest length in values that a batch may have."""
        return min(max(length, self.shortest), self.samples)

    def extracted(
        self, waves: Sequence[npt.NDArray[np.float32]], length: int | None = None
    ) -> dict[str, npt.NDArray[Any]]:
        """Return the extractor's arrays for waves, by name, padded to ``length`` or to the longest wave.

        A mask is always requested: without it the extractor normalizes the recording together with its padding.
        """
        length = self.allowed(max(map(len, waves))) if length is None else length
        if type(self.extractor).__name__ != _RAW:
            window = ceil(_WINDOW_SECONDS * self.rate)
            waves = [np.pad(wave, (0, max(0, window - len(wave)))) for wave in waves]
        fill = {"padding": "max_length", "max_length": length, "return_attention_mask": True}
        arrays = dict(self.extractor(list(waves), sampling_rate=self.rate, return_tensors="np", **fill))
        # Models whose extractor returns no masks were trained on padded recordings without.
        keeps_mask = getattr(self.extractor, "return_attention_mask", False)
        return {name: value for name, value in arrays.items() if name != _MASK or keeps_mask}

    def wave(self, path: Path) -> npt.NDArray[np.float32]:
        """Return a recording at the extractor's rate, its channels averaged, from -1 to 1.

        Raises:
            TaskError: the file cannot be read as a recording.
        """
        rate, wave = read_recording(path)
        if rate != self.rate:
            common = gcd(rate, self.rate)
            wave = _scipy("scipy.signal").resample_poly(wave, self.rate // common, rate // common)
        return np.asarray(wave, dtype=np.float32)


class AudioInputs(FileInputs):
    """The batches of a model of recordings; the same for the float model, a proxy and an engine.

    Args:
        model: run on recordings of zeros, to check that it accepts the extractor's arrays, and to find the shortest
            recording that it accepts; no reference is kept.
        extractor: a transformers feature extractor.
        seconds: the length to which recordings are cut; None: that of the extractor, or 10.
        min_length: shorter batches are padded to this number of values. None: all batches have the length ``seconds``.

    Attributes:
        names: the names of the inputs.
        recordings: reads the files.
    """

    def __init__(
        self, model: torch.nn.Module, extractor: Any, *, seconds: float | None, min_length: int | None = None
    ) -> None:
        self.recordings = Recordings(extractor, seconds, min_length)
        zeros = self.recordings.extracted([np.zeros(self.recordings.samples, dtype=np.float32)])
        accepted = signature_of(model.forward).parameters
        self.names = tuple(name for name in extractor.model_input_names if name in zeros)
        if not set(self.names) <= set(accepted):
            raise TaskError(
                f"{type(model).__name__} accepts {', '.join(accepted)}, but {type(extractor).__name__} returns "
                f"{', '.join(self.names)}: expected a model of recordings with its own preprocessor_config.json"
            )
        batch = self._tensors(zeros)
        self._shape = tuple(batch[self.names[0]].shape[1:])
        try:
            _run(model, batch)
        except _REFUSALS as error:
            problem = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise TaskError(
                f"{type(model).__name__} does not accept recordings of {self.recordings.seconds:g} s with the shape "
                f"{list(self._shape)} from {type(extractor).__name__} ({problem}): set another number of seconds, or "
                "correct preprocessor_config.json"
            ) from error
        self._lengths: dict[Path, int] = {}
        self._in_data: DataSizes | None = None
        if self.recordings.shortest < self.recordings.samples:
            self._open_lengths(model)
        self._sizes: DataSizes | None = self._in_data

    def _open_lengths(self, model: torch.nn.Module) -> None:
        """Find the shortest recording that the model accepts, and open the axis of lengths."""
        recordings = self.recordings

        def accepts(length: int) -> bool:
            try:
                _run(model, self._tensors(recordings.extracted([np.zeros(length, dtype=np.float32)], length)))
            except _REFUSALS:
                return False
            return True

        recordings.shortest = max(recordings.shortest, _least(accepts, recordings.samples))
        if recordings.shortest < recordings.samples:
            axes = {name: {0: BATCH, 1: SEQUENCE} for name in self.names}
            # A model that fixes the length gets the longest, to which others are padded.
            self._in_data = DataSizes(axes, {SEQUENCE: (recordings.samples, recordings.shortest)})

    @property
    def in_data(self) -> DataSizes | None:
        """The axes of batches and lengths; None if the extractor or the model accepts only one length."""
        return self._in_data

    @property
    def sizes(self) -> DataSizes | None:
        """``in_data`` without the axis of lengths if the exported model fixes it."""
        return self._sizes

    def keep_open(self, axes: Axes) -> None:
        """Keep only these axes dynamic; recordings are padded to ``seconds`` if the model fixes their length."""
        if self._in_data is not None:
            self._sizes = self._in_data.only(axes)
            samples, shortest = self._in_data.seen[SEQUENCE]
            self.recordings.shortest = shortest if self._sizes.is_open(SEQUENCE) else samples

    def sizes_of(self, paths: Sequence[Path]) -> DataSizes | None:
        """Return the dynamic axes, and the usual, smallest and largest length; usual is the median of these files."""
        sizes = self.sizes
        if sizes is None or not sizes.is_open(SEQUENCE) or not paths:
            return sizes
        usual = self.recordings.allowed(round(median(map(self._length, paths))))
        return replace(sizes, seen={SEQUENCE: (usual, self.recordings.shortest, self.recordings.samples)})

    def order(self, paths: Sequence[Path]) -> list[int]:
        """Return the indices of files by length, so that recordings of similar length share a batch."""
        if self.recordings.shortest == self.recordings.samples:
            return super().order(paths)
        return sorted(range(len(paths)), key=lambda at: (self._length(paths[at]), at))

    def batch(self, paths: Sequence[Path]) -> Batch:
        """Return one batch, read from files."""
        return self._tensors(self.recordings.arrays(paths))

    def check(self, paths: Sequence[Path]) -> None:
        """Raise ``TaskError`` if a file cannot be read as a recording."""
        for path in paths:
            read_recording(path)

    def filled(self, paths: Sequence[Path], batch_size: int, sequence: int | None) -> Batch:
        """Return a batch of full recordings, as long as ``sequence`` and the shortest file; without files, noise.

        A short recording is continued by its mirror image, which has no jumps. With a mask, every second one is padded
        instead. ``sequence`` None is the longest length.
        """
        if not paths or self.recordings.shortest == self.recordings.samples:
            return super().filled(paths, batch_size, sequence)
        length = max(self._allowed(sequence), min(map(self._length, paths)))
        waves = [self.recordings.wave(paths[place % len(paths)])[:length] for place in range(batch_size)]
        # Without a mask, padding changes the outputs, and batches of similar length have little of it.
        full = slice(None, None, 2 if _MASK in self.names else 1)
        waves[full] = [np.pad(wave, (0, length - len(wave)), mode="symmetric") for wave in waves[full]]
        return self._tensors(self.recordings.extracted(waves, length))

    def random(self, batch_size: int, sequence: int | None, seed: int = 0) -> Batch:
        """Return normal noise without padding; spectrograms have one length, so ``sequence`` has no effect."""
        shape = (self._allowed(sequence),) if len(self._shape) == 1 else self._shape
        noise = torch.randn(batch_size, *shape, generator=torch.Generator().manual_seed(seed))
        arrays = {self.names[0]: noise}
        return {name: arrays.get(name, torch.ones(batch_size, shape[0], dtype=torch.int64)) for name in self.names}

    def _allowed(self, sequence: int | None) -> int:
        return self.recordings.samples if sequence is None else self.recordings.allowed(sequence)

    def _length(self, path: Path) -> int:
        """Return the number of values of a recording at the extractor's rate, at most ``seconds``."""
        if path not in self._lengths:
            rate, wave = read_recording(path)
            self._lengths[path] = min(ceil(len(wave) * self.recordings.rate / rate), self.recordings.samples)
        return self._lengths[path]

    def _tensors(self, arrays: dict[str, npt.NDArray[Any]]) -> Batch:
        tensors = {name: torch.from_numpy(arrays[name]) for name in self.names}
        return {name: value.float() if value.is_floating_point() else value.long() for name, value in tensors.items()}


_REFUSALS = (RuntimeError, ValueError, IndexError)
"""Errors of a model for recordings of a wrong length."""


def _run(model: torch.nn.Module, batch: Batch) -> None:
    with torch.no_grad():
        model(**batch)


def _least(accepts: Callable[[int], bool], longest: int) -> int:
    """Return the smallest accepted length, if all lengths from it to ``longest`` are accepted."""
    below, least = 0, 1
    while least < longest and not accepts(least):
        below, least = least, 2 * least
    least = min(least, longest)
    while below + 1 < least:
        middle = (below + least) // 2
        below, least = (below, middle) if accepts(middle) else (middle, least)
    return least


def require_extractor(extractor: Any) -> None:
    """Raise ``TaskError`` unless a feature extractor is known."""
    if type(extractor).__name__ not in _EXTRACTORS:
        raise TaskError(
            f"{type(extractor).__name__} is not supported; expected one of "
            f"{', '.join(_EXTRACTORS)}: load such a model in Python, and pass it with its batches to quantize_model"
        )


def read_recording(path: Path) -> tuple[int, npt.NDArray[np.float32]]:
    """Return the rate of a WAV file in Hz, and its values [R] from -1 to 1, averaged over channels."""
    wavfile = _scipy("scipy.io.wavfile")
    try:
        with _READING, warnings.catch_warnings():
            # For a truncated file SciPy only warns; unknown chunks of other programs are harmless.
            warnings.simplefilter("error", wavfile.WavFileWarning)
            warnings.filterwarnings("ignore", "Chunk .non-data. not understood", wavfile.WavFileWarning)
            rate, data = wavfile.read(path)
    except Exception as error:
        # SciPy trusts the header: a damaged one divides by zero, or allocates too much memory.
        known = isinstance(error, OSError | ValueError | wavfile.WavFileWarning) and str(error).strip()
        problem = str(error).strip().splitlines()[0] if known else "its header is damaged"
        raise TaskError(
            f"{path} cannot be read as a recording ({problem}): expected a WAV file; convert others with "
            f"ffmpeg -i FILE {path.stem}.wav"
        ) from error
    if not 1 <= rate <= _HIGHEST_RATE:
        raise TaskError(f"{path} has a rate of {rate} Hz, expected 1 to {_HIGHEST_RATE} Hz: repair the file")
    wave_RC = _from_minus_one_to_one(np.atleast_2d(data.T).T)
    if not wave_RC.size or not np.isfinite(wave_RC).all():
        raise TaskError(
            f"{path} holds {'values that are not finite' if wave_RC.size else 'no values'}: repair the file"
        )
    return int(rate), wave_RC.mean(axis=1, dtype=np.float32)


def require_whole(path: Path, seconds: float) -> None:
    """Raise ``TaskError`` if a recording is longer than ``seconds``."""
    rate, wave = read_recording(path)
    if len(wave) > seconds * rate:
        raise TaskError(
            f"{path} is {len(wave) / rate:.1f} s long, but recordings are read up to {seconds:g} s only: "
            "increase seconds, or cut the file"
        )


def _from_minus_one_to_one(data: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return values as float32 from -1 to 1; unsigned bytes have their zero at 128."""
    if data.dtype.kind == "f":
        return data.astype(np.float32)
    middle = 128 if data.dtype == np.uint8 else 0
    span = 2.0 ** (8 * data.dtype.itemsize - 1)
    return np.asarray((data.astype(np.float64) - middle) / span, dtype=np.float32)


def _scipy(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise MissingDependencyError("scipy", "hf") from error


@tasks.add("audio-classification")
class AudioClassification(FileClassification):
    """Recordings, cut to ``seconds``, to logits [N x C], to labels [N] by the largest logit, scored by accuracy."""

    name = "audio-classification"
    reads = "audio"
    auto_class = "AutoModelForAudioClassification"
    pipeline_class = "AudioClassificationPipeline"
    packages = ("scipy",)
    kind = Audio

    def file_inputs(self, model: torch.nn.Module, processor: Any, min_length: int) -> Inputs:
        return AudioInputs(model, processor, seconds=self.seconds, min_length=min_length)


@tasks.add("automatic-speech-recognition")
class SpeechRecognition(CountedTask):
    """Recordings to logits [N x T x V], to words, scored by the word error rate (WER).

    The token of a time step is that of its largest logit; the tokenizer joins repeated tokens and drops blanks (CTC).
    """

    name = "automatic-speech-recognition"
    reads = "audio"
    auto_class = "AutoModelForCTC"
    pipeline_class = "AutomaticSpeechRecognitionPipeline"
    output_name = "logits"
    metric_name = "wer"
    higher_is_better = False
    packages = ("scipy", "torchmetrics")

    def make_inputs(self, model: torch.nn.Module, processor: Any, max_length: int, min_length: int) -> Inputs:
        self._tokenizer = processor.tokenizer
        self._audio = AudioInputs(model, processor.feature_extractor, seconds=self.seconds, min_length=min_length)
        return self._audio

    def samples(self, examples: Sequence[Example]) -> list[Sample]:
        return [example.path for example in examples_of_kind(examples, Speech, self.name)]

    def targets(self, examples: Sequence[Example]) -> npt.NDArray[Any]:
        """Return the words of each sample [N], as one text."""
        letters = self._letters()
        longest = self._audio.recordings.seconds
        texts = np.empty(len(examples), dtype=object)
        for at, example in enumerate(examples_of_kind(examples, Speech, self.name)):
            unknown = sorted({*filter(str.isalpha, example.text)} - letters)
            if unknown:
                known = "".join(sorted(filter(str.isalpha, letters)))
                raise TaskError(
                    f"{example.path}: its words have the letter {unknown[0]!r}, which the tokenizer does not have; "
                    f"expected words of the letters {known[:60]}"
                )
            require_whole(example.path, longest)
            texts[at] = example.text
        return texts

    def collect(self, result: object, batch: Batch) -> Sequence[torch.Tensor]:
        """Return the logits of each recording without padding, B tensors [T x V]."""
        logits = first_output(result, self.output_name)
        if logits.dim() != 3:
            raise TaskError(f"the model's output has the shape {tuple(logits.shape)}, expected [batch, steps, tokens]")
        waves = next(iter(batch.values()))
        return [example[: _own_steps(wave, len(example))] for example, wave in zip(logits, waves, strict=True)]

    def decide(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """Return the token of each time step [N x T], padded with -1."""
        return np.where(is_token(outputs), np.nan_to_num(outputs).argmax(axis=-1), -1)

    def counts(self, predictions: Predictions, examples: Sequence[Example]) -> npt.NDArray[np.float64]:
        """Return the word errors of each sample, and the number of its target words [N x 2]."""
        texts = [self._tokenizer.decode(tokens[tokens >= 0].tolist()) for tokens in predictions.decisions]
        return word_errors(texts, self.targets(examples))

    def ratio(self, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the word error rate: substituted, missing and extra words per target word."""
        return error_rate(sums)

    def paired(self, float_predictions: Predictions, other: Predictions) -> dict[str, float]:
        """Return the figures of a classifier, over all time steps."""
        own = is_token(float_predictions.outputs)
        return compare_classifiers(
            *(Predictions(model.outputs[own], model.decisions[own]) for model in (float_predictions, other))
        )

    def _letters(self) -> set[str]:
        """Return all characters that the tokenizer can write."""
        lowers = getattr(self._tokenizer, "do_lower_case", False)
        return {*"".join(token.lower() if lowers else token for token in self._tokenizer.get_vocab())}


def _own_steps(wave: torch.Tensor, steps: int) -> int:
    """Return the number of a recording's time steps before its zero padding."""
    used = torch.nonzero(wave)
    return max(1, ceil(steps * (int(used[-1, 0]) + 1) / len(wave))) if len(used) else steps
