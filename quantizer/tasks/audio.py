"""Tasks on recordings: classification and speech recognition, with the word error rate.

Shapes: N rows.

Shapes: B recordings in a batch, N samples of each, in time; R samples of a file, C channels.

Shapes: N rows, B recordings in a batch, T steps in time of the longest row, V tokens of the vocabulary.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Iterable, Sequence
from importlib import import_module
from math import ceil, gcd
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quantizer.errors import MissingDependencyError, TaskError
from quantizer.tasks.classification import FileClassification, compare_classifiers
from quantizer.tasks.datasets.rows import Audio, Row, Speech
from quantizer.tasks.inputs import EXAMPLE_ROWS, Batch, Inputs, Sample
from quantizer.tasks.outputs import first_output, is_token
from quantizer.tasks.task import CountedTask, Predictions, rows_of_kind, tasks


def word_errors(said: Iterable[str], right: Iterable[str]) -> npt.NDArray[np.float64]:
    """Return the words of each row that are wrong, missing or too many, and the words that are right for it [N x 2]."""
    rate = import_module("torchmetrics.functional.text").word_error_rate
    found = []
    for text, words in zip(said, right, strict=True):
        count = len(words.split())
        found.append((round(float(rate(text, words)) * count), count))
    return np.array(found, dtype=np.float64)


def error_rate(sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the rates [...] of sums [... x 2] of these counts."""
    return np.asarray(sums[..., 0] / sums[..., 1])


_SECONDS = 10.0
"""The length of recordings, in seconds, where neither the request nor the feature extractor says one."""
_MASK = "attention_mask"
_HIGHEST_RATE = 768_000
# What a warning does is a setting of the process.
_READING = threading.Lock()
_EXTRACTORS = ("Wav2Vec2FeatureExtractor", "ASTFeatureExtractor", "WhisperFeatureExtractor")
"""Feature extractors whose lengths are in samples, or are their own."""


class Recordings:
    """The arrays of files, read at one rate, cut or filled to one length, and made by a feature extractor.

    Args:
        extractor: a transformers feature extractor.
        seconds: the length of each recording; None: that of the extractor, or 10.

    Raises:
        TaskError: the extractor is of another kind, or the length is shorter than a thousandth of a second.
    """

    def __init__(self, extractor: Any, seconds: float | None) -> None:
        require_extractor(extractor)
        self.extractor = extractor
        self.rate = int(extractor.sampling_rate)
        self.seconds = float(seconds or getattr(extractor, "chunk_length", None) or _SECONDS)
        self.samples = round(self.seconds * self.rate)
        if self.samples < 1:
            raise TaskError(f"seconds={seconds}, expected at least one sample at {self.rate} Hz")

    def arrays(self, paths: Sequence[Path]) -> dict[str, npt.NDArray[Any]]:
        """Return what the extractor makes of files, by name; what is longer is cut, what is shorter filled at its end.

        Raises:
            TaskError: a file cannot be read as a recording.
        """
        return self.extracted([self.wave(path)[: self.samples] for path in paths])

    def extracted(self, waves: Sequence[npt.NDArray[np.float32]]) -> dict[str, npt.NDArray[Any]]:
        """Return what the extractor makes of waves of at most N samples, by name.

        A mask is asked for in any case: without it the extractor takes the filling for a part of the recording, and
        scales that by it.
        """
        fill = {"padding": "max_length", "max_length": self.samples, "return_attention_mask": True}
        made = dict(self.extractor(list(waves), sampling_rate=self.rate, return_tensors="np", **fill))
        # Models whose extractor gives no masks have learned to read filled recordings without.
        keeps = getattr(self.extractor, "return_attention_mask", False)
        return {name: value for name, value in made.items() if name != _MASK or keeps}

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


