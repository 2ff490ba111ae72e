"""TensorRT without TensorRT: what is called of it is in its own bindings, and what runs engines is run on a stand-in.

The interfaces of TensorRT 10.12 and 11.4 were recorded from the vendor's bindings; see ``interface.py``.
"""

from __future__ import annotations

import json
import shutil
import time
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engines.interface import AHEAD, CALLED, TIMED, interface
from threads import in_threads

from quantizer.engines import BuildOptions, build_engine
from quantizer.engines.engine_file import read_engine, write_engine
from quantizer.engines.tensorrt import TensorRTBackend, TensorRTEngine, save_cache, use_cache, weights_note
from quantizer.errors import EngineError

RECORDED: dict[str, dict[str, list[str]]] = json.loads(
    (Path(__file__).parent / "tensorrt_interface.json").read_text(encoding="utf-8")
)
DYNAMIC = {"batch": (1, 8, 32), "sequence": (16, 128, 512)}
rtx = pytest.mark.skipif(find_spec("tensorrt_rtx_bindings") is None, reason="install enginequant[tensorrt-rtx]")


def names(called: dict[str, tuple[str, ...]]) -> set[str]:
    return {f"{owner}.{member}" for owner, members in called.items() for member in members}


@pytest.mark.parametrize("release", RECORDED)
def test_every_call_is_in_the_recorded_interface(release: str) -> None:
    assert set(RECORDED[release]) == names(CALLED) | names(TIMED)


@rtx
@pytest.mark.parametrize("release", RECORDED)
def test_rtx_has_the_same_members_with_the_same_parameters(release: str) -> None:
    import tensorrt_rtx_bindings

    assert interface(tensorrt_rtx_bindings, CALLED) == {name: RECORDED[release][name] for name in names(CALLED)}
    assert set(interface(tensorrt_rtx_bindings, AHEAD)) == names(AHEAD)


class Recorder:
    """An object of the bindings, or their module, that notes what is asked of it."""

    def __init__(self, value: Any, seen: set[str]) -> None:
        vars(self).update(_value=value, _seen=seen)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._value, name)
        self._note(name)
        # A class to derive from has to be the real one, and so have values.
        if name in ("ILogger", "IProgressMonitor") or not type(self._value).__module__.startswith(
            ("tensorrt", "builtins")
        ):
            return value
        return self._wrapped(value)

    def __setattr__(self, name: str, value: Any) -> None:
        self._note(name)
        setattr(self._value, name, plain(value))

    def __call__(self, *args: Any) -> Any:
        if isinstance(self._value, type):
            self._seen.add(f"{self._value.__name__}.__init__")
        return self._wrapped(self._value(*map(plain, args)))

    def __int__(self) -> int:
        return int(self._value)

    def _note(self, name: str) -> None:
        owner = self._value if isinstance(self._value, type) else type(self._value)
        self._seen.add(f"{owner.__name__}.{name}")

    def _wrapped(self, value: Any) -> Any:
        ours = type(value).__module__.startswith("tensorrt") or callable(value)
        return Recorder(value, self._seen) if ours and type(value).__name__ not in ("IHostMemory", "Dims") else value


def plain(value: Any) -> Any:
    return value._value if isinstance(value, Recorder) else value


