"""``python -m quantizer``: the command line."""

from __future__ import annotations

import sys

from quantizer.cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
