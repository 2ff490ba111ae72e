"""A hook of mkdocs: the examples, which lie beside docs/, are pages of the site too, each notebook with its outputs.

The table of ``examples/README.md`` stands in ``gallery.md`` in the place of the link to it.
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

_FOLDER = "gallery"
_TEMPLATE = """{%- extends 'markdown/index.md.j2' -%}
{% block stream %}
```text
{{ output.text }}
```
{% endblock stream %}
{% block data_text %}
```text
{{ output.data['text/plain'] }}
```
{% endblock data_text %}
"""
"""As nbconvert's own, which would put what a cell prints and its last value into one block."""
_LINK = re.compile(r"^.*\]\(\.\./examples/README\.md\).*$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each notebook and script of ``examples/``, and the pictures of the notebooks."""
    for path in sorted(_examples(config).iterdir()):
        if path.suffix == ".ipynb":
            text, pictures = _notebook_page(path)
            for name, content in pictures.items():
                files.append(File.generated(config, f"{_FOLDER}/{name}", content=content))
        elif path.suffix == ".py":
            text = f"# {path.name}\n\n```python\n{path.read_text(encoding='utf-8')}```\n"
        else:
            continue
        files.append(File.generated(config, f"{_FOLDER}/{path.stem}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the table of the examples into the page of the gallery."""
    if page.file.src_uri != "gallery.md":
        return markdown
    readme = (_examples(config) / "README.md").read_text(encoding="utf-8")
    table = "\n".join(line for line in readme.splitlines() if line.startswith("|"))
    return _LINK.sub(lambda _: re.sub(r"\]\((\w+)\.(?:ipynb|py)\)", rf"]({_FOLDER}/\1.md)", table), markdown)


def _examples(config: MkDocsConfig) -> Path:
    return Path(config.docs_dir).parent / "examples"


def _notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and its pictures by their names beside it."""
    unique = {"unique_key": path.stem, "output_files_dir": ""}
    exporter = MarkdownExporter(raw_template=_TEMPLATE)
    text, resources = exporter.from_notebook_node(nbformat.read(path, as_version=4), resources=unique)
    return text, {Path(name).name: content for name, content in resources["outputs"].items()}
