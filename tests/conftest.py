"""What all tests share: no model hub, one thread, one random state."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace

# Whatever is collected stays, so a search for garbage finds none: a fifth of the collection. Tests have it again.
gc.disable()

# Before transformers is imported anywhere: it reads these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
# Before torch is imported: each export has shapes of its own, so that looking each up takes an eighth of an export.
os.environ["TORCH_FAKE_TENSOR_DISPATCH_CACHE"] = "0"

import pytest
import torch
from helpers import BYTE_PRODUCTS_ARE_EXACT
from hypothesis import HealthCheck, settings
from quick_start import collect_seldom, few_steps, quick_interpreter, tables_of_exports
from translated import translate_once
from trials_here import trials_here

from quantizer.plan.targets.base import profiles

if not torch.cuda.is_available():
    # Triton's kernels run on the CPU. Triton reads it when it is imported, which torch may do.
    os.environ["TRITON_INTERPRET"] = "1"
    # Each seed would be noted with its stack, for devices that may come: half a millisecond, twice in each test.
    for devices in (torch.cuda, torch.xpu, torch.mtia):
        devices.manual_seed_all = lambda seed: None

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would the programs that they start and
# interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples at each run, so that a failure belongs to a change; HYPOTHESIS_PROFILE=default searches on. How long
# an example takes depends on what else the machine does.
settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


_LONGEST = (
    *("test_docs.py", "test_calls.py", "test_gpu_engine.py", "test_run_auto.py", "test_operators.py", "test_models.py"),
    *("test_convert.py", "test_product.py", "test_gpu_lowering.py", "test_torch_engine.py", "test_reconstruction.py"),
    *("test_encoder_decoder.py", "test_zoo_senses.py", "test_run_search.py", "test_proxy_behaviour.py"),
    *("test_going_on.py", "test_run.py", "test_for_backend.py", "test_real_model.py", "test_zoo_text.py"),
    *("test_goldens.py", "test_add_stage.py", "test_train.py", "test_convert_audio.py", "test_property_models.py"),
    *("test_proxy_rules.py", "test_output_search.py", "test_every_algorithm.py", "test_convert_images.py"),
    *("test_proxy_fast_paths.py", "test_proxy_operations.py"),
)
"""Files that take ten seconds or more, the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: a process that begins one of them last keeps all others waiting."""
    places = {name: place for place, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.fixture(autouse=True)
def _one_random_state() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
    """What several tests share has the same random numbers, whichever of them comes first, and whatever came before."""
    if fixturedef.scope != "function":
        torch.manual_seed(0)
    return (yield)


def pytest_collection_finish() -> None:
    """Begin with what all tests share: models and libraries are there."""
    if "triton.runtime.interpreter" in sys.modules:
        quick_interpreter()
    collect_seldom()
    gc.enable()


@pytest.fixture(scope="module")
def translated_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Models are translated for ONNX once, whichever process needs one first: for tests that are not about exports."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "translated"
    folder.mkdir(exist_ok=True)
    with translate_once(folder):
        yield


@pytest.fixture(scope="module", autouse=True)
def _whole_ways_share_translations(request: pytest.FixtureRequest) -> None:
    """Files of these folders export the same small models again and again, on the way to something else."""
    if request.path.parent.name in ("interop", "latency", "progress", "runs", "sensitivity", "targets", "tasks"):
        request.getfixturevalue("translated_once")


@pytest.fixture(scope="module", autouse=True)
def _files_are_not_synced(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test outlives a loss of power: only ``tests/files`` waits until the disk has what was written."""
    if request.path.parent.name == "files":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quantizer.utils.files.writable._sync", lambda _: None)
        yield


@pytest.fixture(scope="session")
def _tables_of_exports() -> Mapping[str, object]:
    return tables_of_exports()


@pytest.fixture(scope="module", autouse=True)
def _exports_are_quick(request: pytest.FixtureRequest, _tables_of_exports: Mapping[str, object]) -> Iterator[None]:
    """Exports do not find where in the source each node comes from, and build no table that another export built.

    Deep in a test the first takes a quarter of an export, and only messages of exports say it.
    """
    if request.path.name in ("test_export_errors.py", "test_export_by_values.py", "test_exporter_cache.py"):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.fx.config.do_not_emit_stack_traces", True)
        for name, kept in _tables_of_exports.items():
            patch.setattr(name, kept)
        yield


@pytest.fixture(scope="module", autouse=True)
def _trials_are_made_here(request: pytest.FixtureRequest) -> Iterator[None]:
    """Engines are tried in this process, but for those tests that are about the other one."""
    if request.path.parent.name == "engines":
        yield
        return
    with trials_here():
        yield


@pytest.fixture(scope="module", autouse=True)
def _no_group_falls_back_by_chance(request: pytest.FixtureRequest) -> Iterator[None]:
    """In nets as small as these, the CPU and its other work decide which groups are slower in integers than in float.

    Runs measure their groups, but keep none in float for its latency. ``tests/latency`` is about those that are kept.
    """
    if request.path.parent.name == "latency":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quantizer.pipeline.time_groups.is_faster", lambda *_: False)
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


@pytest.fixture(scope="module")
def learned_in_few_steps() -> Iterator[None]:
    """Reconstruction takes a quarter of its steps: for tests that are not about what it learns."""
    with few_steps():
        yield