@rtx
def test_a_build_calls_nothing_else(qdq_half: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorrt_rtx_bindings

    seen: set[str] = set()
    backend = TensorRTBackend("tensorrt-rtx", ["tensorrt_rtx_bindings"])
    monkeypatch.setattr(backend, "_import", lambda: Recorder(tensorrt_rtx_bindings, seen))
    options = BuildOptions(dynamic=DYNAMIC, compute_capability=["sm80", "SM89"])
    backend.build(qdq_half.path, tmp_path / "model.engine", options)
    classes = {name.partition(".")[0] for name in (*names(CALLED), *names(TIMED), *names(AHEAD))}
    called = {name for name in seen if name.partition(".")[0] in classes and not name.endswith("__members__")}
    assert called <= names(CALLED) | names(TIMED) | names(AHEAD)
    assert {"IBuilderConfig.set_compute_capability", "OnnxParser.parse_from_file", "ITensor.shape"} <= called


class StandIn:
    """What an engine of a GPU answers: y = 2 x for x [batch, 4], of which the profile takes 1 to 8 rows."""

    def __init__(self) -> None:
        self.shape = (0, 0)
        self.addresses: dict[str, int] = {}
        self.profiler: Any = None
        self.execution_context: Any = None
        self.num_io_tensors = 2

        self.refittable = False
        self.filled = True

    def deserialize_cuda_engine(self, content: memoryview) -> StandIn | None:
        self.refittable = content == b"whole, but for its weights"
        self.filled = not self.refittable
        return self if bytes(content).startswith(b"whole") else None

    def create_execution_context(self) -> StandIn:
        return self

    def create_engine_inspector(self) -> StandIn:
        return self

    def get_tensor_name(self, index: int) -> str:
        return "xy"[index]

    def get_tensor_mode(self, name: str) -> str:
        return {"x": "in", "y": "out"}[name]

    def get_tensor_dtype(self, name: str) -> type:
        return np.float32

    def get_tensor_shape(self, name: str) -> tuple[int, int]:
        return self.shape if name == "y" and self.shape != (0, 0) else (-1, 4)

    def set_input_shape(self, name: str, shape: tuple[int, int]) -> bool:
        self.shape = shape
        time.sleep(0)  # another thread may run here
        return 1 <= shape[0] <= 8

    def set_tensor_address(self, name: str, address: int) -> None:
        self.addresses[name] = address

    def execute_async_v3(self, stream: int) -> bool:
        import ctypes

        assert self.filled
        size = 4 * self.shape[0]
        x, y = ((ctypes.c_float * size).from_address(self.addresses[name]) for name in "xy")
        y[:] = [2 * value for value in x]
        if self.profiler:
            self.profiler.report_layer_time("gemm", 0.25)
        return True

    def get_engine_information(self, form: str) -> str:
        entry = {"Name": "gemm", "LayerType": "gemm", "Inputs": [], "Outputs": []}
        return json.dumps({"Layers": [entry]})


class Refitter:
    """Fills a stand-in from a file; one that holds "other weights" lacks some, one that holds "refused" is refused."""

    def __init__(self, target: Any, logger: Any) -> None:
        self.target = target
        self.num_errors = 1
        self.content = b""

    def refit_from_file(self, model: str) -> bool:
        self.target.content = Path(model).read_bytes()
        return b"refused" not in self.target.content

    def get_error(self, index: int) -> Any:
        return SimpleNamespace(desc=lambda: f"error {index}")

    def refit_cuda_engine(self) -> bool:
        self.target.filled = b"other weights" not in self.content
        return bool(self.target.filled)

    def get_missing_weights(self) -> list[str]:
        return ["layer.weight"]


def stand_in() -> Any:
    class Base:
        ERROR = 1
        WARNING = 2

    return SimpleNamespace(
        ILogger=Base,
        IProfiler=Base,
        Runtime=lambda logger: StandIn(),
        Refitter=Refitter,
        OnnxParserRefitter=Refitter,
        TensorIOMode=SimpleNamespace(INPUT="in"),
        LayerInformationFormat=SimpleNamespace(JSON="json"),
        nptype=lambda kind: kind,
    )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    entered: list[int] = []
    monkeypatch.setattr(torch.cuda, "device", lambda number: nullcontext(entered.append(number)))
    return entered


@pytest.mark.parametrize("threads", [1, 2, 16, 200])
def test_threads_take_turns_on_the_gpu_of_the_engine(threads: int, gpu: list[int], tmp_path: Path) -> None:
    """A context holds shapes and addresses of one call, and each thread has a current GPU of its own."""
    path = tmp_path / "model.engine"
    path.write_bytes(b"whole")
    engine = TensorRTEngine("tensorrt", stand_in(), path, *read_engine(path))

    def work(number: int) -> None:
        for call in range(5):
            x = np.full((1 + (number + call) % 8, 4), number, np.float32)
            np.testing.assert_array_equal(engine({"x": x})["y"], 2 * x)

    in_threads(threads, work)
    assert gpu == [1] * (5 * threads)


@pytest.mark.usefixtures("gpu")
def test_running_and_inspecting(tmp_path: Path) -> None:
    path = tmp_path / "model.engine"
    path.write_bytes(b"whole")
    engine = TensorRTEngine("tensorrt", stand_in(), path, *read_engine(path))
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.testing.assert_array_equal(engine({"x": x})["y"], 2 * x)
    with pytest.raises(EngineError, match=r"input 'x' of shape \[9, 4\] is outside the engine's ranges"):
        engine({"x": np.zeros((9, 4), np.float32)})
    (layer,) = engine.observed_layers({"x": x})
    assert (layer.name, layer.role, layer.time_us) == ("gemm", "product", 250.0)


@pytest.mark.usefixtures("gpu")
def test_an_engine_of_another_release_or_gpu(tmp_path: Path) -> None:
    path = tmp_path / "model.engine"
    path.write_bytes(b"of another release")
    with pytest.raises(EngineError, match=r"tensorrt cannot load .*only runs with the release and the GPU generation"):
        TensorRTEngine("tensorrt", stand_in(), path, *read_engine(path))


@pytest.fixture
def stripped(tmp_path: Path) -> Path:
    """An engine file without weights, beside the ONNX file that it takes them from."""
    path, onnx = tmp_path / "model.engine", tmp_path / "model.onnx"
    write_onnx(onnx, "weights")
    write_engine(path, memoryview(b"whole, but for its weights"), weights_note(onnx, path))
    return path


def write_onnx(path: Path, content: str) -> None:
    """What is read of an ONNX file before TensorRT: one graph, here of a text."""
    path.write_bytes(b"\x3a" + bytes([len(content)]) + content.encode())


@pytest.mark.usefixtures("gpu")
def test_weights_come_from_the_onnx_file(stripped: Path) -> None:
    x = np.arange(4, dtype=np.float32).reshape(1, 4)
    content, note = read_engine(stripped)
    engine = TensorRTEngine("tensorrt", stand_in(), stripped, content, note)
    np.testing.assert_array_equal(engine({"x": x})["y"], 2 * x)
    assert content == b"whole, but for its weights"
    assert note["weights"]["name"] == "model.onnx"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"built without its weights, and .*model\.onnx does not exist: keep that file beside it"),
        ("weights of another run", r"model\.onnx is not the ONNX file of its build \(the SHA-256 differs\)"),
        ("refused", r"did not take its weights from .*model\.onnx: error 0"),
        ("other weights", r"did not take all weights from .*model\.onnx; missing: layer\.weight"),
    ],
    ids=["missing", "another", "refused", "incomplete"],
)
def test_weights_that_do_not_come(stripped: Path, content: str | None, message: str) -> None:
    onnx = stripped.with_suffix(".onnx")
    onnx.unlink()
    if content is not None:
        write_onnx(onnx, content)
    if content in ("refused", "other weights"):
        # As if it had been built from this file.
        write_engine(stripped, memoryview(b"whole, but for its weights"), weights_note(onnx, stripped))
    with pytest.raises(EngineError, match=message):
        TensorRTEngine("tensorrt", stand_in(), stripped, *read_engine(stripped))


