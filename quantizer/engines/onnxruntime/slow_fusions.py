"""The fusions of ONNX Runtime that make a model slower, and how a server does without them.

Release 1.31, MiniLM at 8 x 128, one thread: a SkipLayerNormalization takes 2.9 ms where two Adds and a
LayerNormalization take 1.2; without BiasGelu the model takes 4% less time. A product of matrices becomes a Gemm with
its bias, which is computed with floats.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

SLOW_FUSIONS = ("SkipLayerNormFusion", "BiasGeluFusion", "MatMulAddFusion")

_CONVOLUTIONS = ("Conv", "ConvInteger", "FusedConv", "QLinearConv")


def needs_basic_level(path: Path) -> bool:
    """Return whether an engine file runs as it does here at the level of basic optimizations.

    A server has no list of fusions to leave out, but may have the level. At the basic one those of ``SLOW_FUSIONS`` for
    transformers are left out, and so is the layout of convolutions, which is worth more where there are many of them:
    a ResNet-18 in float takes a quarter longer without, MiniLM in INT8 a fifth longer with all optimizations.
    """
    import onnx

    count = Counter(node.op_type for node in onnx.load(str(path), load_external_data=False).graph.node)
    return sum(count[name] for name in _CONVOLUTIONS) <= count["LayerNormalization"]
