"""Registry of rules: ``@rules.add(name)`` above a function in a file of ``rules/`` adds one.

The function yields a ``Fault`` for each place where its rule is broken; the first line of its docstring states the
rule. Severity and applicability on each target are data: ``quantizer/targets/graph_rules.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from quantizer.common.registry import Registry
from quantizer.graph_check.finding import Fault
from quantizer.graph_check.subject import Subject

Rule = Callable[[Subject], Iterator[Fault]]

rules: Registry[Rule] = Registry("rule")
