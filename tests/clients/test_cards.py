"""The code in the model cards of layouts of graphs alone, run in their folders with the libraries of these tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

for _package in ("transformers", "onnx", "openvino", "onnxruntime", "PIL", "scipy"):
    pytest.importorskip(_package, reason="layouts need enginequant[hf,onnx,openvino,onnxruntime]")

from client_models import BACKENDS, TEXTS, converted, samples

from quantizer import load_converted

pytestmark = pytest.mark.nightly

LAYOUTS = {"openvino": "openvino", "onnxruntime": "onnx"}


def printed(task: str, backend: str, place: Path) -> str:
    """What the code of a card prints, in a copy of the folder of its layout, as after an upload."""
    folder = converted(task, backend) / LAYOUTS[backend]
    card = (folder / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", card, flags=re.MULTILINE | re.DOTALL)
    for path in folder.iterdir():
        (place / path.name).symlink_to(path)
    if "an-image.png" in code:
        (place / "an-image.png").symlink_to(samples(task)[0])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_card_of_an_encoder_decoder_writes_what_our_engines_write(backend: str, tmp_path: Path) -> None:
    served = load_converted(converted("text-to-text", backend))
    inputs = {name: torch.from_numpy(value) for name, value in served.inputs(TEXTS).items()}
    # The model's own config forbids repeated tokens.
    tokens = served.model.generate(**inputs, max_new_tokens=6, no_repeat_ngram_size=0)
    expected = served.processor.batch_decode(tokens, skip_special_tokens=True)
    assert printed("text-to-text", backend, tmp_path) == str(expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_card_of_a_decoder_with_a_cache_continues_as_our_engine_does(backend: str, tmp_path: Path) -> None:
    task = "text-generation-with-past"
    expected = load_converted(converted(task, backend)).generate(TEXTS[0], tokens=6)
    words = [word for word in expected.split() if not word.startswith("[")]
    assert printed(task, backend, tmp_path) == str([" ".join(words)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_card_of_images_runs(backend: str, tmp_path: Path) -> None:
    assert printed("image-classification", backend, tmp_path).startswith("[[")
