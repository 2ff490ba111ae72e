"""The time of an engine's layers by place: the modules of the model that they compute."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from quantizer.engines.inspection.inspection import Inspection, Layer

NOWHERE = ""
"""The place of layers that belong to no module that was asked for, nor lie behind one that does."""


def place_times(inspection: Inspection, places: Collection[str], products: Mapping[str, str]) -> dict[str, float]:
    """Return the time of each place in microseconds; the sum is that of all layers.

    A layer belongs to the place that its name, or that of a node it was made of, begins with. One that says nothing of
    the model, as a conversion that the library adds, belongs to the place of the layer that it reads, else to that of
    the layer that reads it: who causes a conversion pays for it.

    Args:
        inspection: of an engine that ran, with times.
        places: paths of modules, as names of nodes have them before the ``/``.
        products: the product behind a name in the file that the engine was built from, see ``product_names``.
    """
    layers = inspection.layers
    found = _places(layers, frozenset(places), products)
    times: dict[str, float] = dict.fromkeys([*places, NOWHERE], 0.0)
    for layer in layers:
        times[found[layer.name]] += layer.time_us or 0.0
    return times


def _places(layers: Sequence[Layer], places: Collection[str], products: Mapping[str, str]) -> dict[str, str]:
    """Return the place of each layer."""
    named = {layer.name: _named([products.get(n, n) for n in (layer.name, *layer.nodes)], places) for layer in layers}
    found = {name: exact for name, (exact, _) in named.items() if exact is not None}
    sources: dict[str, list[str]] = defaultdict(list)
    for layer in layers:
        for reader in layer.readers:
            sources[reader].append(layer.name)
    # In the order of execution, so that a chain of such layers passes the place on.
    for layer in layers:
        if layer.name not in found and (place := _first(sources[layer.name], found)) is not None:
            found[layer.name] = place
    for layer in reversed(layers):
        if layer.name not in found and (place := _first(layer.readers, found)) is not None:
            found[layer.name] = place
    return {name: found.get(name, outer or NOWHERE) for name, (_, outer) in named.items()}


def _first(names: Sequence[str], found: Mapping[str, str]) -> str | None:
    return next((found[name] for name in names if name in found), None)


def _named(names: Sequence[str], places: Collection[str]) -> tuple[str | None, str | None]:
    """Return the place that a layer's names give exactly, and the one that lies around them; None if none does."""
    outer = None
    for name in names:
        scope, slash, _ = name.partition("/")
        if not slash:
            continue
        for depth, path in enumerate(_enclosing(scope)):
            if path in places:
                # The scope of a site and of its quantizers is below that of the module whose code calls it.
                if depth == 0 or ".site_" in scope[len(path) :]:
                    return path, outer
                outer = outer or path
                break
    return None, outer


def _enclosing(path: str) -> Iterator[str]:
    """Return a path and the paths of the modules around it, innermost first."""
    while path:
        yield path
        path = path.rpartition(".")[0]
