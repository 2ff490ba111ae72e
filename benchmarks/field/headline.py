"""The figures of README.md and docs/index.md, made from the kept rows: a sentence, a table, and docs/speed.svg.

    python benchmarks/field/headline.py     (make figures)

The text between two marks of a page is replaced. The rows of one machine are shown; the others are on the pages of
``docs/benchmarks``.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from field_page import OURS, REFERENCE
from kept_rows import kept_rows

__all__ = ["MACHINE", "marked", "speed_svg", "summary", "table", "write_headline"]

Row = Mapping[str, Any]
Model = Mapping[str, Row]

_ROOT = Path(__file__).resolve().parents[2]
MACHINE = "amd-epyc-avx512-bf16"
"""The kind of machine that is shown, as its file of rows is called."""
_BATCH = "8"
_TOOLS = {
    OURS: ("quantizer", "#2f7fd6"),
    "nncf": ("NNCF, OpenVINO", "#c26a12"),
    "quantize-dynamic": ("ONNX Runtime, dynamic", "#1f8f6a"),
    "quantize-static": ("ONNX Runtime, static", "#a35bd0"),
}
"""The title and the colour of each tool."""
_MODELS = {
    "minilm": "MiniLM-L6",
    "mpnet": "MPNet-base",
    "dinov2": "DINOv2-small",
    "efficientnet": "EfficientNet-Lite0",
    "smollm2": "SmolLM2-135M",
    "whisper": "Whisper encoder",
}
_METRICS = {
    "spearman": "Spearman",
    "accuracy": "accuracy",
    "top-1": "top-1",
    "perplexity": "perplexity, lower is better",
    "wer": "word error rate, lower is better",
}
_CLOSE, _FAR = 0.01, 0.03
"""Losses as a share of the float score: the bounds of the verdicts "usable" and "do not use"."""
_BEGIN, _END = "<!-- figures {name}: made by `make figures` -->", "<!-- end of figures {name} -->"

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 760, 336, 34, 62, 296
_FONT = "font-family='system-ui, Segoe UI, Roboto, DejaVu Sans, sans-serif'"


def write_headline(rows: Sequence[Row], root: Path) -> None:
    """Write the figures into the pages and the picture of a repository.

    Args:
        rows: the kept rows of the machine that is shown.
        root: the folder of the repository.
    """
    models = _measured(rows)
    docs = root / "docs"
    (docs / "speed.svg").write_text(speed_svg(models), encoding="utf-8")
    parts = {"summary": summary(models), "table": table(models)}
    for page in (root / "README.md", docs / "index.md"):
        text = page.read_text(encoding="utf-8")
        for name, part in parts.items():
            text = marked(text, name, part)
        page.write_text(text, encoding="utf-8")


def marked(text: str, name: str, part: str) -> str:
    """Return a page with the text between its two marks replaced; a page without these marks is unchanged."""
    begin, end = (mark.format(name=name) for mark in (_BEGIN, _END))
    before, found, after = text.partition(begin)
    if not found:
        return text
    _, closed, rest = after.partition(end)
    if not closed:
        raise SystemExit(f"the page has the mark {begin} without {end}")
    return f"{before}{begin}\n\n{part}\n\n{end}{rest}"


def _measured(rows: Sequence[Row]) -> dict[str, Model]:
    """Return the rows of each model by tool, without those that failed."""
    found: dict[str, dict[str, Row]] = {name: {} for name in _MODELS}
    for row in rows:
        if row["model"] in found and "failed" not in row:
            found[row["model"]][row["tool"]] = row
    return {name: tools for name, tools in found.items() if OURS in tools and REFERENCE in tools}


def summary(models: Mapping[str, Model]) -> str:
    """Return the headline: the mean speed-ups, and on how many models the score is near that of the float model."""
    ours, nncf = (_mean(models, tool) for tool in (OURS, "nncf"))
    close, nncf_close = (_close(models, tool) for tool in (OURS, "nncf"))
    cpu = next(iter(models.values()))[OURS]["machine"]["cpu"]
    return (
        f"On an {cpu} CPU, INT8 engines of `quantizer` are **{ours:.1f}x as fast** as ONNX Runtime in float32. Engines "
        f"of NNCF are\n{nncf:.1f}x as fast (geometric mean over {len(models)} models, batch {_BATCH}, one thread). The "
        f"score is within {_CLOSE:.0%} of float, or better, on {close}\nof the {len(models)} "
        f"models (NNCF: {nncf_close})."
    )


def _close(models: Mapping[str, Model], tool: str) -> int:
    """Return on how many models the score of a tool is near the float model's."""
    return sum(_loss(tools, tool) <= _CLOSE for tools in models.values() if tool in tools)


