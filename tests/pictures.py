"""Pictures of what people look at, for whoever changes it: report and terminal, narrow and wide, light and dark.

    make pictures RUN=runs/demo        # into runs/pictures

Needs Chromium, or Chrome, on the path. The report is shown in a frame of its width, as a window of a browser without
a screen cannot be narrower than 500 pixels.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from quantizer.report import print_record, read_record, write_html

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_WIDTHS, _COLUMNS = (390, 1280), (80, 120)
_SCHEMES = {"dark": 0, "light": 1}
"""As Blink numbers them."""
_HEIGHT = 4000
_LETTER = 12.2
"""Width of a letter of the terminal's picture, in pixels."""


def main(run: Path, folder: Path) -> None:
    """Write the pictures of a run's folder."""
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"none of {', '.join(_BROWSERS)} is on the path")
    folder.mkdir(parents=True, exist_ok=True)
    record = read_record(run / "report.json")
    with tempfile.TemporaryDirectory() as scratch:
        page = write_html(record, Path(scratch) / "report.html")
        for width in _WIDTHS:
            frame = Path(scratch) / "frame.html"
            frame.write_text(
                f'<body style="margin:0"><iframe src="{page}" width="{width}" height="{_HEIGHT}" frameborder="0">'
            )
            for name, scheme in _SCHEMES.items():
                _shoot(browser, frame, folder / f"report-{width}-{name}.png", max(width, 500), _HEIGHT, scheme)
        for columns in _COLUMNS:
            console = Console(record=True, width=columns, file=(Path(scratch) / "said").open("w"))
            print_record(record, run, console)
            lines = console.export_text(clear=False).count("\n")
            svg = Path(scratch) / "terminal.svg"
            console.save_svg(str(svg), title=f"{columns} columns")
            size = int(columns * _LETTER) + 40, 26 * lines + 120
            _shoot(browser, svg, folder / f"terminal-{columns}.png", *size, _SCHEMES["dark"])
    print(folder)


def _shoot(browser: str, page: Path, picture: Path, width: int, height: int, scheme: int) -> None:
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--allow-file-access-from-files"]
    flags += [f"--window-size={width},{height}", f"--blink-settings=preferredColorScheme={scheme}"]
    subprocess.run([browser, *flags, f"--screenshot={picture}", page.as_uri()], check=True, capture_output=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
