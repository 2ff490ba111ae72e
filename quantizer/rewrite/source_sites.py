"""Results of the search in a function's source: its sites, the helpers it calls, the edits that rewrite it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from quantizer.rewrite.operator_patches import OperatorPatch
from quantizer.rewrite.text_edits import Edit

Form = Literal["call", "method", "operator", "inplace"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteSource:
    """A quantizable call in the source of a function.

    Attributes:
        name: ``FUNCTION.OPERATION_N``, counted in the order of the source, so that saved ranges stay valid if an update
            of the library moves lines.
        reason: why the source cannot be rewritten here; None: it can.
        equation: the equation of an einsum.
        called: the last name of the called function; empty for an operator.
        counts: whether it adds a literal number, as a counter does.
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
        """True for a call that writes its result into the first argument, as torch's trailing ``_`` indicates."""
        return self.form == "inplace" or self.called.endswith("_")

    @property
    def attribute(self) -> str:
        """Attribute of the host module with the site, which rewritten source calls."""
        return "site_" + self.name.replace(".", "_")

    @property
    def mark(self) -> str:
        """Key that distinguishes sites of the same name in different functions."""
        return f"{self.attribute} in {self.file}, line {self.line}"


@dataclass(kw_only=True, slots=True)
class HelperCall:
    """A call of a possible helper that needs a host, or another expression that returns one.

    The object of the name is only known when the function is rebuilt. Then the call is made ``active``, and its edits
    apply. It stays active, because passing a host to a function that needs none has no effect.

    Attributes:
        target: the dotted name of the function.
        of_class: whether the name is an attribute of the module or of its class.
        item: whether the name is a registry, and one of its items is used.
    """

    target: tuple[str, ...]
    of_class: bool = False
    item: bool = False
    edits: tuple[Edit, Edit]
    active: bool = False


@dataclass(kw_only=True, slots=True)
class FunctionSource:
    """A module-level function or method, with the results of the search in it.

    Attributes:
        key: (qualified name, first line), as in its code object.
        host: the name of the argument that is the module; None without one.
        is_method: whether the host is the first argument of a method.
        host_is_argument: whether rewriting adds the host as an argument, which callers pass.
        why_no_host: why there is no host.
        parameter: the edit that adds the argument.
        sites: quantizable calls.
        calls: calls of possible helpers.
        live: edits that make it read and write its globals in the original module.
        views: edits that hide the sites from a loop over the children of a module, or keep torch in Python.
        patches: operator patches that its source already contains.
        globals_read: global names in its source.
        values_read: dotted names in its source that are not called.
        attributes_read: attribute names in its source.
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
        """Yield all edits of the function's source in its present state."""
        yield from self._changes()
        yield from self.live

    def _changes(self) -> Iterator[Edit]:
        """Yield the edits that make rewriting necessary; none if the source needs no change."""
        if self.parameter is not None and self.takes_host:
            yield self.parameter
        yield from (edit for site in self.sites for edit in site.edits)
        yield from (edit for call in self.calls if call.active for edit in call.edits)
        yield from self.views

    @property
    def changed(self) -> bool:
        """True if the function must be rewritten, in the present state of its source."""
        return bool(self.patches) or any(True for _ in self._changes())

    @property
    def takes_host(self) -> bool:
        """True if the function needs a host from its callers, in the present state of its source."""
        return self.host_is_argument and (
            any(site.edits for site in self.sites) or any(call.active for call in self.calls)
        )
