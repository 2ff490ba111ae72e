"""What one gets who sets nothing, beside other quantizers with their defaults: MiniLM on three sets of texts.

    python benchmarks/default_accuracy.py [presets | peers]...

Calibrated on 128 texts of each set and compared with the float model on 256 others, as the SQNR of the pooled
embeddings in dB: sentences of STS-B (train, dev), questions to a bank (banking77: texts 0, 3, 6.. and 1, 4, 7..) and
questions of TREC (likewise). Nothing was tuned on these. Ours quantizes linears, products of attention and the residual
adds that ``auto`` lets in; how many products each peer rounds is in brackets.

Figures of ours are of the frozen proxy, in processor seconds of one thread; accuracy.py shows how close engines are.
"""

from __future__ import annotations

import csv
import math
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout

import torch
from common import MINILM
from common import SHARED
from common import heading
from common import minilm

from quantizer import Quantizer
from quantizer.tasks import Batch
from quantizer.tasks import load_tokenizer
from quantizer.tasks.outputs import embeddings_from_hidden_state

_CALIBRATION, _SCORED = 128, 256


def _spread(items: list[str], number: int) -> list[str]:
    return [items[place * len(items) // number] for place in range(number)]


def _sentences(split: str) -> list[str]:
    with (SHARED / f"data/stsb/stsb-en-{split}.csv").open(newline="") as file:
        return [text for row in csv.reader(file) for text in row[:2]]


def _thirds(texts: list[str]) -> tuple[list[str], list[str]]:
    return _spread(texts[0::3], _CALIBRATION), _spread(texts[1::3], _SCORED)


def _sets() -> dict[str, tuple[list[str], list[str]]]:
    """Texts to calibrate on and texts to score on, by the name of the set."""
    with (SHARED / "data/banking77/train.csv").open(newline="") as file:
        banking = [row[0] for row in csv.reader(file)][1:]
    lines = (SHARED / "data/trec/TREC.train.all").read_text(encoding="latin1").splitlines()
    trec = [line.split(" ", 1)[1].strip() for line in lines if " " in line]
    return {
        "STS-B dev": (_sentences("train")[:_CALIBRATION], _spread(_sentences("dev"), _SCORED)),
        "banking77": _thirds(banking),
        "TREC": _thirds(trec),
    }


class _Bench:
    def __init__(self) -> None:
        self.model, self.task = minilm()
        self._tokenizer = load_tokenizer(MINILM)
        self._sets = _sets()
        self._expected = {name: self._embedded(self._run, texts) for name, (_, texts) in self._sets.items()}
        print(f"| quantizer | {' | '.join(self._sets)} | seconds |\n|---|{'---|' * len(self._sets)}---|")

    def _run(self, batch: Batch) -> object:
        return self.model(**batch)

    def _batches(self, texts: list[str], size: int) -> list[Batch]:
        options = {"padding": True, "truncation": True, "max_length": 128, "return_tensors": "pt"}
        parts = (texts[start : start + size] for start in range(0, len(texts), size))
        return [dict(self._tokenizer(part, **options)) for part in parts]

    def _embedded(self, run: Callable[[Batch], object], texts: list[str]) -> torch.Tensor:
        found = []
        with torch.no_grad():
            for batch in self._batches(texts, 32):
                output = run(batch)
                hidden = torch.as_tensor(output["last_hidden_state"])  # type: ignore[index]
                found.append(embeddings_from_hidden_state(hidden, batch["attention_mask"]))
        return torch.cat(found)

    def row(self, name: str, make: Callable[[list[Batch]], tuple[Callable[[Batch], object], str]]) -> None:
        """Print the SQNR on each set of what ``make`` makes of its calibration batches, and a note on it."""
        cells, seconds, note = [], 0.0, ""
        for key, (calibration, scored) in self._sets.items():
            began = time.process_time()
            run, note = make(self._batches(calibration, 16))
            seconds = max(seconds, time.process_time() - began)
            expected = self._expected[key]
            error = (self._embedded(run, scored) - expected).square().sum()
            cells.append(f"{10 * math.log10(float(expected.square().sum() / error)):.1f}")
        print(f"| {name}{note} | {' | '.join(cells)} | {seconds:.0f} |", flush=True)


def presets(bench: _Bench) -> None:
    """Ours, by target and preset."""
    for backend in ("openvino", "onnxruntime", "tensorrt"):
        for preset in ("fast", "balanced", "accurate"):

            def make(
                batches: list[Batch], backend: str = backend, preset: str = preset
            ) -> tuple[Callable[[Batch], object], str]:
                quantizer = Quantizer(backend=backend, preset=preset)
                quantizer.calibrate(bench.model, batches, progress=False)
                frozen = quantizer.quantize(bench.model)
                return (lambda batch: frozen(**batch)), ""

            bench.row(f"ours, {backend}, {preset}", make)


def peers(bench: _Bench) -> None:
    """Others, with linears and matmuls quantized."""
    # Large libraries, which the other table does not need.
    from peers import PEERS

    for name, peer in PEERS["linears and matmuls"].items():

        def make(batches: list[Batch], peer: object = peer) -> tuple[Callable[[Batch], object], str]:
            # What the libraries print goes beside the table, not into it.
            with redirect_stdout(sys.stderr):
                run, rounded = peer(bench.model, bench.task, batches)  # type: ignore[operator]
            return run, f" ({rounded})"

        bench.row(name, make)


_TABLES = {"presets": presets, "peers": peers}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(heading("Defaults: MiniLM, SQNR of the embeddings in dB"))
    for table in sys.argv[1:] or _TABLES:
        _TABLES[table](_Bench())
