"""Reading and writing ``report.json``: a file is complete or absent."""

from __future__ import annotations

import json
from pathlib import Path

from quantizer.common.plain_values import json_values
from quantizer.errors import QuantizerError
from quantizer.files import whole_file
from quantizer.report.codec import mapping_from_record
from quantizer.report.codec import record_from_mapping
from quantizer.report.record import RunRecord

__all__ = ["read_record", "write_record", "write_text_atomic"]


def write_text_atomic(path: Path | str, text: str) -> Path:
    """Write ``text`` as UTF-8 to a temporary file beside ``path``, then put it in its place in one step.

    A failure or an interruption leaves what stood at ``path`` before, and no temporary file.

    Raises:
        QuantizerError: the folder is missing or cannot be written.
    """
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8", newline="\n")
    return Path(path)


def write_record(record: RunRecord, path: Path | str) -> Path:
    """Write ``record`` as JSON to ``path``.

    Raises:
        QuantizerError: a value that cannot be written, or a folder that cannot be written.
    """
    text = json.dumps(mapping_from_record(record), indent=2, ensure_ascii=False, allow_nan=False)
    return write_text_atomic(path, text + "\n")


def read_record(path: Path | str) -> RunRecord:
    """Read what :func:`write_record` wrote.

    Raises:
        QuantizerError: the file is missing, is not JSON, is of another version, or a field is wrong.
    """
    path = Path(path)
    try:
        values = json_values(path.read_bytes())
    except FileNotFoundError as error:
        raise QuantizerError(f"{path}: no such file; give the folder of a finished run") from error
    except (OSError, UnicodeDecodeError) as error:
        raise QuantizerError(f"{path}: cannot be read: {error}") from error
    except ValueError as error:
        raise QuantizerError(f"{path}: not a JSON file ({error}); it is broken: run the configuration again") from error
    return record_from_mapping(values, str(path))
