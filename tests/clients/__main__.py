"""Write ``docs/clients.md`` from the rows that the tests of the clients kept in ``runs/clients``: ``make clients``."""

from __future__ import annotations

from client_code import kept_rows
from client_models import ROOT
from client_page import page

if __name__ == "__main__":
    path = ROOT / "docs" / "clients.md"
    path.write_text(page(kept_rows()), encoding="utf-8")
    print(f"wrote {path}")
