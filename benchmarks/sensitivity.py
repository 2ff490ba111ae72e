"""Which measure of sensitivity tells the truth, for how much work; and what is gained by keeping groups in float.

    python benchmarks/sensitivity.py [measures | fallback] [stsb | sst2 | efficientnet | smollm2]...

The truth is the divergence of the model's output with one group alone quantized, and how much it falls with that group
alone kept in float. For each measure: Spearman's correlation with both, how many of the five truly worst groups are
among its first eight, and its cost in float passes. Beside ours: the absolute squared error at the site, and the
formula of Model Optimizer's ``auto_quantize``, the sum of the squared products of gradient and error, element by
element.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cases import CASES, Case
from common import heading
from scipy.stats import spearmanr
from torch import Tensor

from quantizer import Quantizer
from quantizer.algorithms.sensitivity.groups import Pending, groups_of, watched
from quantizer.algorithms.sensitivity.metric import Divergence
from quantizer.engines import load_engine
from quantizer.observe.statistics import padding_mask
from quantizer.proxy.build import sites_of

_WORST, _FIRST = 5, 8

Costs = dict[str, float]


def _run(model: Any, batch: Any) -> Any:
    return model(**batch) if isinstance(batch, Mapping) else model(batch)


def _mask(batch: Any) -> Tensor | None:
    return padding_mask(batch) if isinstance(batch, Mapping) else None


def _measured(case: Case, quantizer: Quantizer, measure: str) -> tuple[Costs, float]:
    """Each group's cost by one of our measures, and the seconds it took."""
    amp = quantizer.amp(case.model, measure=measure, granularity=case.granularity)
    start = time.process_time()
    with torch.no_grad():
        for batch in case.measured:
            _run(amp, batch)
    seconds = time.process_time() - start
    return {row.group: row.error for row in quantizer.sensitivity}, seconds


def _kept_in_float(case: Case, quantizer: Quantizer) -> Costs:
    """How much the divergence falls with one group alone kept in float."""
    amp = quantizer.amp(case.model, measure="local", granularity=case.granularity)
    with torch.no_grad():
        for batch in case.measured:
            _run(amp, batch)
        reference = [Divergence(_run(amp, batch), _mask(batch)) for batch in case.measured]

        def divergence() -> float:
            frozen = quantizer.quantize(case.model)
            return sum(d.of(_run(frozen, batch)) for d, batch in zip(reference, case.measured, strict=True))

        quantizer.clear_fallback()
        whole = divergence()
        gains = {}
        for group in groups_of(sites_of(amp), quantizer.plan, case.granularity):
            quantizer.fallback(amp, names=group.parts)
            gains[group.name] = whole - divergence()
    quantizer.clear_fallback()
    return gains


def _peers(case: Case, quantizer: Quantizer) -> dict[str, Costs]:
    """The absolute error at the site, and the products of gradient and error element by element."""
    proxy = quantizer.amp(case.model, measure="local", granularity=case.granularity)
    groups = groups_of(sites_of(proxy), quantizer.plan, case.granularity)
    absolute: Costs = defaultdict(float)
    products: Costs = defaultdict(float)

    def add(changes: dict[str, Tensor], gradient: Tensor) -> None:
        for name, change in changes.items():
            products[name] += float((gradient * change).double().square().sum())

    def visit(site: object, output: Tensor, pending: Pending) -> Tensor:
        changes = pending.changes().by_group
        for name, change in changes.items():
            absolute[name] += float(change.double().square().mean())
        if output.requires_grad:
            output.register_hook(partial(add, changes))
        return output

    for batch in case.measured:
        with torch.no_grad():
            divergence = Divergence(_run(case.model, batch), _mask(batch))
        with watched(groups, visit):
            output = proxy.forward(**batch) if isinstance(batch, Mapping) else proxy.forward(batch)
        probe = divergence.probe(output)
        parameters = [p for p in case.model.parameters() if p.requires_grad]
        torch.autograd.grad(probe.tensors, parameters, probe.directions, allow_unused=True)
    return {"absolute error at the site": absolute, "gradient x error, by element": products}


