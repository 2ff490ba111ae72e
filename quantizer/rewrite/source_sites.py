"""What is found in the text of a function: its sites, the helpers it calls, the edits that rewrite it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
from typing import Literal

from quantizer.rewrite.operator_patches import OperatorPatch
from quantizer.rewrite.text_edits import Edit

__all__ = ["Form", "FunctionSource", "HelperCall", "SiteSource"]

Form = Literal["call", "method", "operator", "inplace"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteSource:
    """One quantizable call in the text of a function.

    ``name`` is ``FUNCTION.OPERATION_N``, counted in the order of the text, so that saved ranges survive an update of
    the library that moves lines. ``reason`` says why the text cannot be rewritten here (None: it can); ``equation``
    is that of an einsum, ``called`` the last name of what is called (empty for an operator).
    """

    name: str
    operation: str
    form: Form
    file: str
    line: int
    reason: str | None = None
    edits: tuple[Edit, ...] = ()
    equation: str = ""
    called: str = ""

    @property
    def in_place(self) -> bool:
        """Whether the result is written into the first argument, as torch's trailing ``_`` says."""
        return self.form == "inplace" or self.called.endswith("_")

    @property
    def attribute(self) -> str:
        """The attribute of the host module that holds the site; rewritten text calls it."""
        return "site_" + self.name.replace(".", "_")

    @property
    def mark(self) -> str:
        """Tells the site from one of the same name in another function."""
        return f"{self.attribute} in {self.file}, line {self.line}"


@dataclass(kw_only=True, slots=True)
class HelperCall:
    """A call of what may turn out to be a helper that needs a host, or another expression that gives one.

    ``target`` is the dotted name that is called; ``of_class`` says that it is an attribute of the module or of its
    class, and ``item`` that it is a registry, and one of its items is taken. What stands behind the name is only known
    when the function is rebuilt: then the call is made ``active``, and its edits take part. It stays so, because
    lending to a function that needs no host does nothing.
    """

    target: tuple[str, ...]
    of_class: bool = False
    item: bool = False
    edits: tuple[Edit, Edit]
    active: bool = False


@dataclass(kw_only=True, slots=True)
class FunctionSource:
    """A module-level function or a method, with what was found in it.

    Attributes:
        key: (qualified name, first line), as in its code object.
        host: the name of the argument that is the module (None: no such argument).
        is_method: the host is the first argument of a method.
        borrows: the host is an argument that rewriting adds, for callers to lend theirs.
        why_no_host: why there is none.
        parameter: the edit that adds the argument.
        sites: quantizable calls.
        calls: calls of possible helpers.
        live: edits by which it finds its globals in the module that was written.
        views: edits that hide the sites from a loop over the children of a module, or keep torch in Python.
        patches: operator patches that its text holds already.
        globals_read: global names that its text mentions.
        values_read: dotted names that its text mentions without calling them.
        attributes_read: attribute names that its text mentions.
    """

    key: tuple[str, int]
    host: str | None
    is_method: bool = False
    borrows: bool = False
    why_no_host: str | None = None
    parameter: Edit | None = None
    sites: list[SiteSource] = field(default_factory=list)
    calls: list[HelperCall] = field(default_factory=list)
    live: list[Edit] = field(default_factory=list)
    views: list[Edit] = field(default_factory=list)
    patches: list[OperatorPatch] = field(default_factory=list)
    globals_read: set[str] = field(default_factory=set)
    values_read: set[tuple[str, ...]] = field(default_factory=set)
    attributes_read: set[str] = field(default_factory=set)

    def edits(self) -> Iterator[Edit]:
        """All edits of the function's text as it stands now."""
        yield from self._changes()
        yield from self.live

    def _changes(self) -> Iterator[Edit]:
        """The edits for which it is rewritten; none where nothing in it needs a change."""
        if self.parameter is not None and self.takes_host:
            yield self.parameter
        yield from (edit for site in self.sites for edit in site.edits)
        yield from (edit for call in self.calls if call.active for edit in call.edits)
        yield from self.views

    @property
    def changed(self) -> bool:
        """Whether it must be rewritten, as its text stands now."""
        return bool(self.patches) or any(True for _ in self._changes())

    @property
    def takes_host(self) -> bool:
        """Whether the function needs a host that is lent, as its text stands now."""
        return self.borrows and (any(site.edits for site in self.sites) or any(call.active for call in self.calls))
