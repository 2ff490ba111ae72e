"""What all tests share: no model hub, one thread, one random state."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any

# Before transformers is imported anywhere: it reads these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import pytest
import torch
from helpers import BYTE_PRODUCTS_ARE_EXACT
from hypothesis import settings
from translated import translate_once

from quantizer.targets.profiles import profiles

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would the programs that they start and
# interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples at each run, so that a failure belongs to a change; HYPOTHESIS_PROFILE=default searches on.
settings.register_profile("same", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


_LONGEST = (
    "test_docs.py",
    "test_examples.py",
    "test_real_model.py",
    "test_goldens.py",
    "test_run.py",
    "test_torture.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: a process that begins one of them last keeps all others waiting."""
    items.sort(key=lambda item: item.path.name not in _LONGEST)


@pytest.fixture(autouse=True)
def _one_random_state() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def _torch_reads_its_translations_once() -> Iterator[None]:
    """Each export reads 500 functions of onnxscript from their source, which is half of the time of a small one."""
    if find_spec("onnxscript") is None:
        yield
        return
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    read = cache(ONNXRegistry.from_torchlib)

    def from_torchlib(*opset: int, **named: int) -> Any:
        registry = copy.copy(read(*opset, **named))
        registry.functions = {target: list(found) for target, found in registry.functions.items()}
        return registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(from_torchlib))
        yield


@pytest.fixture(scope="module")
def translated_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Models are translated for ONNX once, whichever process needs one first: for tests that are not about exports."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "translated"
    folder.mkdir(exist_ok=True)
    with translate_once(folder):
        yield


@pytest.fixture(scope="module")
def exact_byte_products() -> Iterator[None]:
    """Engines on the CPU compute what their files say: weights of INT8 have 7 bits where the CPU has no VNNI.

    Two products of bytes then fit into the 16 bits in which they are added; those of two activations may still not.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not BYTE_PRODUCTS_ARE_EXACT:
            for name in profiles.names():
                patch.setitem(profiles._entries, name, replace(profiles[name], weight_qmax=64))
        yield
