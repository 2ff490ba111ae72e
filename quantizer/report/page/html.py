"""The report as a self-contained HTML file.

The page contains its style and a small script (sorting and filtering of tables). A content security policy admits this
script by its hash and forbids everything else, the network included.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantizer.errors import MissingDependencyError
from quantizer.report.codec import write_text_atomic
from quantizer.report.page.page_content import view_from_record
from quantizer.report.record import RunRecord

if TYPE_CHECKING:
    import jinja2


_FOLDER = Path(__file__).parent


def html_from_record(record: RunRecord) -> str:
    """Return the whole page."""
    return render("template.html", view_from_record(record))


def render(template: str, view: Mapping[str, Any]) -> str:
    """Return a page: a template of this folder with the common style and script, and the variables of ``view``."""
    style, script = ((_FOLDER / name).read_text(encoding="utf-8") for name in ("report.css", "tables.js"))
    return _environment().get_template(template).render(style=style, script=script, **view)


def write_html(record: RunRecord, path: Path | str) -> Path:
    """Write the page to ``path`` atomically."""
    return write_text_atomic(path, html_from_record(record))


def require_html() -> None:
    """Check that the library for the page is installed."""
    _environment()


def _environment() -> jinja2.Environment:
    try:
        import jinja2
    except ImportError as error:
        raise MissingDependencyError("jinja2", "report") from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["csp_hash"] = _csp_hash
    return environment


def _csp_hash(script: str) -> str:
    """Return the source expression that admits exactly ``script`` in a content security policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"
