"""TensorRT-RTX builds without a GPU; what it refuses, and how a build is followed and stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantizer.engines import BuildOptions, build_engine, load_engine
from quantizer.engines.tensorrt import BuildMonitor, run_monitored
from quantizer.errors import EngineError, MissingDependencyError

rtx = pytest.mark.skipif(find_spec("tensorrt_rtx_bindings") is None, reason="install enginequant[tensorrt-rtx]")

DYNAMIC = {"batch": (1, 8, 32), "sequence": (16, 128, 512)}


def has_gpu() -> bool:
    torch = pytest.importorskip("torch")
    return bool(torch.cuda.is_available())


@rtx
@pytest.mark.parametrize("capability", ["sm89", "SM120", None])
def test_builds_without_a_gpu(capability: str | None, qdq_half: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.engine"
    result = build_engine(
        "tensorrt-rtx", qdq_half.path, path, BuildOptions(dynamic=DYNAMIC, compute_capability=capability)
    )
    assert result.path == path
    assert result.size_bytes == path.stat().st_size > 1000
    assert list(tmp_path.iterdir()) == [path]


@rtx
def test_fixed_shapes_need_no_range(write_qdq: Any, tmp_path: Path) -> None:
    model = write_qdq(dtype=np.float16, dims=(4, 16))
    build_engine("tensorrt-rtx", model.path, tmp_path / "model.engine", BuildOptions(compute_capability="sm89"))


@rtx
def test_running_needs_a_gpu(qdq_half: Any, tmp_path: Path) -> None:
    if has_gpu():
        pytest.skip("there is a GPU")
    path = tmp_path / "model.engine"
    build_engine("tensorrt-rtx", qdq_half.path, path, BuildOptions(dynamic=DYNAMIC, compute_capability="sm89"))
    with pytest.raises(EngineError, match=r"Run the engine on a machine with an NVIDIA GPU"):
        load_engine("tensorrt-rtx", path)


@rtx
@pytest.mark.gpu
def test_numbers_on_a_gpu(qdq_half: Any, tmp_path: Path) -> None:
    if not has_gpu():
        pytest.skip("needs an NVIDIA GPU")
    path = tmp_path / "model.engine"
    build_engine("tensorrt-rtx", qdq_half.path, path, BuildOptions(dynamic=DYNAMIC))
    x = qdq_half.input(2, 16, np.float16)
    y = load_engine("tensorrt-rtx", path)({"x": x})["y"]
    np.testing.assert_allclose(y, qdq_half.expected(x.astype(np.float32)), rtol=2e-2, atol=2e-2)


@rtx
def test_unknown_compute_capability_lists_the_known(qdq_half: Any, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"unknown compute capability 'sm90' for tensorrt-rtx; known: sm75, .*sm89"):
        build_engine(
            "tensorrt-rtx",
            qdq_half.path,
            tmp_path / "model.engine",
            BuildOptions(dynamic=DYNAMIC, compute_capability="sm90"),
        )


@rtx
def test_unknown_operators_are_all_named(write_qdq: Any, tmp_path: Path) -> None:
    model = write_qdq(dtype=np.float16, tail=("Frobnicate", "Tanh", "Grumble"))
    with pytest.raises(EngineError, match=r"refused .*model\.onnx") as caught:
        build_engine("tensorrt-rtx", model.path, tmp_path / "model.engine", BuildOptions(dynamic=DYNAMIC))
    assert (
        "node 'tail/0' (Frobnicate) of module 'tail': neither a supported operator nor a plugin; replace the call"
        in str(caught.value)
    )
    assert "node 'tail/2' (Grumble)" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@rtx
def test_fp8_is_refused_where_the_gpu_lacks_it(write_qdq: Any, tmp_path: Path) -> None:
    float8 = pytest.importorskip("ml_dtypes").float8_e4m3fn
    model = write_qdq(dtype=np.float16, storage=float8)
    path = tmp_path / "model.engine"
    with pytest.raises(EngineError, match=r"for sm80, which lacks FP8. .* node 'layer/quantize'"):
        build_engine("tensorrt-rtx", model.path, path, BuildOptions(dynamic=DYNAMIC, compute_capability="sm80"))
    assert list(tmp_path.iterdir()) == []
    build_engine("tensorrt-rtx", model.path, path, BuildOptions(dynamic=DYNAMIC, compute_capability="sm89"))


@rtx
@pytest.mark.parametrize(
    ("dims", "dynamic", "message"),
    [
        (
            ("batch", "sequence"),
            {"batch": (1, 2, 3)},
            r"input 'x', axis 1 \(sequence\); dimensions with a range: batch",
        ),
        (("batch", "sequence"), {}, r"axis 0 \(batch\); .*axis 1 \(sequence\); dimensions with a range: none"),
        ((None, 16), {"batch": (1, 2, 3)}, r"axis 0 \(without a name\)"),
    ],
    ids=["one", "none", "unnamed"],
)
def test_dimension_without_a_range(
    dims: tuple[Any, ...], dynamic: dict[str, tuple[int, int, int]], message: str, write_qdq: Any, tmp_path: Path
) -> None:
    model = write_qdq(dtype=np.float16, dims=dims)
    with pytest.raises(EngineError, match=f"dynamic dimensions without a range: .*{message}"):
        build_engine("tensorrt-rtx", model.path, tmp_path / "model.engine", BuildOptions(dynamic=dynamic))


@rtx
def test_progress_rises_to_one(qdq_half: Any, tmp_path: Path) -> None:
    told: list[tuple[float, str]] = []
    options = BuildOptions(dynamic=DYNAMIC, progress=lambda share, phase: told.append((share, phase)))
    build_engine("tensorrt-rtx", qdq_half.path, tmp_path / "model.engine", options)
    shares = [share for share, _ in told]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert all(phase for _, phase in told)


CTRL_C = """
import sys
import quantizer.engines as engines
print("start", flush=True)
dynamic = {"batch": (1, 8, 32), "sequence": (16, 128, 512)}
options = engines.BuildOptions(dynamic=dynamic, progress=lambda share, phase: print(phase, flush=True))
while True:
    engines.build_engine("tensorrt-rtx", sys.argv[1], sys.argv[2], options)
