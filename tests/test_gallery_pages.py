"""The site's pages of the examples: one for each file, reached from the table, with what its cells show."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mkdocs", reason="needs enginequant[docs]")
pytest.importorskip("mkdocstrings", reason="needs enginequant[docs]")
pytest.importorskip("material", reason="needs enginequant[docs]")

from example_runs import EXAMPLES
from mkdocs.config import load_config
from mkdocs.structure.files import Files

ROOT = EXAMPLES.parent


@pytest.fixture(scope="module")
def config() -> Any:
    return load_config(str(ROOT / "mkdocs.yml"))


@pytest.fixture(scope="module")
def pages(config: Any) -> dict[str, Any]:
    """What the hooks add to the site, by address."""
    made = config.plugins.run_event("files", Files([]), config=config)
    return {file.src_uri: file for file in made if file.src_uri.startswith("gallery/")}


def test_each_example_is_a_page_that_the_table_leads_to(config: Any, pages: dict[str, Any]) -> None:
    addresses = {address for address in pages if address.endswith(".md")}
    examples = {path.stem for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    assert {Path(address).stem for address in addresses} == examples
    gallery = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="gallery.md"))
    shown = config.hooks["docs_hooks/gallery.py"].on_page_markdown(gallery, page, config, Files([]))
    assert set(re.findall(r"\]\(([^)]+)\)", shown)) == addresses
    tutorials = next(part["Tutorials"] for part in config.nav if "Tutorials" in part)
    nav = next(part["Gallery"] for part in tutorials if "Gallery" in part)
    assert sorted(nav) == ["gallery.md", *(f"gallery/{path.stem}.md" for path in sorted(EXAMPLES.glob("*.ipynb")))]


def test_a_page_has_the_outputs_of_its_notebook(pages: dict[str, Any]) -> None:
    own, vision = (pages[f"gallery/{name}.md"].content_string for name in ("own_net", "quantize_vision"))
    assert own.startswith("# Quantize a net of your own\n")
    assert "```text\nTrue\n```" in own
    assert own.count('<svg class="qz-bars"') == 1
    pictures = re.findall(r"!\[png\]\(([^)]+)\)", own + vision)
    assert len(pictures) == 3
    assert all(pages[f"gallery/{name}"].content_bytes.startswith(b"\x89PNG") for name in pictures)