def measures(case: Case) -> None:
    """The table of one model."""
    quantizer = case.quantizer()
    with torch.no_grad():
        _run(case.model, case.measured[0])
        # One thread, so the time of the process is that of the work, whatever else the machine does.
        start = time.process_time()
        for batch in case.measured:
            _run(case.model, batch)
        float_pass = time.process_time() - start
    found: dict[str, tuple[Costs, float | None]] = {
        measure: _measured(case, quantizer, measure) for measure in ("gradient", "local", "output")
    }
    found |= {name: (costs, None) for name, costs in _peers(case, quantizer).items()}
    truths = {"alone": found["output"][0], "kept in float": _kept_in_float(case, quantizer)}
    names = sorted(truths["alone"])
    print(heading(f"Measures of sensitivity: {case.name}, {len(names)} groups ({case.granularity})"))
    print("| measure | correlation, alone | kept in float | worst 5 in first 8, alone | kept in float | float passes |")
    print("|---|---|---|---|---|---|")
    for measure, (costs, seconds) in found.items():
        cells = [
            f"{spearmanr([costs[n] for n in names], [t[n] for n in names]).statistic:.3f}" for t in truths.values()
        ]
        first = sorted(names, key=lambda name: -costs[name])[:_FIRST]
        for truth in truths.values():
            worst = sorted(names, key=lambda name, truth=truth: -truth[name])[:_WORST]  # type: ignore[misc]
            cells.append(str(len(set(worst) & set(first))))
        passes = "" if seconds is None else f"{seconds / float_pass:.1f}"
        print(f"| {measure} | {' | '.join(cells)} | {passes} |", flush=True)


def fallback(case: Case) -> None:
    """What the default measure's first groups win back, on rows that nothing was tuned on."""
    print(heading(f"Fallback: {case.name}, every kind of site"))
    print("| model | quantizers kept in float | figures |\n|---|---|---|")

    def row(name: str, back: str, run: Any) -> None:
        figures = ", ".join(f"{key} {value:.4f}" for key, value in case.report(run).items())
        print(f"| {name} | {back} | {figures} |", flush=True)

    def both(name: str, back: str, quantizer: Quantizer) -> None:
        frozen = quantizer.quantize(case.model)
        row(f"{name}, proxy", back, lambda batch: _run(frozen, batch))
        if case.example is not None:
            with tempfile.TemporaryDirectory() as folder:
                path = quantizer.export(frozen, Path(folder) / "model.onnx", case.example)
                engine = load_engine("openvino", path, threads=1)
                row(f"{name}, OpenVINO", back, lambda batch: engine({n: batch[n].numpy() for n in engine.input_names}))

    row("float", "", lambda batch: _run(case.model, batch))
    quantizer = case.quantizer()
    both("every site", "0", quantizer)
    amp = quantizer.amp(case.model)
    with torch.no_grad():
        for batch in case.measured:
            _run(amp, batch)
    rows = {row.group: row for row in quantizer.sensitivity}
    total = sum(row.activations for row in rows.values())
    # What is counted is quantizers, so those groups come first that win most for each.
    costs = {group: float(row.activations) for group, row in rows.items()}
    ranking = sorted(rows.values(), key=lambda row: -row.error / row.activations)
    count = spent = 0
    while spent + ranking[count].activations <= case.share * total:
        spent += ranking[count].activations
        count += 1
    quantizer.fallback(amp, num=count, costs=costs)
    both(f"{count} groups kept in float", f"{spent} of {total}, {100 * spent / total:.1f} %", quantizer)


if __name__ == "__main__":
    torch.set_num_threads(1)
    wanted = sys.argv[1:]
    tables = [table for table in (measures, fallback) if table.__name__ in wanted] or [measures, fallback]
    for case_name in [name for name in CASES if name in wanted] or CASES:
        one = CASES[case_name]()
        for table in tables:
            table(one)
