"""Reading and atomic writing of ``report.json``."""

from __future__ import annotations

import json
from pathlib import Path

from quantizer.common.paths import regular_file
from quantizer.common.plain_values import json_values
from quantizer.errors import QuantizerError
from quantizer.files import whole_file
from quantizer.report.codec import mapping_from_record, record_from_mapping
from quantizer.report.record import RunRecord


def write_text_atomic(path: Path | str, text: str) -> Path:
    """Write ``text`` as UTF-8 to a temporary file beside ``path``, then rename it to ``path``.

    After a failure or an interruption the former file is unchanged, and no temporary file is left.

    Raises:
        QuantizerError: the folder is missing or cannot be written.
    """
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8", newline="\n")
    return Path(path)


def write_record(record: RunRecord, path: Path | str) -> Path:
    """Write ``record`` as JSON to ``path``.

    Raises:
        QuantizerError: a value or the folder cannot be written.
    """
    text = json.dumps(mapping_from_record(record), indent=2, ensure_ascii=False, allow_nan=False)
    return write_text_atomic(path, text + "\n")


def read_record(path: Path | str) -> RunRecord:
    """Return the record in a file of :func:`write_record`.

    Raises:
        QuantizerError: the file is missing, is not JSON, or has another version or a wrong field.
    """
    path = Path(path)
    try:
        values = json_values(regular_file(path).read_bytes())
    except FileNotFoundError as error:
        raise QuantizerError(f"{path}: no such file; give the folder of a finished run") from error
    except (OSError, UnicodeDecodeError) as error:
        raise QuantizerError(f"{path}: cannot be read: {error}") from error
    except ValueError as error:
        raise QuantizerError(f"{path}: not a JSON file ({error}); it is broken: run the configuration again") from error
    return record_from_mapping(values, str(path))
