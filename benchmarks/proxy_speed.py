"""What proxies cost: calibration, the frozen forward and the off proxy against the float model, interleaved.

python benchmarks/proxy_speed.py [ROUNDS]
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from common import calibrated, call, heading, minilm

from quantizer import Quantizer
from quantizer.engines import interleaved_latency


def observing(model: torch.nn.Module, **activations: object) -> torch.nn.Module:
    return Quantizer(preset="plain", backend="openvino", activations=activations).calib(model)


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    model, task = minilm()
    batch = task.random_batch(8, 128)
    quantizer = calibrated(model, task, backend="openvino")
    start = time.perf_counter()
    frozen = quantizer.quantize(model)
    seconds = time.perf_counter() - start
    models = {
        "float": model,
        "proxy, off": quantizer.proxy(model),
        "calibration, max": observing(model, calibrator="max"),
        "calibration, percentile": observing(model, calibrator="percentile"),
        "frozen proxy": frozen,
    }
    samples = interleaved_latency({name: call(m, batch) for name, m in models.items()}, rounds=rounds)
    medians = {name: statistics.median(times) for name, times in samples.items()}
    print(heading("Proxy speed, MiniLM-L6, 8 x 128, one thread"))
    print(f"quantize() takes {seconds:.2f} s\n")
    print("| pass | median ms | ratio to float |\n|---|---|---|")
    for name, median in medians.items():
        print(f"| {name} | {median * 1000:.0f} | {median / medians['float']:.2f} |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
