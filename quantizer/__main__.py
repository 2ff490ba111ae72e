"""Entry point of ``python -m quantizer``: the command line."""

from __future__ import annotations

import sys

from quantizer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
