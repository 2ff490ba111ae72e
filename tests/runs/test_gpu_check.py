"""run_on_gpu.sh with a program in the place of trtexec, which records its arguments and gives what it is told to."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("onnx", reason="the files of engines need enginequant[onnx]")

from quantizer.engines.engine_file import read_engine, write_engine
from quantizer.export.qdq.structure import Signature, Value
from quantizer.pipeline.compare_outputs import Tolerance, reference_outputs
from quantizer.pipeline.deliver import write_serving_files
from quantizer.pipeline.triton import Expected, ServedEngine

SHAPES = ((1, 4), (10, 6))
CASES = ("1x4", "10x6")
NAMES = ("ids", "attention_mask")

TRTEXEC = """
import json, os, shutil, sys
from pathlib import Path
place = Path(os.environ["FAKE"])
options = dict(word.lstrip("-").partition("=")[::2] for word in sys.argv[1:])
if "help" in options:
    print(os.environ.get("FAKE_HELP", "  --stronglyTyped  Create a strongly typed network."))
    sys.exit()
with (place / "calls").open("a") as calls:
    calls.write(json.dumps({"tool": Path(sys.argv[0]).name, **options}) + "\\n")
if "onnx" in options:
    if "FAKE_NO_BUILD" in os.environ:
        print("[E] Error[4]: no kernel")
        sys.exit(1)
    Path(options["saveEngine"]).write_bytes(b"built here")
    sys.exit()
if "FAKE_STALE" in os.environ and Path(options["loadEngine"]).read_bytes() != b"built here":
    print("[11/25/2026-10:00:00] [E] The engine plan file is not compatible with this version of TensorRT")
    sys.exit(1)
for part in options["loadInputs"].split(","):
    assert Path(part.partition(":")[2]).is_file(), part
