"""Sentences of STS-B, spoken by eSpeak NG: a voice of a machine says little of recognition, and all of what INT8 loses.

The library comes with the package ``espeakng-loader`` (GPL-3.0), which is not imported.
"""

from __future__ import annotations

import csv
import ctypes
from functools import cache
from pathlib import Path

import numpy as np
from common import SHARED, package_folder
from scipy.io import wavfile

__all__ = ["spoken"]

_ROWS = {"calibration": (200, 16), "evaluation": (0, 100)}
"""The first sentence of each part, and their number."""
_WORDS = 8
"""The fewest words of a sentence: of shorter ones even people guess what was said."""
_LANGUAGE, _WORDS_A_MINUTE, _RATE = b"en-us", 120, 1
"""Of the voice: of the tries, those that the float model hears best; the last is the library's number of a speed."""
_RETRIEVAL, _UTF8, _BUFFER_MS = 1, 1, 500


def spoken(folder: Path, part: str) -> Path:
    """A file of ``transcripts`` with sentences of their own, ``calibration`` or ``evaluation``."""
    first, count = _ROWS[part]
    with (SHARED / "data/stsb/stsb-en-dev.csv").open(newline="", encoding="utf-8") as file:
        sentences = list(dict.fromkeys(row[0] for row in csv.reader(file) if row[0].isascii()))
        sentences = [sentence for sentence in sentences if len(sentence.split()) >= _WORDS]
    say = _voice()
    path = folder / f"spoken-{part}.csv"
    (folder / f"spoken-{part}").mkdir(exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "text"])
        for number, sentence in enumerate(sentences[first : first + count]):
            name = f"spoken-{part}/{number}.wav"
            wavfile.write(folder / name, *say(sentence))
            writer.writerow([name, sentence])
    return path


@cache
def _voice():  # type: ignore[no-untyped-def]
    """A function of a sentence that returns the rate, and the samples; the library begins once in a process."""
    folder = package_folder("espeakng_loader")
    library = ctypes.CDLL(str(folder / "libespeak-ng.so"))
    rate = library.espeak_Initialize(_RETRIEVAL, _BUFFER_MS, str(folder).encode(), 0)
    assert rate > 0, rate
    assert library.espeak_SetVoiceByName(_LANGUAGE) == 0
    assert library.espeak_SetParameter(_RATE, _WORDS_A_MINUTE, 0) == 0
    heard: list[np.ndarray] = []
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)

    @kind
    def listen(wave, samples, _):  # type: ignore[no-untyped-def]
        if wave and samples > 0:
            heard.append(np.ctypeslib.as_array(wave, (samples,)).copy())
        return 0

    library.espeak_SetSynthCallback(listen)

    def say(sentence: str) -> tuple[int, np.ndarray]:
        heard.clear()
        text = sentence.encode()
        library.espeak_Synth(text, ctypes.c_size_t(len(text) + 1), 0, 0, 0, _UTF8, None, None)
        library.espeak_Synchronize()
        silence = np.zeros(rate // 2, dtype=np.int16)
        return rate, np.concatenate([silence, *heard, silence])

    say.listener = listen  # type: ignore[attr-defined]
    return say
