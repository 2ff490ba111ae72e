"""``quantizer completion``: what bash completes with the script; and how soon the help is there."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from quantizer.cli.main import VERBS, main


@pytest.fixture(scope="module")
def script() -> str:
    done = subprocess.run(
        [sys.executable, "-m", "quantizer", "completion", "bash"], capture_output=True, text=True, check=True
    )
    return done.stdout


def _completed(script: str, *words: str) -> set[str]:
    bash = shutil.which("bash") or pytest.skip("bash is not here")
    quoted = " ".join(f"'{word}'" for word in words)
    ask = f'{script}\nCOMP_WORDS=({quoted})\nCOMP_CWORD={len(words) - 1}\n_quantizer\necho "${{COMPREPLY[@]}}"'
    done = subprocess.run([bash, "-u", "-c", ask], capture_output=True, text=True, check=True)
    assert not done.stderr
    return set(done.stdout.split())


def test_verbs(script: str) -> None:
    assert _completed(script, "quantizer", "") == {*(verb.name for verb in VERBS), "--help", "--version"}
    assert _completed(script, "quantizer", "co") == {"compare", "convert", "completion"}


def test_options_are_those_of_the_verb(script: str) -> None:
    assert _completed(script, "quantizer", "run", "a.yaml", "--") == {
        "--help",
        "--output",
        "--force",
        "--jobs",
        "--launcher",
        "--yes",
    }
    assert "--max-drop" in _completed(script, "quantizer", "convert", "--m")
    assert "--max-drop" not in _completed(script, "quantizer", "show", "--m")


def test_backends(script: str) -> None:
    assert _completed(script, "quantizer", "convert", "--backend", "open") == {"openvino", "openvino-avx2"}
    assert "auto" in _completed(script, "quantizer", "convert", "--backend", "")
    assert _completed(script, "quantizer", "check", "m.onnx", "--target", "tensorrt-") == {"tensorrt-rtx"}


def test_files_are_left_to_the_shell(script: str) -> None:
    assert _completed(script, "quantizer", "run", "conf") == set()
    assert "complete -o default -F _quantizer quantizer" in script


def test_zsh_takes_the_same_script(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    said = capsys.readouterr().out
    assert said.endswith(script)
    assert "bashcompinit" in said.splitlines()[1]


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 2
    assert "bash" in capsys.readouterr().err
