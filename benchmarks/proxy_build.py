"""What a proxy of a BERT-base-size model costs: seconds to build it, memory beside the parameters, the off forward.

python benchmarks/proxy_build.py [ROUNDS]
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
import tracemalloc

import torch
from common import call, heading
from transformers import BertConfig, BertModel

from quantizer import Quantizer
from quantizer.engines import interleaved_latency


def seconds_to_build(model: torch.nn.Module) -> float:
    start = time.perf_counter()
    Quantizer().proxy(model)
    return time.perf_counter() - start


def bytes_to_hold(model: torch.nn.Module) -> int:
    """Python objects that a proxy keeps alive, and the tensors that it does not share with the model."""
    gc.collect()
    tracemalloc.start()
    proxy = Quantizer().proxy(model)
    gc.collect()
    objects, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    shared = {tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    tensors = [*proxy.parameters(), *proxy.buffers()]
    return objects + sum(tensor.nbytes for tensor in tensors if tensor.data_ptr() not in shared)


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = BertModel(BertConfig()).eval()
    first = seconds_to_build(model)
    later = statistics.median(seconds_to_build(model) for _ in range(5))
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    held = bytes_to_hold(model)

    ids = torch.randint(1000, 30000, (8, 128))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    models = {"float": model, "proxy, off": Quantizer().proxy(model)}
    samples = interleaved_latency({name: call(m, batch) for name, m in models.items()}, rounds=rounds)
    medians = {name: statistics.median(times) for name, times in samples.items()}
    # Neighbours in time see the same machine.
    pairs = zip(samples["proxy, off"], samples["float"], strict=True)
    ratio = statistics.median(off / plain for off, plain in pairs)

    print(heading("A proxy of BERT-base with random weights, one thread"))
    print("| what | figure |\n|---|---|")
    print(f"| the first proxy of the process | {first:.2f} s |")
    print(f"| each one after it, median of 5 | {later:.2f} s |")
    print(f"| memory beside {parameters / 2**20:.0f} MiB of parameters | {100 * held / parameters:.2f} % |")
    for name, median in medians.items():
        print(f"| forward 8 x 128, {name}, median of {rounds} | {median * 1000:.0f} ms |")
    print(f"| off proxy to float, median of the rounds' ratios | {ratio:.3f} |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