@pytest.mark.usefixtures("gpu")
def test_an_engine_that_does_not_say_where_its_weights_are(stripped: Path) -> None:
    stripped.write_bytes(stripped.read_bytes()[:-1])
    stand = stand_in()
    whole = b"whole, but for its weights"
    stand.Runtime = lambda logger: SimpleNamespace(
        deserialize_cuda_engine=lambda content: StandIn().deserialize_cuda_engine(content[: len(whole)])
    )
    with pytest.raises(EngineError, match="needs the weights of an ONNX file but does not name it"):
        TensorRTEngine("tensorrt", stand, stripped, *read_engine(stripped))


def test_the_weights_have_to_be_beside_the_engine(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(EngineError, match=r"must be in the folder of its ONNX file model.onnx, which is in"):
        weights_note(tmp_path / "model.onnx", tmp_path / "elsewhere" / "model.engine")


@rtx
def test_stripping_calls_what_was_recorded_and_needs_a_gpu(
    write_qdq: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tensorrt_rtx_bindings

    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("what is said without a GPU")
    shutil.copy(write_qdq(np.float16).path, tmp_path / "model.onnx")
    seen: set[str] = set()
    backend = TensorRTBackend("tensorrt-rtx", ["tensorrt_rtx_bindings"])
    monkeypatch.setattr(backend, "_import", lambda: Recorder(tensorrt_rtx_bindings, seen))
    options = BuildOptions(dynamic=DYNAMIC, compute_capability="sm89", strip_weights=True)
    with pytest.raises(EngineError, match="weights can only be stripped with an NVIDIA GPU: leave out strip_weights"):
        backend.build(tmp_path / "model.onnx", tmp_path / "model.engine", options)
    assert {"BuilderFlag.STRIP_PLAN", "BuilderFlag.REFIT_IDENTICAL", "IBuilderConfig.set_flag"} <= seen
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize("name", ["openvino", "onnxruntime"])
def test_engines_of_a_cpu_keep_their_weights(name: str, qdq: Any, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=f"strip_weights: {name} always stores the weights in its engines; remove"):
        build_engine(name, qdq.path, tmp_path / "model.engine", BuildOptions(strip_weights=True))


class Config:
    """A builder's configuration that takes caches that begin with "good", and knows "good 2" after a build."""

    def __init__(self) -> None:
        self.cache: bytes | None = None

    def create_timing_cache(self, serialized_timing_cache: bytes) -> bytes:
        return serialized_timing_cache

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
        self.cache = cache
        return not ignore_mismatch and cache[:4] in (b"", b"good")

    def get_timing_cache(self) -> Any:
        return SimpleNamespace(serialize=lambda: b"good 2")


def test_a_timing_cache_is_read_and_written(tmp_path: Path) -> None:
    path, config = tmp_path / "times.cache", Config()
    use_cache(config, path)
    assert config.cache == b""
    save_cache(config, path)
    use_cache(config, path)
    assert config.cache == b"good 2"
    assert [entry.name for entry in tmp_path.iterdir()] == ["times.cache"]
    path.write_bytes(b"of another GPU")
    with pytest.raises(
        EngineError, match=r"times\.cache is not a timing cache of this TensorRT release and GPU: delete it"
    ):
        use_cache(config, path)


@rtx
def test_rtx_has_no_times_to_keep(qdq_half: Any, tmp_path: Path) -> None:
    backend = TensorRTBackend("tensorrt-rtx", ["tensorrt_rtx_bindings"])
    with pytest.raises(EngineError, match="has no timing cache: leave out"):
        backend.build(qdq_half.path, tmp_path / "a.engine", BuildOptions(timing_cache=tmp_path / "times.cache"))
