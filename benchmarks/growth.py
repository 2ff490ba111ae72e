"""What grows with a model: the export with its layers, calibration and the saved folder with the sites of one group.

    python benchmarks/growth.py [WORD]...

layers: BERT of 2, 8, 32 and 96 layers, 128 wide, random weights: processor seconds of an export, without imports.

sites: 750, 1,500 and 3,000 linears that read one tensor, and so are one group: a calibration pass in float passes, the
folder's YAML in MiB, processor seconds of saving and loading.

tries: BERT of 14 layers, 384 and 768 wide, in 128 groups, of which a search keeps in float a tenth, others each time:
processor milliseconds until the frozen proxy is there, built anew and by ``FrozenTries``, and those of its pass.

memory: BERT of 8 and 16 layers, 256 wide, one row of 1,024 tokens: the peak of an eager float pass and of one
batch of ``amp``, in MiB beyond what the process had, in a process whose freed memory goes back at once.

plans: 40 linears of 2,048 x 2,048: the first plan, one after one weight changed, and what every other call that needs
the plan takes once it is there; with the largest magnitude and with the least error as the range of a weight.

search: BERT of 14 layers, 384 wide: a whole ``max_drop`` search, and the shares of its time until the frozen proxies
are there and in their passes.

parameters: residual blocks, 2,048 wide, of 0.1, 0.3 and 1.0 B parameters: seconds and peak of each stage.

large: residual blocks, 4,096 wide, of 0.67 and 2.28 B parameters (over 2 GB of INT8), without the float model:
seconds and peak of an export; the file in OpenVINO, its output held against that of the frozen proxy.

check: ``quantizer check`` of files of some hundred MiB: seconds and peak beyond the libraries.

bfloat16: BERT of 4 layers, 768 wide, in bfloat16: a pass of the frozen proxy in passes of the float model.
"""

from __future__ import annotations

import gc
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers
from common import heading
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.observe.float16_modules import Float32Modules, convert_floats
from quantizer.plan.apply import FrozenTries, frozen_proxy
from quantizer.plan.site_plan import SitePlan, with_fallback

_LAYERS = (2, 8, 32, 96)
_SITES = (750, 1500, 3000)
_WIDTHS = (384, 768)
_SHAPES = ((8, 1024), (16, 1024))
_PASSES = 5
_BLOCKS = (3, 9, 30)
_STAGES = ("proxy", "calibrate", "plan", "quantize", "save")
_LARGE = (5, 17)
_CHECKED = (3,)


def layer_rows() -> None:
    print(heading("Export by layers: BERT, 128 wide, for OpenVINO, one thread"))
    print("| layers | seconds |\n|---|---|")
    _export(1)
    for layers in _LAYERS:
        print(f"| {layers} | {_export(layers):.1f} |", flush=True)


def _export(layers: int) -> float:
    model, batch = _bert(layers, 128, intermediate=256)
    quantizer = Quantizer(preset="plain", backend="openvino")
    quantizer.calibrate(model, [batch], progress=False)
    frozen = quantizer.quantize(model)
    with tempfile.TemporaryDirectory() as folder:
        return _seconds(lambda: quantizer.export(frozen, Path(folder) / "model.onnx", batch))