def table(models: Mapping[str, Model]) -> str:
    """Return the table of speeds and scores, with the machine and the conditions below it."""
    lines = ["| model | score | float | " + " | ".join(title for title, _ in _TOOLS.values()) + " |"]
    lines.append("|---" * (3 + len(_TOOLS)) + "|")
    for name, tools in models.items():
        first = tools[OURS]
        base = _score(tools[REFERENCE]["score"])
        cells = [_cell(tools.get(tool)) for tool in _TOOLS]
        lines.append(f"| {_MODELS[name]} | {_METRICS[first['metric']]} | {base} | {' | '.join(cells)} |")
    machine = next(iter(models.values()))[OURS]["machine"]
    minutes = {tool: _minutes(models, tool) for tool in (OURS, "nncf")}
    return "\n".join(
        [
            *lines,
            "",
            f"Each cell: speed relative to ONNX Runtime in float32 at batch {_BATCH}, then the score. One thread of an "
            f"{machine['cpu']}",
            f"({machine['instructions']}). All tools ran with their defaults and the same calibration",
            "samples. `quantizer` runs non-quantized operations in bfloat16 where that is faster.",
            f"These runs took {minutes[OURS]} minutes per model, because `quantizer` built, timed and scored several "
            "engines.",
            f"NNCF took {minutes['nncf']} minutes.",
        ]
    )


def _cell(row: Row | None) -> str:
    return "failed" if row is None else f"{_speed(row):.2f}x, {_score(row['score'])}"


def _score(value: float) -> str:
    return f"{value:.4f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def _speed(row: Row) -> float:
    return float(row["latency"][_BATCH]["speedup"])


def _mean(models: Mapping[str, Model], tool: str) -> float:
    """Return the geometric mean of the speed-ups of a tool."""
    speeds = [_speed(tools[tool]) for tools in models.values() if tool in tools]
    return math.exp(sum(map(math.log, speeds)) / len(speeds))


def _minutes(models: Mapping[str, Model], tool: str) -> str:
    """Return the least and the most minutes that quantizing took."""
    spent = [tools[tool]["quantize_s"] / 60 for tools in models.values() if tool in tools]
    return " to ".join(f"{value:.1f}" if value < 2 else f"{value:.0f}" for value in (min(spent), max(spent)))


def _loss(tools: Model, tool: str) -> float:
    """Return the loss of a tool as a share of the float score; negative is a gain."""
    return float(-tools[tool]["gained"] / abs(tools[REFERENCE]["score"]))


def speed_svg(models: Mapping[str, Model]) -> str:
    """Return the bar chart: the speed of each tool on each model, pale where its score is far below the float one."""
    highest = max(_speed(row) for tools in models.values() for tool, row in tools.items() if tool in _TOOLS)
    unit = (_BOTTOM - _TOP) / math.ceil(highest)
    label = f"Speed relative to ONNX Runtime in float32, batch {_BATCH}"
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img' {_FONT} font-size='12'>",
        f"<title>{label}</title>",
        f"<rect width='{_WIDTH}' height='{_HEIGHT}' rx='6' fill='#ffffff'/>",
        _text(_LEFT, 17, f"{label}. Pale: the score is more than {_FAR:.0%} worse than in float.", "start"),
        *_legend(),
    ]
    for times in range(math.ceil(highest) + 1):
        y = _BOTTOM - times * unit
        look = "#555555" if times == 1 else "#dddddd"
        parts.append(f"<line x1='{_LEFT}' x2='{_WIDTH - 8}' y1='{y:.1f}' y2='{y:.1f}' stroke='{look}'/>")
        parts.append(_text(_LEFT - 6, y + 4, f"{times}x", "end"))
    width = (_WIDTH - 8 - _LEFT) / len(models)
    for number, (name, tools) in enumerate(models.items()):
        parts += _group(_LEFT + number * width, width, unit, tools)
        parts.append(_text(_LEFT + (number + 0.5) * width, _BOTTOM + 22, _MODELS[name], "middle"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _group(left: float, width: float, unit: float, tools: Model) -> Iterator[str]:
    """Draw the bars of one model."""
    bar = width * 0.84 / len(_TOOLS)
    for place, (tool, (title, colour)) in enumerate(_TOOLS.items()):
        x = left + width * 0.08 + place * bar
        if tool not in tools:
            yield _text(
                x + bar / 2, _BOTTOM - 5, "failed", "start", f" transform='rotate(-90 {x + bar / 2:.1f} {_BOTTOM - 5})'"
            )
            continue
        row = tools[tool]
        top = _BOTTOM - _speed(row) * unit
        pale = " fill-opacity='0.35'" if _loss(tools, tool) > _FAR else ""
        yield (
            f"<rect x='{x:.1f}' y='{top:.1f}' width='{bar - 2:.1f}' height='{_BOTTOM - top:.1f}' fill='{colour}'{pale}>"
            f"<title>{html.escape(title)}: {_cell(row)}</title></rect>"
        )
        yield _text(x + bar / 2 - 1, top - 4, f"{_speed(row):.1f}", "middle")


def _legend() -> Iterator[str]:
    for place, (title, colour) in enumerate(_TOOLS.values()):
        x = _LEFT + place * 178
        yield f"<rect x='{x}' y='27' width='11' height='11' fill='{colour}'/>"
        yield _text(x + 16, 37, title, "start")


def _text(x: float, y: float, content: str, anchor: str, more: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' fill='#333333'{more}>{html.escape(content)}</text>"


if __name__ == "__main__":
    write_headline(kept_rows(Path(__file__).parent / "rows")[MACHINE], _ROOT)
