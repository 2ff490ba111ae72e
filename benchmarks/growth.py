"""What grows with a model: the export with its layers, calibration and the saved folder with the sites of one group.

    python benchmarks/growth.py [layers | sites | tries | memory]...

layers: BERT of 2, 8, 32 and 96 layers, 128 wide, random weights: processor seconds of an export, without imports.

sites: 750, 1,500 and 3,000 linears that read one tensor, and so are one group: a calibration pass in float passes, the
folder's YAML in MiB, processor seconds of saving and loading.

tries: BERT of 14 layers, 384 and 768 wide, in 128 groups, of which a search puts back a tenth, others each time:
processor milliseconds until the frozen proxy is there, built anew and by ``FrozenTries``, and those of its pass.

memory: BERT of 8 and 16 layers, 256 wide, one row of 1,024 tokens: the peak of an eager float pass and of one
batch of ``amp``, in MiB beyond what the process had, in a process whose freed memory goes back at once.
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
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import transformers
from common import heading
from torch import Tensor
from torch import nn

from quantizer import Quantizer
from quantizer.plan.apply import frozen_proxy
from quantizer.plan.frozen_tries import FrozenTries
from quantizer.plan.site_plan import with_fallback

_LAYERS = (2, 8, 32, 96)
_SITES = (750, 1500, 3000)
_WIDTHS = (384, 768)
_SHAPES = ((8, 1024), (16, 1024))
_PASSES = 5


def layer_rows() -> None:
    print(heading("Export by layers: BERT, 128 wide, for OpenVINO, one thread"))
    print("| layers | seconds |\n|---|---|")
    _export(1)
    for layers in _LAYERS:
        print(f"| {layers} | {_export(layers):.1f} |", flush=True)


def _export(layers: int) -> float:
    model, batch = _bert(layers, 128, intermediate=256)
    quantizer = Quantizer(preset="fast", backend="openvino")
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
        quantizer = Quantizer(preset="fast", backend="openvino")
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
        quantizer = Quantizer(preset="fast", backend="openvino")
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
        call = [sys.executable, __file__, "memory_of", str(layers), str(tokens)]
        # Without the threshold blocks of memory stay with the process, by chance.
        done = subprocess.run(call, env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}, stdout=-1, check=True)
        plain, measured = map(float, done.stdout.split()[-2:])
        print(f"| {layers} | {tokens:,} | {plain:.0f} | {measured:.0f} | {measured / plain:.1f} |", flush=True)


def _memory_of(layers: int, tokens: int) -> None:
    model, batch = _bert(layers, 256, intermediate=1024, tokens=(1, tokens))
    model.set_attn_implementation("eager")
    small = {name: value[:, :64] for name, value in batch.items()}
    quantizer = Quantizer(preset="fast", backend="openvino")
    quantizer.calibrate(model, [small], progress=False)
    amp = quantizer.amp(model)
    amp(**small)
    with torch.no_grad():
        model(**small)
        print(_peak_mib(partial(model, **batch)), _peak_mib(partial(amp, **batch)))


def _peak_mib(call: Callable[[], object]) -> float:
    """Return the most memory during a call beyond what there was before it; Linux only."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _status_mib("VmRSS")
    call()
    return _status_mib("VmHWM") - before


def _status_mib(name: str) -> float:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


_TABLES = {"layers": layer_rows, "sites": site_rows, "tries": try_rows, "memory": memory_rows}


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["memory_of"]:
        _memory_of(*map(int, sys.argv[2:]))
    else:
        for table in sys.argv[1:] or _TABLES:
            _TABLES[table]()
