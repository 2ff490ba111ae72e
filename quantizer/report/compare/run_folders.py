"""The runs in a folder that is no run itself, such as that of a sweep."""

from __future__ import annotations

from pathlib import Path

from quantizer.common.paths import is_file, is_folder


def run_folders(folder: Path) -> list[Path]:
    """Return the folders of finished runs in a folder, by name; empty if there are none, or it is a run itself."""
    if not is_folder(folder) or is_file(folder / "report.json"):
        return []
    # A run that is under way, or was killed, has a hidden folder.
    below = (path for path in folder.iterdir() if not path.name.startswith("."))
    return sorted(path for path in below if is_file(path / "report.json"))
