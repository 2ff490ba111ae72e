"""The view of a lowered model: which kernel computes each of its quantized sites."""

from __future__ import annotations

from collections import Counter
from typing import Any

from quantizer.proxy.lowered.lower import SiteKernel
from quantizer.report.tables.tables import Column
from quantizer.views.table_view import View


class Kernels(View[SiteKernel]):
    """The quantized sites of a lowered model, those without a kernel first."""

    columns = (Column(title="site", mono=True), "operation", "kernel", "why none")

    def title(self) -> str:
        found = Counter(row.kernel for row in self.rows)
        without = found.pop(None, 0)
        parts = [f"{count} by {name}" for name, count in sorted(found.items(), key=lambda item: str(item[0]))]
        tail = [f"{without} rounded and computed in floats"] if without else []
        return f"quantized sites: {', '.join([*parts, *tail]) or 'none'}"

    def cells(self) -> list[list[Any]]:
        return [
            [row.name, row.operation, row.kernel or "none", row.reason]
            for row in sorted(self.rows, key=lambda row: row.kernel is not None)
        ]