"""


@rtx
@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_ctrl_c_leaves_nothing_half_written(write_qdq: Any, tmp_path: Path) -> None:
    model = write_qdq(dtype=np.float16, k=512, n=512, tail=("Tanh",) * 200)
    path = tmp_path / "model.engine"
    command = [sys.executable, "-c", CTRL_C, str(model.path), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "start\n"
        assert process.stdout.readline(), "the build said nothing"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    assert errors.strip().endswith("KeyboardInterrupt")
    assert process.returncode == -signal.SIGINT
    assert [entry.name for entry in tmp_path.iterdir() if entry != path] == []


def test_missing_libraries_name_the_extra(qdq_half: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings"):
        monkeypatch.setitem(sys.modules, module, None)
    for name in ("tensorrt", "tensorrt-rtx"):
        with pytest.raises(MissingDependencyError, match=rf"pip install 'enginequant\[{name}\]'"):
            build_engine(name, qdq_half.path, tmp_path / "model.engine")


def fake_tensorrt(**attributes: Any) -> types.ModuleType:
    module = types.ModuleType("tensorrt")

    class ILogger:
        ERROR = 1
        WARNING = 2

    def builder(logger: Any) -> None:
        logger.log(1, "CUDA initialization failure with error: 35")
        raise TypeError("pybind11::init(): factory function returned nullptr")

    module.__dict__.update(ILogger=ILogger, Builder=builder, **attributes)
    return module


def test_tensorrt_without_a_gpu_says_what_does_build(
    qdq_half: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt())
    message = "cannot build on this machine: CUDA initialization failure with error: 35; backend tensorrt-rtx builds"
    with pytest.raises(EngineError, match=message):
        build_engine("tensorrt", qdq_half.path, tmp_path / "model.engine")


def test_tensorrt_builds_for_the_gpu_at_hand(qdq_half: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt())
    with pytest.raises(EngineError, match=r"leave out compute_capability 'sm89', or use backend tensorrt-rtx"):
        build_engine("tensorrt", qdq_half.path, tmp_path / "model.engine", BuildOptions(compute_capability="sm89"))


def test_monitor_nests_phases() -> None:
    monitor = BuildMonitor()
    monitor.phase_start("build", None, 4)
    monitor.step_complete("build", 0)
    assert monitor.latest == (0.25, "build")
    monitor.phase_start("tactics", "build", 2)
    monitor.step_complete("tactics", 0)
    assert monitor.latest == (0.375, "tactics")
    monitor.phase_finish("tactics")
    monitor.phase_start("second", "build", 10)
    assert monitor.latest == (0.5, "second")
    assert monitor.step_complete("build", 3)
    assert monitor.latest[0] == 1.0
    monitor.cancelled = True
    assert not monitor.step_complete("a phase it never heard of", 0)


def test_monitored_build_passes_results_and_errors_on() -> None:
    assert run_monitored(lambda: 7, BuildMonitor(), None) == 7
    with pytest.raises(ZeroDivisionError, match="by zero"):
        run_monitored(lambda: 1 // 0, BuildMonitor(), None)


def test_an_exception_of_the_progress_callback_stops_the_build() -> None:
    monitor = BuildMonitor()
    ended: list[bool] = []

    def build() -> None:
        step = 0
        monitor.phase_start("build", None, 10_000)
        while monitor.step_complete("build", step := step + 1):
            pass
        ended.append(True)

    def progress(share: float, phase: str) -> None:
        raise KeyboardInterrupt("stop")

    with pytest.raises(KeyboardInterrupt, match="stop"):
        run_monitored(build, monitor, progress)
    assert ended == [True]


@rtx
def test_several_compute_capabilities_in_one_engine(qdq_half: Any, tmp_path: Path) -> None:
    options = BuildOptions(dynamic=DYNAMIC, compute_capability=("sm80", "SM89", "sm120", "sm89"))
    assert options.capabilities == ("sm80", "sm89", "sm120")
    build_engine("tensorrt-rtx", qdq_half.path, tmp_path / "model.engine", options)
    mixed = BuildOptions(dynamic=DYNAMIC, compute_capability=["sm89", "sm90"])
    with pytest.raises(EngineError, match="unknown compute capability 'sm90'"):
        build_engine("tensorrt-rtx", qdq_half.path, tmp_path / "other.engine", mixed)
    with pytest.raises(EngineError, match="compute_capability is an empty list: give at least one"):
        BuildOptions(compute_capability=[])


@rtx
def test_an_engine_that_is_cut_short_or_foreign(qdq_half: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.engine"
    build_engine("tensorrt-rtx", qdq_half.path, path, BuildOptions(dynamic=DYNAMIC, compute_capability="sm89"))
    content = path.read_bytes()
    for size in (len(content) - 1, 1000, 20, 4):
        path.write_bytes(content[:size])
        with pytest.raises(EngineError, match=rf"model\.engine is cut short: it has {size} bytes .*copy it again"):
            load_engine("tensorrt-rtx", path)
    path.write_bytes(b"ptrt" + content)
    with pytest.raises(EngineError, match=r"model\.engine is not an engine of tensorrt-rtx: build it again"):
        load_engine("tensorrt-rtx", path)
