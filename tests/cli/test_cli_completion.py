"""``quantizer completion``: the script of each shell, and what bash completes with its own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from quantizer.cli.main import VERBS, main


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "tcsh"])
def test_the_script_of_a_shell_parses(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for expected in (*(verb.name for verb in VERBS), "max-drop", "openvino-avx2"):
        assert expected in script or shell == "tcsh"
    if (path := shutil.which(shell)) is not None:
        subprocess.run([path, "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["co"], ["compare", "completion", "convert"]),
        (["convert", "--m"], ["--max-drop", "--model"]),
        (["show", "--m"], []),
        (["run", "a.yaml", "fallback.num=2", "--fo"], ["--force"]),
        (["convert", "--backend", "open"], ["openvino", "openvino-avx2"]),
        (["check", "m.onnx", "--target", "tensorrt-"], ["tensorrt-rtx"]),
        (["run", "conf"], ["configs"]),
        (["convert", "--config", "conf"], ["configs"]),
    ],
    ids=" ".join,
)
def test_bash_completes(
    words: list[str], expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bash = shutil.which("bash") or pytest.skip("bash is not here")
    (tmp_path / "configs").mkdir()
    assert main(["completion", "bash"]) == 0
    asked = f"COMP_WORDS=(quantizer {' '.join(words)})\nCOMP_CWORD={len(words)}\n_shtab_quantizer\n"
    script = f'{capsys.readouterr().out}\n{asked}echo "${{COMPREPLY[@]}}"'
    done = subprocess.run([bash, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert sorted(done.stdout.split()) == expected


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "cmd"]) == 2
    assert "bash" in capsys.readouterr().err
