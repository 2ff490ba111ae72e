"""What INT8 costs a search: NDCG@10 and recall@100 on Cranfield, beside other quantizers with their defaults.

    python benchmarks/retrieval.py [minilm | mpnet]... [--tools NAME...] [--queries N] [--documents N]

Cranfield has 1,400 abstracts, and 112 queries with judgements. A judgement from 1 to 4 is a gain of 5 minus it, as its
README says. All tools calibrate on the same 96 abstracts and 32 titles of others, whose length is that of queries; no
query is among them. Engines are what each tool makes of its defaults; ``benchmarks/field/tools.py`` says how.

Intervals are of the difference from float, over the queries, which are drawn alike for both. With fewer documents, the
judged ones come first; queries that lose all of theirs are left out.
"""

from __future__ import annotations

import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import torch
from common import MINILM, heading
from data import cranfield, cranfield_texts

from quantizer.tasks import Example, build_task, load_examples, load_model, load_tokenizer

sys.path.append(str(Path(__file__).resolve().parent / "field"))

from subjects import Subject, mpnet_source, of_task
from tools import REFERENCE, TOOLS

_MODELS: dict[str, tuple[Callable[[Path], str], int]] = {
    "minilm": (lambda _: MINILM, 256),
    "mpnet": (mpnet_source, 384),
}
"""The source of each model, and the most tokens that it was made for."""
_TOOLS = (REFERENCE, "openvino", "onnxruntime", "nncf", "quantize-dynamic")


def _subject(source: str, tokens: int, examples: list[Example], work: Path) -> Subject:
    model = load_model(source, "retrieval")
    task = build_task("retrieval", model, load_tokenizer(source), max_length=tokens)
    texts = cranfield_texts(work).read_text().splitlines()
    return of_task("Cranfield", task, model, task.sample_batches(texts), examples, tokens)


def _row(title: str, figures: dict[str, float], base: float, seconds: float) -> str:
    recall = "recall_at_100"
    cells = [
        f"{figures['score']:.4f} ({figures['score'] / base:.2%})",
        f"{figures['gained']:+.4f} [{figures['low']:+.4f}, {figures['high']:+.4f}]",
        f"{figures[recall]:.4f}",
        f"{figures[f'{recall}_difference']:+.4f} "
        f"[{figures[f'{recall}_difference_low']:+.4f}, {figures[f'{recall}_difference_high']:+.4f}]",
        f"{figures['sqnr_db']:.1f}",
        f"{seconds:.0f}",
    ]
    return f"| {title} | {' | '.join(cells)} |"


def _table(name: str, tools: list[str], examples: list[Example], work: Path) -> None:
    source, tokens = _MODELS[name]
    subject = _subject(source(work), tokens, examples, work)
    base = subject.predict(_in_torch(subject))
    score = subject.figures(base, base)["score"]
    print(f"\n### {name}, {len(examples)} queries, {len(base.outputs) - len(examples)} documents, {tokens} tokens\n")
    print("| tool | NDCG@10 | difference | recall@100 | difference | SQNR, dB | seconds to make |")
    print("|---|---|---|---|---|---|---|")
    print(_row("torch, float32", subject.figures(base, base), score, 0), flush=True)
    for tool in tools:
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            # Some libraries print to the standard output.
            with redirect_stdout(sys.stderr):
                run = TOOLS[tool].make(subject, Path(folder)).load()
            seconds = time.monotonic() - began
            print(_row(TOOLS[tool].title, subject.figures(base, subject.predict(run)), score, seconds), flush=True)


def _in_torch(subject: Subject) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda batch: subject.model(**batch)


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("models", nargs="*", help=" or ".join(_MODELS))
    parser.add_argument("--tools", nargs="*", default=_TOOLS, help=", ".join(TOOLS))
    parser.add_argument("--queries", type=int, help="the first so many")
    parser.add_argument("--documents", type=int, help="so many")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(heading("Retrieval: NDCG@10 and recall@100 on Cranfield"))
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        examples = load_examples("trec", path=cranfield(work, arguments.queries, arguments.documents))
        for name in arguments.models or _MODELS:
            _table(name, list(arguments.tools), examples, work)
