"""The words that reports, pages and messages use, each in a plain sentence.

``docs/glossary.md`` is made of it: ``python -m quantizer.report.page.glossary > docs/glossary.md``.
"""

from __future__ import annotations

import re
import sys

GLOSSARY = {
    "amax": "The largest magnitude that a range holds. What lies beyond it is clipped to it. Symmetric INT8 has steps "
    "of amax / 127.",
    "backend": "The library and the kind of processor that an engine is for, such as `openvino` or `tensorrt-rtx`.",
    "calibration": "Running the float model on sample inputs, and recording which values occur at each operand.",
    "calibrator": "The rule that makes a range from the recorded values: `max`, `percentile`, `mse`, `entropy`.",
    "covered share": "The share of all multiply-adds of the model that run in low precision. It says how much of the "
    "work is quantized, while the count of sites says how many operations are: a residual add or a classifier's head "
    "is one site and next to no work.",
    "dynamic range": "A range that is taken from each batch as it runs, instead of from calibration.",
    "engine": "The file that a library runs, built from the ONNX file for one kind of processor.",
    "escaped": "A product that torch computed and that runs in floats; its reason is beside it. The column says "
    "'in float'.",
    "fallback": "Leaving part of the model in float to save accuracy or time; also called putting back.",
    "frozen": "With ranges that are fixed and weights that are stored as integers; what `quantize()` returns.",
    "group": "Sites that are quantized, or put back to float, together, because they share an input or an output.",
    "indices": "Whole numbers such as token ids, positions and shapes. Layers that compute with them alone are neither "
    "quantized nor in float.",
    "operand": "One input of an operation: its weight, or an activation. Each has a range of its own.",
    "per channel": "With one scale for each output channel of a weight, instead of one for all of it (per tensor).",
    "proxy": "The copy of your model, with your weights, in which quantized operations round as the engine will. The "
    "model itself is never changed.",
    "PTQ, QAT": "Quantization after training (PTQ), and training on with the rounding in it (QAT).",
    "put back": "Returned to float, by a budget, by a name that you gave, or because INT8 is slower there.",
    "Q/DQ": "QuantizeLinear and DequantizeLinear, the pairs of ONNX operators that mark what is quantized. A library "
    "that builds an engine turns them into integer kernels.",
    "range": "The values that an operand's codes can stand for. A wide one has coarse steps, a narrow one clips.",
    "rest": "All that is not quantized; it runs in float32, float16 or bfloat16.",
    "scale": "The width of one step: a code times the scale is the value that it stands for.",
    "sensitivity": "How much worse the output, or the score, gets when one group alone is quantized.",
    "site": "One operation of the model that can be quantized, such as one linear layer, one matmul of attention, or "
    "one residual add.",
    "smoothing": "Moving large channels of an activation into the weight, which has room for them (SmoothQuant).",
    "SQNR": "Signal to quantization noise ratio, in dB: how far the rounding error lies below the values. 6 dB more "
    "is half the error; an output with 20 dB is off by a tenth of its size, one with 40 dB by a hundredth.",
    "tuning rows": "Labelled rows that a choice is scored on. None of them is among those of the final score.",
    "zero point": "The code that stands for 0. A symmetric range has none; an asymmetric one wastes no codes on values "
    "that do not occur.",
}
"""Terms, in the order of the alphabet."""

_UNUSUAL = ("amax", "frozen", "operand", "proxy", "put back", "Q/DQ", "site", "smoothing", "SQNR", "zero point")
"""Those that a reader of an error may meet for the first time."""


def words_in(message: str) -> dict[str, str]:
    """Return the unusual terms that a message uses, each with its sentence, in the order of the glossary.

    A term counts as a whole word, also in the plural; in quotes or in a dotted name it is a name, not a word.
    """
    return {
        term: GLOSSARY[term]
        for term in _UNUSUAL
        if re.search(rf"(?<![\w.'\"`/-]){re.escape(term)}s?(?![\w'\"`/(=:-]|\.\w)", message)
    }


def glossary_page() -> str:
    """Return the text of ``docs/glossary.md``."""
    lines = [
        "# Glossary",
        "",
        "<!-- made by  python -m quantizer.report.page.glossary > docs/glossary.md -->",
        "",
        "The words of reports, guides and messages. The report has the same list at its end.",
        "",
        "| word | meaning |",
        "|---|---|",
        *(f"| {term} | {sentence} |" for term, sentence in GLOSSARY.items()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(glossary_page())
