"""What a notebook shows of an error: the user's own line and the message."""

from __future__ import annotations

import pytest

from quantizer.errors import ConfigError, QuantizerError

CELL = """\
from quantizer import Quantizer

def make(name):
    return Quantizer(backend=name)

make("openvno")
"""


def test_a_notebook_shows_the_users_line_and_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    shell = pytest.importorskip("IPython.core.interactiveshell", reason="install enginequant[notebook]")
    session = shell.InteractiveShell(colors="nocolor")
    session.history_manager.enabled = False
    result = session.run_cell(CELL)
    assert isinstance(result.error_in_exec, ConfigError)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "line 4: return Quantizer(backend=name)"
    assert printed[1] == "ConfigError: 1 problem in the configuration:"
    assert "did you mean 'openvino'?" in printed[2]
    assert len(printed) == 3


def test_an_error_that_was_never_raised_has_its_message() -> None:
    assert QuantizerError("what was wrong")._render_traceback_() == ["QuantizerError: what was wrong"]