print("[11/25/2026-10:00:00] [I] Throughput: 812 qps")
print("[11/25/2026-10:00:00] [I] Latency: min = 1.1 ms, max = 1.4 ms, mean = 1.2 ms, median = 1.2 ms")
print("[11/25/2026-10:00:00] [I] H2D Latency: min = 0.1 ms")
out = Path(options["exportOutput"])
shutil.copy(place / out.name, out)
"""


class _Model(nn.Module):
    """Logits of a row, and a value of each token that follows what is masked, too."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.noise = noise

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compute both."""
        values = torch.stack([ids.float(), ids.float().sin() + self.noise * ids.float().cos()], -1)
        return {"logits": (values * attention_mask[..., None]).sum(1), "hidden": values}


@dataclass
class Gpu:
    """A machine with a program in the place of TensorRT's, and the folder of an engine."""

    folder: Path
    fake: Path
    tools: Path
    results: Path
    outputs: dict[str, dict[str, Any]]
    environment: dict[str, str] = field(default_factory=dict)

    def has(self, tool: str, text: str = TRTEXEC) -> None:
        """Give the machine a program."""
        path = self.tools / tool
        path.write_text(f"#!{sys.executable}\n{text}", encoding="utf-8")
        path.chmod(0o755)

    def lacks(self, tool: str) -> None:
        (self.tools / tool).unlink()

    def is_of(self, capability: str) -> None:
        """Give the machine a GPU of that compute capability."""
        self.has("nvidia-smi", f"print({capability!r})")

    def exports(self) -> None:
        """Write what each case gives, as trtexec does: six digits, dimensions as text."""
        for case, outputs in self.outputs.items():
            entries = [
                f'{{ "name" : "{name}"\n  , "dimensions" : "{"x".join(map(str, value.shape))}"\n'
                f'  , "values" : [ {", ".join(f"{one:g}" for one in value.ravel())} ]\n  }}\n'
                for name, value in outputs.items()
            ]
            (self.fake / f"{case}.json").write_text(f"[\n  {', '.join(entries)}]\n", encoding="utf-8")

    def run(self, **more: str) -> subprocess.CompletedProcess[str]:
        """Run the script from another folder; it has no program but ours and the system's."""
        self.exports()
        before = _content(self.folder)
        environment = {"PATH": f"{self.tools}", "FAKE": str(self.fake), **self.environment, **more}
        done = subprocess.run(
            ["/bin/sh", str(self.folder / "run_on_gpu.sh"), "results"],
            cwd=self.results.parent,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert _content(self.folder) == before
        return done

    @property
    def calls(self) -> list[dict[str, str]]:
        return [json.loads(line) for line in (self.fake / "calls").read_text(encoding="utf-8").splitlines()]


def _content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _batch(rows: int, tokens: int) -> dict[str, torch.Tensor]:
    mask = torch.ones((rows, tokens), dtype=torch.long)
    mask[1:, tokens // 2 :] = 0
    ids = torch.randint(1, 9, (rows, tokens), generator=torch.Generator().manual_seed(rows))
    return dict(zip(NAMES, (ids, mask), strict=True))


def _machine(place: Path, backend: str, capability: str | None, tool: str, bound: Tolerance) -> Gpu:
    folder, fake, tools = place / "an engine's folder", place / "fake", place / "tools"
    for path in (folder, fake, tools):
        path.mkdir()
    (folder / "model.onnx").write_bytes(b"onnx")
    write_engine(folder / "model.engine", memoryview(b"the plan"))
    inputs = tuple(Value(name, "int64", ("batch", "sequence")) for name in NAMES)
    outputs = (Value("logits", "float16", ("batch", 2)), Value("hidden", "float16", ("batch", "sequence", 2)))
    served = ServedEngine(
        name="my-model",
        backend=backend,
        onnx=folder / "model.onnx",
        engine=folder / "model.engine",
        signature=Signature(inputs, outputs),
        dimensions={"batch": (1, 10, 32), "sequence": (4, 6, 64)},
        threads=1,
        capability=capability,
    )
    batches = [_batch(*shape) for shape in SHAPES]
    quantized, names = _Model(0.1), ("logits", "hidden")
    expected = Expected(
        outputs=reference_outputs(quantized, batches, names),
        of_float=reference_outputs(_Model(0.0), batches, names),
        bound=bound,
    )
    files = write_serving_files(folder, served, expected)
    assert files["gpu_check"] == "run_on_gpu.sh"
    right = [{name: value.numpy() for name, value in quantized(**batch).items()} for batch in batches]
    gpu = Gpu(folder, fake, tools, place / "results", dict(zip(CASES, right, strict=True)))
    gpu.has(tool)
    for system in ("cat", "cp", "dirname", "grep", "head", "mkdir", "mktemp", "mv", "rm", "sed", "tail", "tr"):
        (tools / system).symlink_to(str(shutil.which(system)))
    # Without site-packages: the machine has no NumPy.
    (tools / "python3").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S "$@"\n', encoding="utf-8")
    (tools / "python3").chmod(0o755)
    return gpu


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """TensorRT, and an engine for the GPU that is there."""
    # So that some of the 10 samples of a case are not run in PyTorch, as in large batches.
    monkeypatch.setattr("quantizer.pipeline.compare_outputs._EDGE_ROWS", 4)
    return _machine(tmp_path, "tensorrt", None, "trtexec", Tolerance(30.0, 3.0))


@pytest.fixture
def rtx(tmp_path: Path) -> Gpu:
    """TensorRT-RTX, and an engine for sm89."""
    made = _machine(tmp_path, "tensorrt-rtx", "sm89", "tensorrt_rtx", Tolerance(30.0, 3.0))
    made.is_of("8.9")
    return made


def wrong(gpu: Gpu, case: str, name: str, place: Any, value: float) -> None:
    """Change values of an output."""
    gpu.outputs[case][name][place] = value


# -- the engine runs ---------------------------------------------------------------------------------------------------


def test_right_outputs_pass(gpu: Gpu) -> None:
    done = gpu.run()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("Latency: min = 1.1 ms") == 2
    assert "H2D" not in done.stdout
    assert done.stdout.count(": ok: SQNR ") == 4
    assert done.stdout.splitlines()[0] == "1x4"
    first, second = gpu.calls
    assert (gpu.results / "model.plan").read_bytes() == read_engine(gpu.folder / "model.engine")[0]
    assert first == {
        "tool": "trtexec",
        "loadEngine": str(gpu.results / "model.plan"),
        "shapes": "ids:1x4,attention_mask:1x4",
        "loadInputs": "ids:gpu/1x4/0.ids.bin,attention_mask:gpu/1x4/1.attention_mask.bin",
        "exportOutput": str(gpu.results / "1x4.json"),
    }
    assert second["shapes"] == "ids:10x6,attention_mask:10x6"
    ids = np.fromfile(gpu.folder / "gpu" / "10x6" / "0.ids.bin", np.int64).reshape(10, 6)
    np.testing.assert_array_equal(ids, _batch(10, 6)["ids"].numpy())


def test_six_digits_of_trtexec_are_enough(gpu: Gpu) -> None:
    told = gpu.run().stdout
    far = [float(line.split("SQNR ")[1].split(" dB")[0]) for line in told.splitlines() if "SQNR " in line]
    assert min(far, default=0) > 100


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["logits", "hidden"])
def test_wrong_outputs_are_told(gpu: Gpu, case: str, name: str) -> None:
    wrong(gpu, case, name, 0, 40.0)
    done = gpu.run()
    assert done.returncode == 1
    lines = [line for line in done.stdout.splitlines() if "WRONG" in line]
    assert len(lines) == 1
    assert lines[0].strip().startswith(f"{name}: WRONG: SQNR ")
    assert lines[0].endswith(
        "expected SQNR of 30 dB or more, or at most 3 dB further from the float model than PyTorch"
    )
    assert done.stdout.count(": ok: ") == 3


def test_nan_and_infinite_values_are_wrong(gpu: Gpu) -> None:
    wrong(gpu, "1x4", "logits", 0, float("nan"))
    wrong(gpu, "10x6", "hidden", (0, 0, 0), float("-inf"))
    done = gpu.run()
    assert done.returncode == 1
    assert done.stdout.count("WRONG: NaN or infinite values") == 2


def test_masked_tokens_and_rows_that_pytorch_did_not_run_are_not_compared(gpu: Gpu) -> None:
    wrong(gpu, "10x6", "hidden", (2, slice(3, None)), 99.0)
    wrong(gpu, "10x6", "logits", slice(4, 6), 99.0)
    assert gpu.run().returncode == 0
    wrong(gpu, "10x6", "logits", 6, 99.0)
    assert gpu.run().returncode == 1


def test_an_engine_as_far_from_float_as_the_quantized_model_passes(gpu: Gpu) -> None:
    batch = _batch(10, 6)
    gpu.outputs["10x6"] = {name: value.numpy() for name, value in _Model(-0.1)(**batch).items()}
    done = gpu.run()
    assert done.returncode == 0, done.stdout
    gpu.outputs["10x6"] = {name: value.numpy() for name, value in _Model(-0.2)(**batch).items()}
    assert gpu.run().returncode == 1


# -- the engine does not fit -------------------------------------------------------------------------------------------

BUILT = {
    "onnx": "model.onnx",
    "stronglyTyped": "",
    "skipInference": "",
    "minShapes": "ids:1x4,attention_mask:1x4",
    "optShapes": "ids:10x6,attention_mask:10x6",
    "maxShapes": "ids:32x64,attention_mask:32x64",
}


@pytest.mark.parametrize("why", ["stale", "missing"])
def test_an_engine_that_does_not_fit_is_built(gpu: Gpu, why: str) -> None:
    if why == "stale":
        gpu.environment["FAKE_STALE"] = "1"
    else:
        (gpu.folder / "model.engine").unlink()
    done = gpu.run()
    assert done.returncode == 0, done.stderr
    told = {"stale": "not compatible with this version", "missing": "model.engine is missing"}[why]
    assert f"{told}" in done.stdout.splitlines()[0]
    build = gpu.calls[1 if why == "stale" else 0]
    assert build == {"tool": "trtexec", "saveEngine": str(gpu.results / "model.plan"), **BUILT}
    model = gpu.results / "triton" / "my-model"
    assert (model / "1" / "model.plan").read_bytes() == b"built here"
    assert (
        (model / "config.pbtxt").read_text(encoding="utf-8").startswith('name: "my-model"\nplatform: "tensorrt_plan"')
    )
    assert f"model repository for Triton with the engine of this GPU: {gpu.results / 'triton'}" in done.stdout


def test_a_later_trtexec_without_the_option_is_not_given_it(gpu: Gpu) -> None:
    (gpu.folder / "model.engine").unlink()
    assert gpu.run(FAKE_HELP="no such option").returncode == 0
    assert "stronglyTyped" not in gpu.calls[0]


def test_a_build_that_fails_is_told_with_its_reason(gpu: Gpu) -> None:
    (gpu.folder / "model.engine").unlink()
    done = gpu.run(FAKE_NO_BUILD="1")
    assert done.returncode == 2
    assert "trtexec could not build the engine" in done.stderr
    assert "no kernel" in done.stderr


def test_an_engine_ahead_of_time_runs_on_its_gpu(rtx: Gpu) -> None:
    done = rtx.run()
    assert done.returncode == 0, done.stderr
    assert [call["tool"] for call in rtx.calls] == ["tensorrt_rtx"] * 2
    assert all("onnx" not in call for call in rtx.calls)
    assert not (rtx.results / "triton").exists()


def test_an_engine_for_another_gpu_is_built(rtx: Gpu) -> None:
    rtx.is_of("12.0")
    done = rtx.run()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("model.engine is for sm89, but this GPU is sm120: building it from model.onnx")
    assert "onnx" in rtx.calls[0]
    assert not (rtx.results / "triton").exists()


def test_trtexec_alone_builds_what_tensorrt_rtx_built_ahead_of_time(rtx: Gpu) -> None:
    rtx.lacks("tensorrt_rtx")
    rtx.has("trtexec")
    done = rtx.run()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("model.engine belongs to another library than trtexec: building it")
    assert [call["tool"] for call in rtx.calls] == ["trtexec"] * 3
    assert (rtx.results / "triton" / "my-model" / "1" / "model.plan").exists()


# -- what is missing ---------------------------------------------------------------------------------------------------


def test_a_missing_trtexec_is_told(gpu: Gpu) -> None:
    gpu.lacks("trtexec")
    done = gpu.run()
    assert done.returncode == 2
    assert "trtexec is missing: it is part of TensorRT" in done.stderr
    elsewhere = gpu.fake / "trtexec-10"
    gpu.has("trtexec")
    (gpu.tools / "trtexec").rename(elsewhere)
    assert gpu.run(TRTEXEC=str(elsewhere)).returncode == 0
    done = gpu.run(TRTEXEC="nowhere")
    assert (done.returncode, done.stderr) == (2, "run_on_gpu.sh: TRTEXEC is nowhere, which is not a program\n")


def test_without_python_the_engine_is_timed_and_the_end_is_no_success(gpu: Gpu) -> None:
    gpu.lacks("python3")
    done = gpu.run()
    assert done.returncode == 2
    assert "python3 is missing: the engine is benchmarked, but its outputs are not compared" in done.stdout
    assert done.stdout.count("Latency") == 2


def test_an_engine_that_does_not_run_at_all_is_told(gpu: Gpu) -> None:
    gpu.has("trtexec", "import sys\nprint('[E] no CUDA device')\nsys.exit('--onnx=model.onnx' not in sys.argv)")
    done = gpu.run()
    assert done.returncode == 2
    assert "could not build the engine" in done.stderr


def test_an_export_that_cannot_be_read_is_told(gpu: Gpu) -> None:
    gpu.outputs["1x4"]["logits"] = gpu.outputs["1x4"]["logits"][:, :1]
    done = gpu.run()
    assert done.returncode == 2
    assert "output 'logits' has the dimensions [1, 1], expected [1, 2]" in done.stderr
    del gpu.outputs["1x4"]["logits"]
    assert "output 'logits' is missing; the outputs are hidden" in gpu.run().stderr


def test_a_folder_that_was_copied_in_part_is_told(gpu: Gpu) -> None:
    (gpu.folder / "gpu" / "10x6" / "inputs").unlink()
    done = gpu.run()
    assert done.returncode == 2
    assert "gpu/10x6 is incomplete: copy the whole folder" in done.stderr
    shutil.rmtree(gpu.folder / "gpu")
    assert gpu.run().returncode == 2
    assert os.access("/bin/sh", os.X_OK)
