"""Pass that gives a convolution the zeros around its input as its own padding.

A zero is exact in every format, with a zero point too: ``Conv(DQ(Q(Pad(x))))`` equals ``Conv(DQ(Q(x)))`` with these
pads. Behind a Pad of its own the quantizer cannot be fused into the layer before it, and both run alone, in floats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quantizer.export.passes.base import MatchPass
from quantizer.qdq.graph import floats, maker, pair_before


@dataclass(frozen=True, slots=True)
class _Padded:
    """The reader of a Pad, the value before it, and the pads of the convolution when it is gone."""

    reader: Any
    before: Any
    pads: list[int]


class FoldPadding(MatchPass[_Padded]):
    """``Conv(DQ(Q(Pad(x))), w)`` becomes ``Conv(DQ(Q(x)), w)``, and ``Conv(Pad(x), w)`` becomes ``Conv(x, w)``."""

    left = "a padding could still be folded"

    def match(self, node: Any) -> _Padded | None:
        """Return the padding before a convolution; None for a node that stays as it is."""
        if node.op_type != "Conv" or _text(node, "auto_pad", "NOTSET") != "NOTSET":
            return None
        pair = pair_before(node.inputs[0])
        # Other readers of a quantizer would lose the zeros.
        if pair is not None and any(len(list(entry.outputs[0].uses())) != 1 for entry in pair):
            return None
        reader = node if pair is None else pair[0]
        pad = maker(reader.inputs[0])
        added = None if pad is None or pad.op_type != "Pad" else _zeros_around(pad)
        if added is None:
            return None
        present = node.attributes["pads"].as_ints() if "pads" in node.attributes else [0] * len(added)
        return _Padded(reader, pad.inputs[0], [old + new for old, new in zip(present, added, strict=True)])

    def apply(self, model: Any, node: Any, found: _Padded) -> None:
        """Read what the Pad reads; a Pad that nothing reads any more is dropped by a later pass."""
        import onnx_ir

        found.reader.replace_input_with(0, found.before)
        node.attributes["pads"] = onnx_ir.AttrInt64s("pads", found.pads)
        for entry in pair_before(node.inputs[0]) or ():
            entry.outputs[0].shape = found.before.shape


def _text(node: Any, name: str, default: str) -> str:
    return str(node.attributes[name].as_string()) if name in node.attributes else default


def _zeros_around(pad: Any) -> list[int] | None:
    """Return the spatial pads of a Pad with zeros, as ``Conv.pads`` has them; None for any other Pad."""
    if _text(pad, "mode", "constant") != "constant":
        return None
    given = [*pad.inputs, None, None, None][:4]
    if given[1] is None or given[1].const_value is None or given[3] is not None:
        return None
    if given[2] is not None and ((value := floats(given[2])) is None or value.any()):
        return None
    pads = [int(size) for size in given[1].const_value.numpy()]
    rank = len(pads) // 2
    begin, end = pads[:rank], pads[rank:]
    if rank < 3 or any([*begin[:2], *end[:2]]) or min(pads) < 0:
        return None
    return [*begin[2:], *end[2:]]
