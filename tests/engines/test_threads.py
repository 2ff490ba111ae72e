"""Engines called from several threads: every call has its own result, and threads leave nothing behind."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from threads import in_threads

from quantizer.engines import BuildOptions, Engine, build_engine, load_engine
from quantizer.engines.base import Pool
from quantizer.utils.lazy import once_property

pytest.importorskip("onnx", reason="install enginequant[onnx]")
torch = pytest.importorskip("torch")

BACKENDS = ["openvino", "onnxruntime", "torch", pytest.param("compiled torch", marks=pytest.mark.nightly)]
SHAPES = ((1, 2), (4, 3), (2, 3), (3, 1), (4, 3), (1, 3), (2, 1))
"""The usual one and the smallest batch, which have models of their own in OpenVINO, and others."""


@pytest.fixture(scope="module", params=BACKENDS)
def engine(request: pytest.FixtureRequest, write_qdq: Any, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An engine of each backend."""
    kind, _, name = str(request.param).rpartition(" ")
    pytest.importorskip(name, reason=f"install enginequant[{name}]")
    options = BuildOptions(dynamic={"batch": (1, 4, 8), "sequence": (1, 3, 6)}, compiled=bool(kind) or None)
    if name == "torch":
        from quantizer.engines.torch_engine.compiled import missing_compiler

        if kind and missing_compiler():
            pytest.skip("needs a C++ compiler")
        options = BuildOptions(dynamic=options.dynamic, compiled=bool(kind))
    model = write_qdq(k=16, n=8, tail=("Tanh", "Softmax"))
    path = tmp_path_factory.mktemp("engine") / "model.engine"
    return load_engine(name, build_engine(name, model.path, path, options).path)


@pytest.fixture(scope="module")
def calls(engine: Engine) -> list[tuple[np.ndarray, np.ndarray]]:
    """Inputs of several shapes, and what the engine makes of each when nothing else runs."""
    random = np.random.default_rng(0)
    inputs = [random.standard_normal((*shape, 16)).astype(np.float32) for shape in SHAPES]
    return [(x, engine({"x": x})["y"].copy()) for x in inputs]


def wrong_calls(engine: Engine, calls: Sequence[tuple[np.ndarray, np.ndarray]], threads: int, each: int) -> int:
    """Return how many of the calls, ``each`` in so many threads, gave something else than when nothing else ran."""
    wrong = [0] * threads

    def work(number: int) -> None:
        for call in range(each):
            x, expected = calls[(number + call) % len(calls)]
            wrong[number] += not np.array_equal(engine({"x": x})["y"], expected)

    in_threads(threads, work)
    return sum(wrong)


