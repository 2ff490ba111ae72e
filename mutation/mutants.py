"""The mutants of a package: Cosmic Ray makes them all, and a sample spread evenly over the code is kept."""

from __future__ import annotations

import ast
import hashlib
import random
import tempfile
import warnings
from collections import defaultdict
from pathlib import Path

from cosmic_ray import plugins
from cosmic_ray.commands.init import init
from cosmic_ray.mutating import mutate_code
from cosmic_ray.util import read_python_source
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import MutationSpec, WorkItem
from operators import PROVIDER

__all__ = ["mutated", "sample"]

plugins.OPERATOR_PROVIDERS["own"] = PROVIDER


def sample(source: Path, every: int, seed: str) -> list[WorkItem]:
    """Return a mutant of every n-th place of a file, with one mutation drawn of those that the place can have.

    A place that Cosmic Ray can change in eleven ways (a plus sign) counts once, as one that it changes in a single way.
    """
    chance = random.Random(seed)
    places = _places(source)
    drawn: list[MutationSpec] = []
    for first in range(chance.randrange(every) if len(places) > every else 0, len(places), every):
        # Some change nothing that is ever evaluated, or are no Python: those are no mutants, and a neighbour is.
        near = [mutation for place in places[first : first + every] for mutation in chance.sample(place, len(place))]
        found = next((mutation for mutation in near if mutated(mutation) is not None), None)
        drawn += [] if found is None else [found]
    return [WorkItem.single(_name(mutation), mutation) for mutation in drawn]


def mutated(mutation: MutationSpec) -> str | None:
    """Return the code of the mutant's file; None where it is no Python, or says the same as the original."""
    source = read_python_source(mutation.module_path)
    operator = plugins.get_operator(mutation.operator_name)()
    code = mutate_code(source, operator, mutation.occurrence)
    if code is None:
        return None
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
            compile(code, str(mutation.module_path), "exec")
    except (SyntaxError, ValueError):
        return None
    return None if _meaning(code) == _meaning(source) else code


def _places(source: Path) -> list[list[MutationSpec]]:
    """All mutations by the place that they change, in the order of the code."""
    with tempfile.TemporaryDirectory() as folder, use_db(f"{folder}/all.sqlite") as session:
        init([source], session, {})
        found = [item.mutations[0] for item in session.work_items]
    places: dict[tuple[tuple[int, int], str], list[MutationSpec]] = defaultdict(list)
    for mutation in sorted(found, key=lambda m: (m.operator_name, m.occurrence)):
        family = mutation.operator_name.partition("/")[2].partition("_")[0]
        places[mutation.start_pos, family].append(mutation)
    return [places[place] for place in sorted(places)]


def _name(mutation: MutationSpec) -> str:
    told = f"{mutation.module_path}:{mutation.operator_name}:{mutation.occurrence}"
    return hashlib.sha256(told.encode()).hexdigest()[:16]


class _WithoutAnnotations(ast.NodeTransformer):
    """Annotations are never evaluated here; ``__all__`` is held by tests of its own."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)


def _meaning(code: str) -> str:
    return ast.dump(_WithoutAnnotations().visit(ast.parse(code)))