class AudioInputs:
    """The batches of a model of recordings; the same for the float model, a proxy and an engine.

    Args:
        model: run once, on a recording of zeros, to check that it accepts what the extractor makes; no reference is
            kept.
        extractor: a transformers feature extractor.
        seconds: the length of each recording; None: that of the extractor, or 10.

    Attributes:
        names: the names of the inputs.
    """

    def __init__(self, model: torch.nn.Module, extractor: Any, *, seconds: float | None) -> None:
        self.recordings = Recordings(extractor, seconds)
        zeros = self.recordings.extracted([np.zeros(self.recordings.samples, dtype=np.float32)])
        accepted = inspect.signature(model.forward).parameters
        self.names: tuple[str, ...] = tuple(name for name in extractor.model_input_names if name in zeros)
        if not set(self.names) <= set(accepted):
            raise TaskError(
                f"{type(model).__name__} takes {', '.join(accepted)}, and {type(extractor).__name__} makes "
                f"{', '.join(self.names)}: expected a model of recordings with its own preprocessor_config.json"
            )
        batch = self._tensors(zeros)
        self._shape = tuple(batch[self.names[0]].shape[1:])
        try:
            with torch.no_grad():
                model(**batch)
        except (RuntimeError, ValueError) as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise TaskError(
                f"{type(model).__name__} does not take recordings of {self.recordings.seconds:g} s as "
                f"{type(extractor).__name__} makes them, {list(self._shape)} ({said}): set another number of seconds, "
                "or mend preprocessor_config.json"
            ) from error

    def order(self, paths: Sequence[Path]) -> list[int]:
        """Return the indices of recordings as they are: all are filled to one length."""
        return list(range(len(paths)))

    def batch(self, paths: Sequence[Path]) -> Batch:
        """Return one batch, read from files."""
        return self._tensors(self.recordings.arrays(paths))

    def check(self, paths: Sequence[Path]) -> None:
        """Raise ``TaskError`` if a file cannot be read as a recording."""
        for path in paths:
            read_recording(path)

    def filled(self, paths: Sequence[Path], rows: int, sequence: int | None) -> Batch:
        """Return a batch of exactly ``rows`` recordings, repeated if there are fewer; without any it is random."""
        return self.batch([paths[row % len(paths)] for row in range(rows)]) if paths else self.random(rows, sequence)

    def random(self, rows: int, sequence: int | None, seed: int = 0) -> Batch:
        """Return normal noise without filling; recordings have no tokens, so ``sequence`` has no effect."""
        noise = torch.randn(rows, *self._shape, generator=torch.Generator().manual_seed(seed))
        given = {self.names[0]: noise}
        return {name: given.get(name, torch.ones(rows, self._shape[0], dtype=torch.int64)) for name in self.names}

    def example(self, paths: Sequence[Path]) -> Batch:
        """Return a batch of two recordings; see ``Task.example``."""
        return self.filled(paths[:EXAMPLE_ROWS], EXAMPLE_ROWS, None)

    def _tensors(self, arrays: dict[str, npt.NDArray[Any]]) -> Batch:
        made = {name: torch.from_numpy(arrays[name]) for name in self.names}
        return {name: value.float() if value.is_floating_point() else value.long() for name, value in made.items()}


def require_extractor(extractor: Any) -> None:
    """Raise ``TaskError`` if a feature extractor makes no recordings of one length, as far as is known here."""
    if type(extractor).__name__ not in _EXTRACTORS:
        raise TaskError(
            f"{type(extractor).__name__} is not known to make recordings of one length; expected one of "
            f"{', '.join(_EXTRACTORS)}: load such a model in Python and give its batches to quantize_model"
        )


def read_recording(path: Path) -> tuple[int, npt.NDArray[np.float32]]:
    """Return the rate of a WAV file in Hz, and its samples [R] from -1 to 1, the mean of its channels."""
    wavfile = _scipy("scipy.io.wavfile")
    try:
        with _READING, warnings.catch_warnings():
            # A file that ends too early is a warning of SciPy only; chunks of other programs are none of an error.
            warnings.simplefilter("error", wavfile.WavFileWarning)
            warnings.filterwarnings("ignore", "Chunk .non-data. not understood", wavfile.WavFileWarning)
            rate, data = wavfile.read(path)
    except Exception as error:
        # SciPy relies on what a header says: one that is damaged divides by zero, or asks for too much memory.
        known = isinstance(error, OSError | ValueError | wavfile.WavFileWarning) and str(error).strip()
        said = str(error).strip().splitlines()[0] if known else "its header is damaged"
        raise TaskError(
            f"{path} cannot be read as a recording ({said}): expected a WAV file; ffmpeg -i FILE {path.stem}.wav makes "
            "one of most others"
        ) from error
    if not 1 <= rate <= _HIGHEST_RATE:
        raise TaskError(f"{path} has a rate of {rate} Hz, expected 1 to {_HIGHEST_RATE}: mend the file")
    wave_RC = _from_minus_one_to_one(np.atleast_2d(data.T).T)
    if not wave_RC.size or not np.isfinite(wave_RC).all():
        raise TaskError(f"{path} holds {'values that are not finite' if wave_RC.size else 'no samples'}: mend the file")
    return int(rate), wave_RC.mean(axis=1, dtype=np.float32)


