"""The page of the zoo: what every architecture comes to, by modality, and what changed since another run."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import date
from typing import Any

from choose import Row
from page_sections import exports_section, tools_section
from stages import STAGES

from quantizer.report import collect_machine, collect_versions

__all__ = ["changes", "page"]

_FULL, _TENTH = 0.995, 10
_NOISE = 3.0  # dB, and percent of the multiply-adds: less is no change
_SHOWN = 3
_ALIKE = 60.0  # dB
_HEAD = """# The zoo

<!-- Made by `make zoo`: change benchmarks/zoo, not this page. -->

Every architecture that transformers can build from a config, as a tiny random model: whether a proxy that is off gives
its outputs bit for bit, how much of its multiply-adds is in sites, and whether it is calibrated, quantized, saved and
loaded. Shares say which products are found, not how much of a model of real size they are. SQNR is that of the first
output, by `preset: plain` with two batches; random models amplify rounding more than trained ones, above all where they
choose experts, queries or neighbours by their values.
"""


def page(rows: Sequence[Row], exported: Sequence[Row] = (), taken: Sequence[Row] = ()) -> tuple[str, dict[str, Any]]:
    """Return the page, and the same as a record for ``changes``; without a section of what was not measured.

    Args:
        rows: those of all architectures.
        exported: of some of them, their files and engines.
        taken: of the same ones, what each tool made of them.
    """
    machine, versions = collect_machine(), collect_versions()
    told = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "openvino") if name in versions)
    ran = [row for row in rows if row.get("built") == "ok"]
    text = [_HEAD, *_summary(rows, ran)]
    groups = sorted({row["modality"] for row in ran})
    for group in groups:
        text += _table(group, [row for row in ran if row["modality"] == group])
    text += [*exports_section(exported), *tools_section(taken)]
    text += _not_built([row for row in rows if row.get("built") != "ok"])
    text += [f"\nMachine: {machine['cpu']}, {machine['cores']} cores; {told}; {date.today().isoformat()}."]
    return "\n".join(text) + "\n", {"rows": list(rows), "exports": list(exported), "tools": list(taken)}


def changes(before: Iterable[Row], after: Iterable[Row]) -> list[str]:
    """Return a line for each architecture that came, went, ended otherwise, or has another share or SQNR."""
    old, new = ({_key(row): row for row in rows} for rows in (before, after))
    lines = [f"{name}: new" for name in new.keys() - old.keys()] + [f"{name}: gone" for name in old.keys() - new.keys()]
    for name in new.keys() & old.keys():
        first, second = old[name], new[name]
        if _verdict(first) != _verdict(second):
            lines.append(f"{name}: {_verdict(first)} -> {_verdict(second)}")
        for fact, factor, unit in (("share", 100.0, "% of multiply-adds"), ("sqnr_db", 1.0, " dB")):
            values = [row.get(fact) for row in (first, second)]
            if None not in values and abs(values[0] - values[1]) * factor > _NOISE:
                lines.append(f"{name}: {values[0] * factor:.1f} -> {values[1] * factor:.1f}{unit}")
    return sorted(lines)


def _key(row: Row) -> str:
    return f"{row['library']} {row['name']}"


def _verdict(row: Row) -> str:
    """Return "ok", or the stage in which a row ended with its reason."""
    stage = row.get("stage", "start")
    if "ended" in row:
        return f"{stage}: {row['ended']}"
    return "ok" if row.get(stage) == "ok" else f"{stage}: {row.get(stage)}"


def _summary(rows: Sequence[Row], ran: Sequence[Row]) -> list[str]:
    lines = [
        f"Of {len(rows)} architectures {len(ran)} run as a tiny model.\n",
        "| stage | passed | of |",
        "|---|---|---|",
    ]
    names = {
        "off": "a proxy that is off, bit for bit",
        "calibrated": "calibrated, observing changes nothing",
        "quantized": "quantized",
        "saved": "saved, loaded, the same outputs",
    }
    for stage in STAGES[1:]:
        tried = [row for row in ran if stage in row or row.get("stage") == stage]
        lines.append(f"| {names[stage]} | {sum(row.get(stage) == 'ok' for row in tried)} | {len(tried)} |")
    lines += ["", "| modality | architectures | median share | tenth percentile | at 99.5% or more | median SQNR |"]
    lines += ["|---|---|---|---|---|---|"]
    groups: dict[str, list[Row]] = {}
    for row in ran:
        if row.get("share") is not None:
            groups.setdefault(row["modality"], []).append(row)
    for group, found in sorted(groups.items()):
        shares = sorted(row["share"] for row in found)
        tenth = shares[(len(shares) - 1) // _TENTH]
        decibels = [row["sqnr_db"] for row in found if row.get("sqnr_db") is not None]
        middle = f"{statistics.median(decibels):.1f} dB" if decibels else "-"
        full = sum(share >= _FULL for share in shares)
        lines.append(f"| {group} | {len(found)} | {statistics.median(shares):.1%} | {tenth:.1%} | {full} | {middle} |")
    return [*lines, ""]


def _table(group: str, rows: Sequence[Row]) -> list[str]:
    lines = [f"\n## {group[0].upper()}{group[1:]}\n"]
    lines += ["| architecture | model | parameters | sites | share | SQNR | notes |", "|---|---|---|---|---|---|---|"]
    for row in sorted(rows, key=_key):
        share, decibels = row.get("share"), row.get("sqnr_db")
        cells = [
            f"`{row['name']}`",
            row["model"],
            f"{row['parameters']:,}",
            str(row.get("sites", "-")),
            "-" if share is None else f"{share:.1%}",
            "-" if decibels is None else f"{decibels:.1f} dB",
            "; ".join(_notes(row)),
        ]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return lines


def _notes(row: Row) -> list[str]:
    notes = [] if _verdict(row) == "ok" else [_verdict(row)]
    not_quantized = [(reason, part) for reason, part in row.get("not_quantized", {}).items() if part > 1 - _FULL]
    notes += [f"{part:.1%} {reason}" for reason, part in not_quantized[:_SHOWN]]
    eager = row.get("eager_db")
    if eager is not None and eager < _ALIKE:
        notes.append(f"the model's own attention by separate products gives other values ({eager:.1f} dB)")
    return notes


def _not_built(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    parts = Counter("part" if "no class of a model" in str(row.get("built")) else "other" for row in rows)
    lines = ["\n## Not run\n", f"{parts['part']} configs are parts of others, or have no model class in transformers."]
    lines += ["The others, with the first reason that was met:\n", "| architecture | reason |", "|---|---|"]
    for row in sorted(rows, key=_key):
        reason = str(row.get("ended") or row.get("built"))
        if "no class of a model" not in reason:
            lines.append(f"| `{row['name']}` | {reason.removeprefix('NotBuilt: ').replace('|', '/')} |")
    return lines
