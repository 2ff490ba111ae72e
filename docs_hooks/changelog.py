"""A hook of mkdocs: CHANGELOG.md, which lies beside docs/, is a page of the site too."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add ``changelog.md``: the changelog, with its links to docs/ seen from there."""
    changelog = Path(config.docs_dir).parent / "CHANGELOG.md"
    text = changelog.read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "changelog.md", content=text))
    return files