@pytest.mark.parametrize("threads", [1, 2, 16, 200])
def test_each_call_has_its_own_result(engine: Engine, calls: Any, threads: int) -> None:
    assert wrong_calls(engine, calls, threads, max(6, 600 // threads)) == 0


@pytest.mark.nightly
def test_none_of_100_000_calls_of_200_threads_is_wrong(engine: Engine, calls: Any) -> None:
    assert wrong_calls(engine, calls, threads=200, each=500) == 0


@pytest.mark.parametrize("count", [1, 2, 16])
def test_a_loaded_result_is_called_from_threads(engine: Engine, calls: Any, count: int) -> None:
    from quantizer.pipeline.engine_module import CallForm, EngineModule

    module = EngineModule(engine, CallForm.by_names("Net", engine.input_names, engine.output_names))

    def work(number: int) -> None:
        for call in range(10):
            x, expected = calls[(number + call) % len(calls)]
            np.testing.assert_array_equal(module(torch.from_numpy(x))["y"].numpy(), expected)

    in_threads(count, work)


def test_calls_make_no_request(qdq: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In OpenVINO 2026.4, a request that is made while another one runs ends the process."""
    openvino = pytest.importorskip("openvino", reason="install enginequant[openvino]")
    made: list[object] = []
    make = openvino.CompiledModel.create_infer_request
    monkeypatch.setattr(openvino.CompiledModel, "create_infer_request", lambda model: made.append(model) or make(model))
    engine, infer = load_engine("openvino", qdq.path), openvino.InferRequest.infer
    at_load = len(made)

    def slow(*args: Any, **keywords: Any) -> Any:
        time.sleep(0.01)
        return infer(*args, **keywords)

    monkeypatch.setattr(openvino.InferRequest, "infer", slow)
    in_threads(20, lambda _: engine({"x": qdq.input(2, 3)}))
    assert len(made) == at_load > 0


@pytest.mark.nightly
def test_new_engines_are_called_from_200_threads(qdq: Any) -> None:
    """In a process of its own: before, it ended with SIGSEGV after at most 50 engines."""
    pytest.importorskip("openvino", reason="install enginequant[openvino]")
    code = (
        "import sys; import numpy as np; from pathlib import Path; from threads import in_threads\n"
        "from quantizer.engines import load_engine\n"
        "for _ in range(100):\n"
        "    engine = load_engine('openvino', Path(sys.argv[1]))\n"
        "    in_threads(200, lambda k: [engine({'x': np.zeros((1 + k % 3, 3, 64), np.float32)}) for _ in range(6)])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(qdq.path)], cwd=Path(__file__).parents[1], check=False)
    assert done.returncode == 0


def test_a_pool_makes_calls_wait() -> None:
    pool = Pool([1, 2])
    first, second = pool.take(), pool.take()
    assert {first, second} == {1, 2}
    waiting = threading.Thread(target=lambda: taken.append(pool.take()))
    taken: list[int] = []
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    pool.give_back(second)
    waiting.join()
    assert taken == [second]


def test_threads_keep_the_number_that_torch_computes_on(write_qdq: Any, tmp_path: Path) -> None:
    """A thread that is new to torch takes the number that was set last, which must not be one of an engine."""
    path = build_engine("torch", write_qdq().path, tmp_path / "model.engine", BuildOptions(compiled=False)).path
    engines = [load_engine("torch", path, threads=threads) for threads in (1, 2, 3)]
    x, before, after = np.zeros((2, 3, 64), np.float32), torch.get_num_threads(), []
    torch.set_num_threads(5)
    try:

        def work(number: int) -> None:
            for _ in range(30):
                engines[number % len(engines)]({"x": x})
            after.append(torch.get_num_threads())

        in_threads(12, work)
        in_threads(1, lambda _: after.append(torch.get_num_threads()))
        assert set(after) == {5}
    finally:
        torch.set_num_threads(before)


def test_an_engine_is_loaded_once() -> None:
    made = []

    class Result:
        @once_property
        def engine(self) -> object:
            made.append(threading.current_thread())
            gate.wait(0.05)
            return object()

    gate, result = threading.Event(), Result()
    found: list[object] = []
    in_threads(8, lambda _: found.append(result.engine))
    assert len(made) == len(set(map(id, found))) == 1


def test_texts_are_padded_as_their_own_call_asks(tmp_path: Path) -> None:
    """A fast tokenizer keeps the padding of the last call."""
    transformers = pytest.importorskip("transformers", reason="install enginequant[hf]")
    from quantizer.engines import TensorSpec
    from quantizer.pipeline.load import Converted

    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]))
    tokenizer = transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"))
    config = {"task": "sequence-classification", "dimensions": {"batch": [1, 1, 1], "sequence": [8, 8, 16]}}
    inputs: Any = SimpleNamespace(inputs=(TensorSpec("input_ids", np.dtype(np.int64), (None, None)),))
    converted = Converted(config, inputs, tokenizer)

    def work(number: int) -> None:
        for call in range(60):
            words = (2, 9)[(number + call) % 2]
            shape = converted.inputs([" ".join("a" * words)])["input_ids"].shape
            assert shape == (1, {2: 8, 9: 11}[words])

    in_threads(8, work)


def test_transformers_tells_again_what_it_told_before() -> None:
    transformers = pytest.importorskip("transformers", reason="install enginequant[hf]")
    from quantizer.tasks.seq2seq.writer import Writer

    logging = transformers.utils.logging
    together = threading.Barrier(2)

    class Model(torch.nn.Module):
        def generate(self, **batch: Any) -> Any:
            together.wait()
            assert logging.get_verbosity() == logging.ERROR
            together.wait()
            return batch["input_ids"]

    before = logging.get_verbosity()
    logging.set_verbosity(logging.INFO)
    try:
        writer, ids = Writer(Model(), 2), torch.zeros(1, 1, dtype=torch.long)
        for _ in range(20):
            in_threads(2, lambda _: writer(input_ids=ids))
        assert logging.get_verbosity() == logging.INFO
    finally:
        logging.set_verbosity(before)
