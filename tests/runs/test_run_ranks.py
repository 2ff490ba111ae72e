"""``quantizer run`` in two processes of ``torchrun``: the plan and the scores of one process, and a clear end."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from helpers import Mlp
from outside import run_ranks
from safetensors.torch import load_file
from torch import distributed, nn

from quantizer import Quantizer
from quantizer.algorithms.qat.checkpoint import read_facts
from quantizer.cli.main import main
from quantizer.config import RunConfig
from quantizer.engines.for_this_cpu import cpu_candidates
from quantizer.errors import QuantizerError
from quantizer.pipeline.context import as_predictor
from quantizer.pipeline.fastest_engine import for_all_variants, quantizer_of
from quantizer.utils.distributed import alone, get_rank, get_world_size

for _package in ("transformers", "sklearn", "jinja2", "openvino"):
    pytest.importorskip(_package, reason="a run needs enginequant[hf,report,openvino]")

from tiny_run import tiny_run, write_rows

MEASURED = ("scores", "sensitivity", "fallback", "coverage", "histograms", "measure", "not_quantized")
"""What a report says of the plan, and not of the machine or the moment."""


def _files(folder: Path) -> dict[str, Any]:
    """A run with a search, whose last batch of each kind is smaller than the others."""
    run = tiny_run(folder)
    run["data"]["tuning"] = {"name": "text-csv", "path": str(folder / "calibration.csv")}
    run["data"]["batch_size"] = 5
    return {**run, "amp": {"batches": 3}, "fallback": {"max_drop": 0.005}}


def _write(run: dict[str, Any], folder: Path) -> Path:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run), encoding="utf-8")
    return path


def _distance(self: Any, model: nn.Module) -> float:
    """A score that any rounding changes, unlike the share of right answers: how far outputs are from the first ones."""
    outputs = self._task.predict(as_predictor(model), self._rows).outputs
    return -float(np.abs(outputs - vars(self).setdefault("first", outputs)).mean())


def patched(patch: Callable[[str, Any], None]) -> None:
    """Let no time of this machine decide, as which groups are slower in an engine changes from run to run."""
    patch("quantizer.pipeline.stages.RunLatencyFallback.measured", lambda *_: None)
    patch("quantizer.pipeline.stages.measure_memory", lambda *_: ())
    patch("quantizer.pipeline.scores.TaskMetric.__call__", _distance)


def _main(rank: int, folder: str, *words: str) -> int:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = Path(folder, "port").read_text(encoding="utf-8")
    printed = Path(folder, f"printed-{rank}")
    with printed.open("w", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        return main(words)


def _run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    patched(pytest.MonkeyPatch().setattr)
    code = _main(rank, folder, "run", f"{folder}/run.yaml", "--output", f"{folder}/two")
    Path(folder, f"code-{rank}").write_text(str(code), encoding="utf-8")


def _printed(folder: Path, rank: int) -> str:
    return (folder / f"printed-{rank}").read_text(encoding="utf-8")


def _with_port(folder: Path) -> Path:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (folder / "port").write_text(str(free.getsockname()[1]), encoding="utf-8")
    return folder


def _same_files(one: Path, other: Path) -> None:
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    assert [name for name in names if (one / name).read_bytes() != (other / name).read_bytes()] == []


@pytest.mark.nightly
def test_two_processes_give_the_run_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _write(_files(tmp_path), _with_port(tmp_path))
    run_ranks(_run, tmp_path)
    assert [(tmp_path / f"code-{rank}").read_text() for rank in range(2)] == ["0", "0"]
    assert "two" in _printed(tmp_path, 0)
    assert _printed(tmp_path, 1) == "", "the first process prints"
    patched(monkeypatch.setattr)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert main(["run", str(config), "--output", str(tmp_path / "one")]) == 0
    torch.set_num_threads(threads)
    _same_files(tmp_path / "one" / "quantizer", tmp_path / "two" / "quantizer")
    one, two = (json.loads((tmp_path / name / "report.json").read_text()) for name in ("one", "two"))
    assert {name: one[name] for name in MEASURED} == {name: two[name] for name in MEASURED}
    assert len(one["fallback"]["evaluations"]) > 3, "the search has tried some plans"
    assert not list(tmp_path.glob("two.*")), "nothing is left beside the folder"


def _variants(folder: Path) -> None:
    """Save what a run chooses from, and the quantizer of an engine with dynamic ranges that the first process chose."""
    config = RunConfig.model_validate(yaml.safe_load((folder / "run.yaml").read_text(encoding="utf-8")))
    torch.manual_seed(0)
    model, batches = Mlp().eval(), [torch.randn(4, 32) for _ in range(5)]
    # Those for this CPU, which without VNNI are others.
    (first, second), _ = cpu_candidates(("openvino", "onnxruntime"))
    quantizer = Quantizer(preset="plain", backend=first, activations={"calibrator": "output"})
    quantizer.calibrate(model, batches, split=True)
    found = for_all_variants(config, quantizer, (first, second))
    assert set(found) == {(first, "int8", False), *([(second, "int8", False)] if get_world_size() > 1 else [])}
    kept = f"rank {get_rank()} of {get_world_size()}"
    for name, ranges in ((first, "static"), (second, "static"), (second, "dynamic")):
        wanted = {"quantizer": {"backend": name, "activations": {"ranges": ranges}}}
        chosen = quantizer_of(RunConfig.model_validate({**config.model_dump(mode="json"), **wanted}), found)
        with alone():
            chosen.save(folder / kept / f"{name}-{ranges}")


def _variants_of_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    _variants(Path(folder))
    distributed.barrier()
    distributed.destroy_process_group()


def test_all_processes_have_the_quantizer_that_is_chosen(tmp_path: Path) -> None:
    _write(tiny_run(tmp_path), tmp_path)
    run_ranks(_variants_of_rank, tmp_path)
    _variants(tmp_path)
    one = tmp_path / "rank 0 of 1"
    assert len(list(one.iterdir())) == 3
    for place in one.iterdir():
        first, second = (tmp_path / f"rank {rank} of 2" / place.name for rank in range(2))
        _same_files(place, first)
        assert (second / "ranges.safetensors").read_bytes() == (first / "ranges.safetensors").read_bytes()


def _stops(self: Any) -> Any:
    """End a run after its training, whose checkpoints then stay beside the folder."""
    raise QuantizerError("trained")


def _train(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    patch = pytest.MonkeyPatch().setattr
    patched(patch)
    patch("quantizer.pipeline.stages._drop_of_engine", lambda *_: None)
    patch("quantizer.pipeline.stages.inspect", _stops)
    assert _main(rank, folder, "run", f"{folder}/run.yaml", "--output", f"{folder}/two") == 1


@pytest.mark.nightly
def test_a_training_by_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run(_with_port(tmp_path))
    for name, count in (("tuning", 8), ("training", 13)):
        write_rows(tmp_path / f"{name}.csv", count, seed=count)
        run["data"][name] = {"name": "text-csv", "path": str(tmp_path / f"{name}.csv")}
    # The last batch has one row, which both processes take.
    run["data"]["batch_size"] = 4
    config = _write({**run, "qat": {"epochs": 1, "evaluations": 2, "tolerance": 1.0}}, tmp_path)
    run_ranks(_train, tmp_path)
    patched(monkeypatch.setattr)
    monkeypatch.setattr("quantizer.pipeline.stages._drop_of_engine", lambda *_: None)
    monkeypatch.setattr("quantizer.pipeline.stages.inspect", _stops)
    assert main(["run", str(config), "--output", str(tmp_path / "one")]) == 1
    one, two = (tmp_path / f"{name}.training" / "last.safetensors" for name in ("one", "two"))
    first, second = (read_facts(path)["course"] for path in (one, two))
    assert (first["steps"], first["best"]) == (second["steps"], second["best"]) == (4, 4)
    assert first["scores"][0] == second["scores"][0], "before the first step nothing differs"
    assert second["losses"] == pytest.approx(first["losses"], rel=1e-4)
    before = load_file(tmp_path / "model" / "model.safetensors")
    trained, expected = ({name.removeprefix("model."): x for name, x in load_file(path).items()} for path in (two, one))
    # A bias of keys has no gradient, but for what rounding leaves.
    moved = [n for n in before if not n.endswith("key.bias") and not torch.equal(before[n], expected[n])]
    assert len(moved) > 20
    for name in moved:
        change = (expected[name] - before[name]).abs().max()
        assert (trained[name] - expected[name]).abs().mean() < 1e-3 * change, name


def _dies(folder: Path) -> Path:
    """A script for ``torchrun`` whose second process is killed when it takes its third score of a search."""
    path = folder / "dies.py"
    path.write_text(
        f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import pytest
import test_run_ranks
from quantizer.cli.main import main
from quantizer.utils.distributed import get_rank
from quantizer.pipeline.scores import TaskMetric

test_run_ranks.patched(pytest.MonkeyPatch().setattr)
taken, take = [], TaskMetric.__call__

def dying(self, model):
    taken.append(model)
    if len(taken) == 3 and get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return take(self, model)

TaskMetric.__call__ = dying
sys.exit(main(["run", {str(folder / "run.yaml")!r}, "--output", {str(folder / "out")!r}]))
""",
        encoding="utf-8",
    )
    return path


# Without torchrun and a whole run: tests/calibration/test_split_batches.py and test_ranks_alike.py.
@pytest.mark.nightly
def test_a_process_that_is_killed_ends_the_run(tmp_path: Path) -> None:
    _write(_files(tmp_path), tmp_path)
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(_dies(tmp_path))]
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=240, env=env, check=False)
    printed = done.stdout + done.stderr
    assert done.returncode != 0
    assert re.search(r"(error|terminated): rank 1 \(process \d+\) ended before the run was complete", printed), printed
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.search"], "only the scores so far are kept"
    assert len(list((tmp_path / "out.search").rglob("entry.json"))) == 2


def test_a_sweep_is_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert main(["run", str(_write(_files(tmp_path), tmp_path)), "amp.batches=1,2"]) == 1
    assert "a sweep runs in one process, and this is rank 1 of 2" in capsys.readouterr().err


def test_processes_that_do_not_find_each_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = _write(_files(tmp_path), tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert main(["run", str(config), "--output", str(tmp_path / "out")]) == 1
    assert "but the processes cannot connect" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