def require_whole(path: Path, seconds: float) -> None:
    """Raise ``TaskError`` if a recording is longer than what is read of it."""
    rate, wave = read_recording(path)
    if len(wave) > seconds * rate:
        raise TaskError(
            f"{path} is {len(wave) / rate:.1f} s long, and recordings are read up to {seconds:g} s, so its last words "
            "would be missed: set more seconds, or cut it"
        )


def _from_minus_one_to_one(data: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return samples as float32: whole numbers are divided by their range, and bytes have their zero at 128."""
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
    """Recordings to logits [N x C], to labels [N] by the largest logit, scored by accuracy.

    What is longer than ``seconds`` is cut at its end.
    """

    name = "audio-classification"
    reads = "audio"
    auto_class = "AutoModelForAudioClassification"
    packages = ("scipy",)
    kind = Audio

    def file_inputs(self, model: torch.nn.Module, processor: Any) -> Inputs:
        return AudioInputs(model, processor, seconds=self.seconds)


@tasks.add("automatic-speech-recognition")
class SpeechRecognition(CountedTask):
    """Recordings to logits of their steps [N x T x V], to words, scored by the word error rate (WER).

    The token of a step is that of its largest logit; the tokenizer joins what is repeated and drops blanks.
    """

    name = "automatic-speech-recognition"
    reads = "audio"
    auto_class = "AutoModelForCTC"
    output_name = "logits"
    metric_name = "wer"
    higher_is_better = False
    packages = ("scipy", "torchmetrics")

    def make_inputs(self, model: torch.nn.Module, processor: Any, max_length: int, min_length: int) -> Inputs:
        self._tokenizer = processor.tokenizer
        self._audio = AudioInputs(model, processor.feature_extractor, seconds=self.seconds)
        return self._audio

    def samples(self, rows: Sequence[Row]) -> list[Sample]:
        return [row.path for row in rows_of_kind(rows, Speech, self.name)]

    def targets(self, rows: Sequence[Row]) -> npt.NDArray[Any]:
        """Return the words of each row [N], as one text."""
        letters = self._letters()
        longest = self._audio.recordings.seconds
        found = np.empty(len(rows), dtype=object)
        for at, row in enumerate(rows_of_kind(rows, Speech, self.name)):
            unknown = sorted({*filter(str.isalpha, row.text)} - letters)
            if unknown:
                shown = "".join(sorted(filter(str.isalpha, letters)))
                raise TaskError(
                    f"{row.path}: its words have the letter {unknown[0]!r}, which the model never writes; expected "
                    f"words in its own letters, {shown[:60]}"
                )
            require_whole(row.path, longest)
            found[at] = row.text
        return found

    def collect(self, result: object, batch: Batch) -> Sequence[torch.Tensor]:
        """Return the logits of each recording's own steps, B tensors [T x V]."""
        logits = first_output(result, self.output_name)
        if logits.dim() != 3:
            raise TaskError(f"the model's output has the shape {tuple(logits.shape)}, expected [batch, steps, tokens]")
        waves = next(iter(batch.values()))
        return [row[: _own_steps(wave, len(row))] for row, wave in zip(logits, waves, strict=True)]

    def decide(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """Return the token of each step [N x T]; -1 after the last of a row."""
        return np.where(is_token(outputs), np.nan_to_num(outputs).argmax(axis=-1), -1)

    def counts(self, predictions: Predictions, rows: Sequence[Row]) -> npt.NDArray[np.float64]:
        """Return the wrong words of each row, and the words that are right for it [N x 2]."""
        said = [self._tokenizer.decode(tokens[tokens >= 0].tolist()) for tokens in predictions.decisions]
        return word_errors(said, self.targets(rows))

    def ratio(self, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the word error rate: words that are wrong, missing or too many, by the words that are right."""
        return error_rate(sums)

    def paired(self, float_predictions: Predictions, other: Predictions) -> dict[str, float]:
        """Return the figures of a classifier, over all steps."""
        own = is_token(float_predictions.outputs)
        return compare_classifiers(
            *(Predictions(one.outputs[own], one.decisions[own]) for one in (float_predictions, other))
        )

    def _letters(self) -> set[str]:
        """Return all characters that the tokenizer can write."""
        lowers = getattr(self._tokenizer, "do_lower_case", False)
        return {*"".join(token.lower() if lowers else token for token in self._tokenizer.get_vocab())}


def _own_steps(wave: torch.Tensor, steps: int) -> int:
    """Return how many of a recording's steps are not of what fills it, which is zero."""
    used = torch.nonzero(wave)
    return max(1, ceil(steps * (int(used[-1, 0]) + 1) / len(wave))) if len(used) else steps
