"""The share of multiply-adds in low precision of every architecture of the test zoo, and what escapes, with reasons.

    python benchmarks/zoo_coverage.py

Random tiny models: the shares say which products are found, not how much of a model of real size they are.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from pathlib import Path

import torch
from common import heading

from quantizer import Quantizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "zoo"))

import architectures

_FULL = 0.99
_SETS = (
    architectures.TEXT_ENCODERS,
    architectures.DECODERS,
    architectures.MIXTURES_OF_EXPERTS,
    architectures.ENCODER_DECODERS,
    architectures.VISION,
    architectures.AUDIO,
    architectures.MULTIMODAL,
    architectures.TORCH,
)


def main() -> None:
    torch.set_num_threads(1)
    print(heading("Share of multiply-adds covered, the architectures of the test zoo"))
    shares: list[float] = []
    rows: list[str] = []
    for architecture in (entry for entries in _SETS for entry in entries):
        model = architecture.build()
        quantizer = Quantizer(preset="fast", backend="openvino")
        calib = quantizer.calib(model)
        with torch.no_grad():
            calib(**architecture.batch(0))
        coverage = quantizer.coverage
        assert coverage.share is not None
        shares.append(coverage.share)
        if coverage.share < _FULL:
            reasons: Counter[str] = Counter()
            for row in coverage.escaped:
                reasons[f"{row.operation}: {row.reason}"] += row.multiply_adds
            parts = "; ".join(
                f"{reason} ({100 * count / coverage.multiply_adds:.1f}%)" for reason, count in reasons.most_common()
            )
            rows.append(f"| {architecture.name} | {100 * coverage.share:.1f} | {parts} |")
    full = sum(share >= _FULL for share in shares)
    print(f"{len(shares)} architectures, median {100 * statistics.median(shares):.1f}%, {full} at 99% or more\n")
    print("| below 99% | share % | what escapes |\n|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
