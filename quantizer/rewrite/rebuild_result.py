"""Result of rewriting a function: the new function, its sites and those of the helpers it reaches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from quantizer.reasons import ReasonCode
from quantizer.rewrite.source_file import Key
from quantizer.rewrite.source_sites import SiteSource


@dataclass(kw_only=True, slots=True)
class Rebuilt:
    """Result of rewriting one function.

    Attributes:
        function: replaces the original (None: it stays).
        host_is_argument: ``function`` needs a host from its callers, so it cannot replace the original.
        is_method: its text says that its first argument is the module.
        own: the sites in the function itself.
        helpers: results for the functions that it calls.
        passed_on: results for those that it mentions, but that get no host here.
        handed_to: names of static and class methods to which it passes its host.
        key: which function of which file was rewritten.
        problem: why it could not be rewritten.
        refused: why operator patches were not applied to its file.
    """

    function: Any = None
    host_is_argument: bool = False
    is_method: bool = False
    own: list[SiteSource] = field(default_factory=list)
    helpers: list[Rebuilt] = field(default_factory=list)
    passed_on: list[Rebuilt] = field(default_factory=list)
    handed_to: set[str] = field(default_factory=set)
    key: tuple[str, Key] | None = None
    problem: str | None = None
    refused: list[str] = field(default_factory=list)

    def reached(self) -> Iterator[Rebuilt]:
        """Yield this result and those of all helpers it reaches, each once; helpers may call each other in a circle."""
        seen: set[int] = set()
        waiting = [self]
        while waiting:
            current = waiting.pop(0)
            if id(current) not in seen:
                seen.add(id(current))
                yield current
                waiting += current.helpers

    @property
    def sites(self) -> list[SiteSource]:
        """Sites reached, those of helpers included; then those of helpers that get no host, with the reason."""
        found: dict[SiteSource, None] = {}
        refused: dict[SiteSource, None] = {}
        for rebuilt in self.reached():
            found.update(dict.fromkeys(rebuilt.own))
            for helper in rebuilt.passed_on:
                refused.update({_without_host(site): None for other in helper.reached() for site in other.own})
        names = {site.name for site in found}
        return [*found, *(site for site in refused if site.name not in names)]

    @property
    def keys(self) -> set[tuple[str, Key]]:
        """File and key of each function that takes part."""
        return {rebuilt.key for rebuilt in self.reached() if rebuilt.key is not None}

    @property
    def problems(self) -> list[str]:
        """Reasons why functions could not be rewritten."""
        return list(dict.fromkeys(rebuilt.problem for rebuilt in self.reached() if rebuilt.problem is not None))

    @property
    def refused_patches(self) -> list[str]:
        """Reasons why operator patches were not applied to the files that take part."""
        return list(dict.fromkeys(message for rebuilt in self.reached() for message in rebuilt.refused))

    @property
    def hands_host_to(self) -> set[str]:
        """Names of static and class methods that get a host, from helpers too."""
        return set().union(*(rebuilt.handed_to for rebuilt in self.reached()))


def _without_host(site: SiteSource) -> SiteSource:
    """Return the site as excluded, because its function gets no module."""
    passed_on = ReasonCode.PASSED_ON.text(function=site.name.rpartition(".")[0])
    return replace(site, reason=site.reason or passed_on, edits=())