def _bert(
    layers: int, width: int, *, intermediate: int, tokens: tuple[int, int] = (2, 32)
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return an encoder with random weights, and a batch."""
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": intermediate, "num_attention_heads": 4, "vocab_size": 1000}
    config = transformers.BertConfig(num_hidden_layers=layers, max_position_embeddings=max(512, tokens[1]), **sizes)
    ids = torch.randint(0, 1000, tokens)
    return transformers.BertModel(config).eval(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class _Wide(nn.Module):
    """Linears that read one tensor."""

    def __init__(self, linears: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(16, 16) for _ in range(linears))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([linear(x) for linear in self.linears]).sum(0)


def site_rows() -> None:
    print(heading("Sites of one group: linears that read one tensor, one thread"))
    print("| linears | calibration pass, float passes | YAML MiB | save s | load s |\n|---|---|---|---|---|")
    for sites in _SITES:
        torch.manual_seed(0)
        model, x = _Wide(sites).eval(), torch.randn(4, 16)
        quantizer = Quantizer(preset="plain", backend="openvino")
        proxy = quantizer.calib(model)
        observing, plain = _median(proxy, x), _median(model, x)
        with tempfile.TemporaryDirectory() as folder:
            saved = Path(folder) / "saved"
            saving = _seconds(partial(quantizer.save, saved))
            size = (saved / "quantizer.yaml").stat().st_size / 2**20
            loading = _seconds(partial(Quantizer.load, saved))
        print(f"| {sites} | {observing / plain:.1f} | {size:.1f} | {saving:.1f} | {loading:.1f} |", flush=True)


def _median(model: nn.Module, x: Tensor) -> float:
    """Return the median seconds of a pass; the first, which imports and allocates, does not count."""
    with torch.no_grad():
        return statistics.median([_seconds(lambda: model(x)) for _ in range(_PASSES + 1)][1:])


def _seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def try_rows() -> None:
    print(heading("A try of a search: BERT of 14 layers, one thread"))
    print("| wide | new ms | again ms | pass ms |\n|---|---|---|---|")
    for width in _WIDTHS:
        model, batch = _bert(14, width, intermediate=4 * width, tokens=(8, 32))
        quantizer = Quantizer(preset="plain", backend="openvino")
        quantizer.calibrate(model, [batch], progress=False)
        plan, choice, tries = quantizer.plan, random.Random(0), FrozenTries(model)
        groups = sorted({operand.group for entry in plan.values() for operand in entry.operands if operand.group})
        tries.of(plan)
        rows = []
        for _ in range(_PASSES):
            tried = with_fallback(plan, dict.fromkeys(choice.sample(groups, len(groups) // 10), "tried"))
            new, again = _seconds(partial(frozen_proxy, model, tried)), _seconds(partial(tries.of, tried))
            with torch.no_grad():
                rows.append((new, again, _seconds(partial(tries.of(tried), **batch))))
        cells = [f"{1000 * statistics.median(column):.0f}" for column in zip(*rows, strict=True)]
        print(f"| {width} | {' | '.join(cells)} |", flush=True)


def memory_rows() -> None:
    print(heading("Memory of one amp batch: BERT, 256 wide, one thread"))
    print("| layers | tokens | float pass MiB | amp MiB | in float passes |\n|---|---|---|---|---|")
    for layers, tokens in _SHAPES:
        plain, measured = _in_a_process("memory", layers, tokens)
        print(f"| {layers} | {tokens:,} | {plain:.0f} | {measured:.0f} | {measured / plain:.1f} |", flush=True)


def _memory_of(layers: int, tokens: int) -> None:
    model, batch = _bert(layers, 256, intermediate=1024, tokens=(1, tokens))
    model.set_attn_implementation("eager")
    small = {name: value[:, :64] for name, value in batch.items()}
    quantizer = Quantizer(preset="plain", backend="openvino")
    quantizer.calibrate(model, [small], progress=False)
    amp = quantizer.amp(model)
    amp(**small)
    with torch.no_grad():
        model(**small)
        print(_peak_mib(partial(model, **batch)), _peak_mib(partial(amp, **batch)))


class _Blocks(nn.Module):
    """Residual blocks of two linears, with 8 width^2 weights each."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(blocks))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = nn.functional.layer_norm(x + down(nn.functional.gelu(up(x))), x.shape[-1:])
        return x


def _blocks(blocks: int, width: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return _Blocks(blocks, width).eval(), torch.randn(4, width)


def parameter_rows() -> None:
    print(heading("Stages by parameters: blocks of linears, 2,048 wide, one thread"))
    print("| parameters | weights MiB | stage | seconds | peak beyond the weights MiB |\n|---|---|---|---|---|")
    for blocks in _BLOCKS:
        count, *figures = _in_a_process("parameters", blocks)
        for stage, seconds, peak in zip(_STAGES, figures[::2], figures[1::2], strict=True):
            print(
                f"| {count / 1e9:.2f} B | {count * 4 / 2**20:,.0f} | {stage} | {seconds:.1f} | {peak:.0f} |", flush=True
            )


def _parameters_of(blocks: int) -> None:
    model, x = _blocks(blocks, 2048)
    quantizer = Quantizer(preset="plain", backend="openvino")
    _warm_up(quantizer)
    quantizer, kept = Quantizer(preset="plain", backend="openvino"), {}
    with tempfile.TemporaryDirectory() as folder:
        calls = (
            lambda: quantizer.proxy(model),
            lambda: quantizer.calibrate(model, [x], progress=False),
            lambda: quantizer.plan,
            lambda: kept.update(frozen=quantizer.quantize(model)),
            lambda: quantizer.save(Path(folder) / "saved"),
        )
        base, figures = _status_mib("VmRSS"), []
        for call in calls:
            _restart_peak()
            figures += [_seconds(call), _status_mib("VmHWM") - base]
        print(sum(parameter.numel() for parameter in model.parameters()), *figures)


def _warm_up(quantizer: Quantizer) -> None:
    """Import and compile what the first use does, on another model."""
    model, x = _blocks(1, 64)
    quantizer.calibrate(model, [x], progress=False)
    with tempfile.TemporaryDirectory() as folder:
        frozen = quantizer.quantize(model)
        frozen(x)
        quantizer.save(Path(folder) / "saved")
        quantizer.export(frozen, Path(folder) / "model.onnx", x)


def large_rows() -> None:
    print(heading("Export beyond 2 GB of INT8: blocks of linears, 4,096 wide, for OpenVINO, one thread"))
    print("| blocks | file MiB | seconds | peak beyond the frozen proxy MiB | in files |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        path = str(Path(folder) / "model.onnx")
        for blocks in _LARGE:
            size, seconds, peak = _in_a_process("large", blocks, path)
            print(f"| {blocks} | {size:,.0f} | {seconds:.1f} | {peak:,.0f} | {peak / size:.2f} |", flush=True)
            loading, error, checked = _in_a_process("loaded", path)
            print(f"OpenVINO: loaded and run in {loading:.1f} s, {error:.1f} dB from the frozen proxy")
            print(f"quantizer check: {checked:.0f} MiB, {checked / size:.3f} files", flush=True)


def _large_of(blocks: int, path: str) -> None:
    quantizer = Quantizer(preset="plain", backend="openvino")
    _warm_up(quantizer)
    quantizer = Quantizer(preset="plain", backend="openvino")
    # In half the memory; the file is in float32 but for its integers.
    torch.set_default_dtype(torch.bfloat16)
    model, x = _blocks(blocks, 4096)
    torch.set_default_dtype(torch.float32)
    quantizer.calibrate(model, [x], progress=False)
    frozen = quantizer.quantize(model)
    del model, quantizer
    exporter = Quantizer(preset="plain", backend="openvino")
    seconds = [0.0]

    def export() -> None:
        seconds[0] = _seconds(lambda: exporter.export(frozen, Path(path), x))

    peak = _peak_mib(export)
    files = [file for file in Path(path).parent.glob(f"{Path(path).name}*") if file.suffix != ".npz"]
    print(sum(file.stat().st_size for file in files) / 2**20)
    print(seconds[0], peak)
    # The file computes in float32, with the same integers.
    same = convert_floats(frozen, torch.float32, Float32Modules()).eval()
    with torch.no_grad():
        np.savez(f"{path}.npz", x=x.float().numpy(), y=same(x.float()).numpy())


def _loaded_of(path: str) -> None:
    import openvino

    from quantizer.check import check_file

    checked = _peak_mib(lambda: check_file(path, "openvino"))
    known, found = np.load(f"{path}.npz"), []

    def run() -> None:
        compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_NUM_THREADS": 1})
        found.append(next(iter(compiled([known["x"]]).values())))

    seconds = _seconds(run)
    error = 10 * np.log10(np.square(known["y"]).sum() / np.square(known["y"] - found[0]).sum())
    print(seconds, error, checked)


def check_rows() -> None:
    print(heading("quantizer check: memory beyond the libraries, one thread"))
    print("| file MiB | seconds | peak MiB | in files |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for blocks in _CHECKED:
            path = str(Path(folder) / f"{blocks}.onnx")
            size, *_ = _in_a_process("large", blocks, path)
            seconds, peak = _in_a_process("check", path)
            print(f"| {size:.0f} | {seconds:.2f} | {peak:.0f} | {peak / size:.3f} |", flush=True)


def _check_of(path: str) -> None:
    import onnx  # noqa: F401

    from quantizer.check import check_file

    seconds = [0.0]

    def check() -> None:
        seconds[0] = _seconds(lambda: check_file(path, "openvino"))

    peak = _peak_mib(check)
    print(seconds[0], peak)


def bfloat16_rows() -> None:
    print(heading("A frozen pass of bfloat16 weights, in float passes of bfloat16, one thread"))
    print("| model | rows | float ms | frozen ms | in float passes |\n|---|---|---|---|---|")
    for name, tokens in (("BERT of 4 layers, 768 wide", (1, 16)), ("BERT of 4 layers, 768 wide", (8, 128))):
        model, batch = _bert(4, 768, intermediate=3072, tokens=tokens)
        model = model.bfloat16()
        quantizer = Quantizer(preset="plain", backend="openvino")
        quantizer.calibrate(model, [batch], progress=False)
        frozen = quantizer.quantize(model)
        plain, rounding = _median_of(model, batch), _median_of(frozen, batch)
        cells = f"{1000 * plain:.0f} | {1000 * rounding:.0f} | {rounding / plain:.1f}"
        print(f"| {name} | {tokens[0]} x {tokens[1]} | {cells} |", flush=True)


def _median_of(model: nn.Module, batch: dict[str, Tensor]) -> float:
    with torch.no_grad():
        return statistics.median([_seconds(partial(model, **batch)) for _ in range(_PASSES + 1)][1:])


def plan_rows() -> None:
    print(heading("The plan, asked for again: 40 linears of 2,048 x 2,048, 640 MiB, one thread"))
    asking = (
        "the first plan",
        "one weight changed",
        "q.plan",
        "print(q.ranges)",
        "q.scales()",
        "save",
        "quantize",
        "amp",
    )
    print("| range of weights | " + " | ".join(asking) + " |\n|" + "---|" * (1 + len(asking)))
    for calibrator in ("max", "mse"):
        cells = [f"{1000 * seconds:.0f} ms" for seconds in _plan_seconds(calibrator)]
        print(f"| {calibrator} | {' | '.join(cells)} |", flush=True)


def _plan_seconds(calibrator: str) -> list[float]:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(40))).eval(), torch.randn(8, 2048)
    quantizer = Quantizer(preset="plain", backend="onnxruntime", weights={"calibrator": calibrator})
    quantizer.calibrate(model, [x], progress=False)
    # Imports and compiles what only the first of a process does.
    _warm_up(Quantizer(preset="plain", backend="onnxruntime"))
    first = _seconds(lambda: quantizer.plan)
    with tempfile.TemporaryDirectory() as folder:
        calls = (
            lambda: quantizer.plan,
            lambda: str(quantizer.ranges),
            quantizer.scales,
            partial(quantizer.save, Path(folder) / "saved"),
            partial(quantizer.quantize, model),
            partial(quantizer.amp, model),
        )
        again = [_seconds(call) for call in calls]
    with torch.no_grad():
        model.get_parameter("7.weight").mul_(2)
    return [first, _seconds(lambda: quantizer.plan), *again]


def search_rows() -> None:
    print(heading("A max_drop search: BERT of 14 layers, 384 wide, 8 x 32 tokens, one thread"))
    print("| groups | tries | seconds | new proxies and codes | passes |\n|---|---|---|---|---|")
    model, batch = _bert(14, 384, intermediate=1536, tokens=(8, 32))
    quantizer = Quantizer(preset="plain", backend="openvino")
    quantizer.calibrate(model, [batch], progress=False)
    amp = quantizer.amp(model)
    amp(**batch)
    spent, made = {"proxies": 0.0, "passes": 0.0, "tries": 0.0}, FrozenTries.of
    with torch.no_grad():
        truth = model(**batch).last_hidden_state

    def of(tries: FrozenTries, plan: Mapping[str, SitePlan]) -> nn.Module:
        start = time.process_time()
        try:
            return made(tries, plan)
        finally:
            spent["proxies"] += time.process_time() - start

    def metric(tried: nn.Module) -> float:
        start = time.process_time()
        with torch.no_grad():
            error = float((tried(**batch).last_hidden_state - truth).norm() / truth.norm())
        spent["passes"] += time.process_time() - start
        spent["tries"] += 1
        return -error

    FrozenTries.of = of  # type: ignore[method-assign]
    try:
        seconds = _seconds(lambda: quantizer.fallback(amp, max_drop=0.03, metric=metric))
    finally:
        FrozenTries.of = made  # type: ignore[method-assign]
    groups = {operand.group for entry in quantizer.plan.values() for operand in entry.operands if operand.group}
    shares = " | ".join(f"{100 * spent[key] / seconds:.0f}%" for key in ("proxies", "passes"))
    print(f"| {len(groups)} | {spent['tries']:.0f} | {seconds:.1f} | {shares} |", flush=True)


def _in_a_process(name: str, *args: object) -> list[float]:
    """Return the figures that a fresh process prints, whose freed memory goes back at once."""
    call = [sys.executable, __file__, "in_a_process", name, *map(str, args)]
    # Without the threshold blocks of memory stay with the process, by chance.
    done = subprocess.run(call, env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}, stdout=-1, check=True)
    return [float(word) for word in done.stdout.split()]


def _restart_peak() -> None:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak_mib(call: Callable[[], object]) -> float:
    """Return the most memory during a call beyond what there was before it; Linux only."""
    _restart_peak()
    before = _status_mib("VmRSS")
    call()
    return _status_mib("VmHWM") - before


def _status_mib(name: str) -> float:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


_TABLES = {
    "layers": layer_rows,
    "sites": site_rows,
    "plans": plan_rows,
    "memory": memory_rows,
    "tries": try_rows,
    "search": search_rows,
    "parameters": parameter_rows,
    "large": large_rows,
    "check": check_rows,
    "bfloat16": bfloat16_rows,
}
_OF_A_PROCESS: dict[str, Callable[..., None]] = {
    "memory": _memory_of,
    "parameters": _parameters_of,
    "large": _large_of,
    "loaded": _loaded_of,
    "check": _check_of,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["in_a_process"]:
        _OF_A_PROCESS[sys.argv[2]](*(int(word) if word.isdigit() else word for word in sys.argv[3:]))
    else:
        for table in sys.argv[1:] or _TABLES:
            _TABLES[table]()
