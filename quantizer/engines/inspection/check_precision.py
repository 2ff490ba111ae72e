"""Check that an engine runs in the precision that its graph asks for."""

from __future__ import annotations

from quantizer.engines.inspection.from_layers import is_product, named
from quantizer.engines.inspection.inspection import LOW_PRECISIONS, Inspection
from quantizer.errors import EngineError

LEAST_SHARE = 0.5
"""The least part of the work that a graph asks for in low precision that an engine has to do in it.

Libraries leave single products in floats, with good reason: a head of three rows, an attention that is fused in floats.
Below one half it is the graph that they did not take: the other half is then slower than the float model, for what it
quantizes and dequantizes around it.
"""

_SHOWN = 10


def check_precision(observed: Inspection, graph: Inspection) -> None:
    """Raise if an engine does less than ``LEAST_SHARE`` of what its graph asks for in low precision.

    Shares of multiply-adds are compared; shares of products if an engine does not state all multiply-adds. An engine
    that could not be observed passes.

    Args:
        observed: of the engine.
        graph: of the ONNX file that it was built from, at the same sizes.

    Raises:
        EngineError: it lacks the precision; the message names the products and what the engine makes of them.
    """
    asked, got = graph.low_share(), observed.low_share()
    if not observed.verified or not asked or got is None or got >= LEAST_SHARE * asked:
        return
    wanted = [layer for layer in graph.layers if is_product(layer) and layer.precision in LOW_PRECISIONS]
    kinds = ", ".join(dict.fromkeys(named(layer.precision) for layer in wanted))
    names = {layer.name for layer in wanted}
    wide = [layer for layer in observed.layers if is_product(layer) and layer.precision not in LOW_PRECISIONS]
    # By the graph's names where the engine kept them, else by its own.
    found = [(node, layer) for layer in wide for node in layer.nodes if node in names]
    lines = [
        f"  - {name} runs in {named(layer.precision)} ({layer.type})"
        for name, layer in found or [(layer.name, layer) for layer in wide]
    ]
    more = [f"  - and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    raise EngineError(
        f"the {observed.backend} engine lacks the precision that was asked for: the graph asks for {kinds} in "
        f"{asked:.1%} of the work, the engine does {got:.1%}, less than {LEAST_SHARE:.0%} of that:\n"
        + "\n".join([*lines[:_SHOWN], *more])
        + "".join(f"\n  {reason}" for reason in observed.reasons)
        + "\nexport for this backend (quantizer.backend), or check the file against it"
    )
