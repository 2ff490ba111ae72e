"""Import paths of the release before: they work, and say where their names are now."""

from __future__ import annotations

import subprocess
import sys
import warnings
from importlib import import_module

import pytest

from quantizer.common.old_paths import MOVED


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_an_old_path_warns_and_gives_the_same_names(old: str, new: str) -> None:
    if "transformers" in old:
        pytest.importorskip("transformers")
    there = import_module(new)
    for name in [loaded for loaded in sys.modules if loaded in MOVED]:
        del sys.modules[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = import_module(old)
    assert all(getattr(module, name) is getattr(there, name) for name in there.__all__)
    told = [str(warning.message) for warning in caught if warning.category is DeprecationWarning]
    assert told[-1].startswith(f"{old} is now {new};")
    assert len(told) == len(set(told))


def test_the_warning_points_at_the_import() -> None:
    script = "import warnings\nwarnings.simplefilter('error')\nfrom quantizer.export.check import check_file\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert "DeprecationWarning: quantizer.export.check is now quantizer.graph_check" in done.stderr
    quiet = script.replace("'error'", "'ignore'") + "print(check_file.__module__)\n"
    done = subprocess.run([sys.executable, "-c", quiet], capture_output=True, text=True, timeout=300)
    assert done.stdout == "quantizer.graph_check\n"


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("quantizer.engines", "backend_of", "detect_backend"),
        ("quantizer.runs.convert", "Conversion", "ConversionRequest"),
        ("quantizer.sensitivity", "GroupError", "GroupSensitivity"),
    ],
)
def test_an_old_name_warns_and_gives_the_same_object(module: str, old: str, new: str) -> None:
    there = import_module(module)
    with pytest.warns(DeprecationWarning, match=f"{module}.{old} is now {new};"):
        assert getattr(there, old) is getattr(there, new)
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        there.other  # noqa: B018 - the access is what is tested
