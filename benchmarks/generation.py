"""A decoder that writes token by token, in INT8: the engine beside its proxy, and its speed beside others.

    python benchmarks/generation.py [ROUNDS] [PROMPTS]

SmolLM2-135M of its package, one step with its cache of keys and values as inputs and outputs, calibrated on 32
paragraphs of WikiText-2, with all defaults. At each step engine and proxy read the tokens that the proxy wrote: the
shares are those of steps at which both choose the same token, once with the caches that each made itself, whose
differences add up, and once with the proxy's cache for both, where a step is compared by itself. Beside them stands how
often the proxy itself does if its products have the noise of float sums, which any other order of sums makes, and how
often it chooses what the float model does. Latencies are of one token with 128 in the cache, medians of one
interleaved run with one thread, each with the float engine of ONNX Runtime as 1. OpenVINO's own way for such models,
weights in INT8 or INT4 with products in float, is in the same run.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import torch
from common import SHARED, heading
from data import smollm2

from quantizer import Quantizer
from quantizer.engines import BuildOptions, Engine, build_engine, interleaved_latency, load_engine
from quantizer.export.exporter import export_onnx
from quantizer.pipeline.compare_outputs import float_noise
from quantizer.tasks import Plain, Task, build_task, tasks
from quantizer.tasks.text_generation import next_cache

NAME = "text-generation-with-past"
FLOAT = "ONNX Runtime, float32"
READ, WRITTEN, CACHED = 32, 32, 128
Step = Callable[[Mapping[str, torch.Tensor]], Any]


def paragraphs() -> list[Plain]:
    text = (SHARED / "data/wikitext2/test.txt").read_text(encoding="utf-8")
    return [Plain(line.strip()) for line in text.splitlines() if len(line) > 400]


def agreement(
    frozen: Step, engine: Step, noisy: Step, plain: Step, start: torch.Tensor, empty: Mapping[str, torch.Tensor]
) -> Counter[str]:
    """How often the proxy's token is chosen while it writes: by the engine with either cache, with noise, in float."""
    read, seen, same = start, start.shape[1], Counter[str]()
    caches = [dict(empty) for _ in range(4)]
    for _ in range(WRITTEN):
        given = {"input_ids": read, "attention_mask": torch.ones(1, seen, dtype=torch.long)}
        theirs, own, moved, float_ = (
            step({**given, **cache}) for step, cache in zip((frozen, engine, noisy, plain), caches, strict=True)
        )
        token = chosen(theirs)
        same["own cache"] += chosen(own) == token
        same["proxy's cache"] += chosen(engine({**given, **caches[0]})) == token
        same["proxy with noise"] += chosen(moved) == token
        same["float model"] += chosen(float_) == token
        caches = [next_cache(made) for made in (theirs, own, moved, float_)]
        read, seen = torch.tensor([[token]]), seen + 1
    return same


def chosen(made: Any) -> int:
    """The token with the largest logit."""
    return int(torch.as_tensor(made["logits"])[0, -1].argmax())


def of_module(module: torch.nn.Module) -> Step:
    return lambda batch: module(**batch)


def with_noise(proxy: torch.nn.Module) -> Step:
    """The proxy with other noise at each step."""
    seeds = count()

    def step(batch: Mapping[str, torch.Tensor]) -> Any:
        with float_noise(proxy, next(seeds)):
            return proxy(**batch)

    return step


def of_engine(engine: Engine) -> Step:
    return lambda batch: engine({spec.name: np.asarray(batch[spec.name]).astype(spec.dtype) for spec in engine.inputs})


def built(backend: str, path: Path) -> Engine:
    options = BuildOptions(dynamic={"batch": (1, 1, 2), "sequence": (1, 1, 256)})
    made = build_engine(backend, path, path.with_suffix(".engine"), options)
    return load_engine(backend, made.path, threads=1)


def compressed(path: Path, mode: Any, **options: object) -> Callable[[Mapping[str, np.ndarray]], object]:
    """The float file with its weights in few bits, as NNCF compresses them for OpenVINO."""
    import nncf

    core = openvino.Core()
    model = nncf.compress_weights(core.read_model(path), mode=mode, **options)
    request = core.compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": 1}).create_infer_request()
    return lambda arrays: request.infer(dict(arrays))


def quantized(backend: str, model: torch.nn.Module, task: Task, rows: list[Plain], folder: Path) -> tuple[Any, Engine]:
    quantizer = Quantizer(backend=backend)
    quantizer.calibrate(model, task.batches(rows), progress=False)
    frozen = quantizer.quantize(model)
    return frozen, built(backend, quantizer.export(frozen, folder / f"{backend}.onnx", task.example(rows)))


def main(rounds: int, prompts: int) -> None:
    import nncf

    torch.set_num_threads(1)
    whole, tokenizer = smollm2()
    model = tasks[NAME].module_of(whole)
    task = build_task(NAME, model, tokenizer, max_length=160, batch_size=4)
    rows = paragraphs()
    calls: dict[str, Callable[[Mapping[str, np.ndarray]], object]] = {}
    lines = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = export_onnx(model, folder / "float.onnx", task.example(rows), opset=20, dtype=torch.float32)
        calls[FLOAT] = built("onnxruntime", plain)
        calls["OpenVINO, float"] = built("openvino", plain)
        calls["OpenVINO, weights in INT8"] = compressed(plain, nncf.CompressWeightsMode.INT8_ASYM)
        calls["OpenVINO, weights in INT4"] = compressed(plain, nncf.CompressWeightsMode.INT4_SYM, group_size=64)
        for backend, title in (("onnxruntime", "ONNX Runtime, ours"), ("openvino", "OpenVINO, ours")):
            frozen, engine = quantized(backend, model, task, rows[200:232], folder)
            calls[title] = engine
            same = Counter[str]()
            for row in rows[:prompts]:
                start = tokenizer(row.text, return_tensors="pt").input_ids[:, :READ]
                with torch.no_grad():
                    steps = of_module(frozen), of_engine(engine), with_noise(frozen), of_module(model)
                    same += agreement(*steps, start, model.empty_cache(1))
            shares = ", ".join(f"{name} {number / (prompts * WRITTEN):.1%}" for name, number in same.items())
            lines.append(f"{title}: the proxy's token in {prompts * WRITTEN} steps: {shares}")
        arrays = {key: np.asarray(value) for key, value in task.random_batch(1, CACHED + 1).items()}
        times = interleaved_latency({key: partial(run, arrays) for key, run in calls.items()}, rounds=rounds)
    print(heading("Token by token: SmolLM2-135M, one thread"))
    print(f"| engine | ms a token, {CACHED} in the cache | speed |\n|---|---|---|")
    for key, seconds in times.items():
        ratio = statistics.median(slow / fast for slow, fast in zip(times[FLOAT], seconds, strict=True))
        print(f"| {key} | {1000 * statistics.median(seconds):.1f} | {ratio:.2f}x |")
    print("\n" + "\n".join(lines))


if __name__ == "__main__":
    main(*(int(value) for value in (sys.argv[1:] + ["20", "10"][len(sys.argv) - 1 :])))
