"""Contents of a function's text: its sites, the helpers it calls, the edits that rewrite it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from quantizer.rewrite.operator_patches import OperatorPatch
from quantizer.rewrite.text_edits import Edit

Form = Literal["call", "method", "operator", "inplace"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteSource:
    """Quantizable call in the text of a function.

    ``name`` is ``FUNCTION.OPERATION_N``, counted in the order of the text, so that saved ranges survive an update of
    the library that moves lines. ``reason`` says why the text cannot be rewritten here (None: it can); ``equation``
    is that of an einsum, ``called`` the last name of what is called (empty for an operator), and ``counts`` says that
    it adds a number that stands in the text, as a counter does.
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
    counts: bool = False

    @property
    def in_place(self) -> bool:
        """Flag of a call that writes its result into the first argument, as torch's trailing ``_`` says."""
        return self.form == "inplace" or self.called.endswith("_")

    @property
    def attribute(self) -> str:
        """Attribute of the host module that holds the site; rewritten text calls it."""
        return "site_" + self.name.replace(".", "_")

    @property
    def mark(self) -> str:
        """Key that distinguishes the site from one of the same name in another function."""
        return f"{self.attribute} in {self.file}, line {self.line}"


@dataclass(kw_only=True, slots=True)
class HelperCall:
    """Call of a possible helper that needs a host, or another expression that results in one.

    ``target`` is the dotted name that is called; ``of_class`` says that it is an attribute of the module or of its
    class, and ``item`` that it is a registry, of which one item is taken. The object of the name is only known when
    the function is rebuilt: then the call is made ``active``, and its edits take part. It stays active, because
    passing a host to a function that needs none has no effect.
    """

    target: tuple[str, ...]
    of_class: bool = False
    item: bool = False
    edits: tuple[Edit, Edit]
    active: bool = False


@dataclass(kw_only=True, slots=True)
class FunctionSource:
    """Module-level function or method, with the results of the search in it.

    Attributes:
        key: (qualified name, first line), as in its code object.
        host: the name of the argument that is the module (None: no such argument).
        is_method: the host is the first argument of a method.
        host_is_argument: the host is an argument that rewriting adds, for callers to pass theirs.
        why_no_host: why there is none.
        parameter: the edit that adds the argument.
        sites: quantizable calls.
        calls: calls of possible helpers.
        live: edits by which it reads and writes its globals in the original module.
        views: edits that hide the sites from a loop over the children of a module, or keep torch in Python.
        patches: operator patches that its text already contains.
        globals_read: global names in its text.
        values_read: dotted names in its text that are not called.
        attributes_read: attribute names in its text.
    """

    key: tuple[str, int]
    host: str | None
    is_method: bool = False
    host_is_argument: bool = False
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
        """Yield all edits of the function's text in its present state."""
        yield from self._changes()
        yield from self.live

    def _changes(self) -> Iterator[Edit]:
        """Yield the edits that make rewriting necessary; none if the text needs no change."""
        if self.parameter is not None and self.takes_host:
            yield self.parameter
        yield from (edit for site in self.sites for edit in site.edits)
        yield from (edit for call in self.calls if call.active for edit in call.edits)
        yield from self.views

    @property
    def changed(self) -> bool:
        """Flag of a function that must be rewritten, in the present state of its text."""
        return bool(self.patches) or any(True for _ in self._changes())

    @property
    def takes_host(self) -> bool:
        """Flag of a function that needs a host from its callers, in the present state of its text."""
        return self.host_is_argument and (
            any(site.edits for site in self.sites) or any(call.active for call in self.calls)
        )
