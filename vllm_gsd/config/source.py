"""Reading a speculative config from a file, inline JSON or a dict, and reporting mistakes in it."""

import json
import os
from pathlib import Path
from typing import Any, NoReturn

# Far above any sensible config, and small enough to refuse a wrong file at once.
MAX_BYTES = 1 << 20


class GSDConfigError(ValueError):
    """A speculative config cannot be used; the message is one sentence for the user."""


def fail(clause: str, origin: str = "") -> NoReturn:
    """Raise a ``GSDConfigError`` whose sentence is the clause, after its origin if given."""
    raise GSDConfigError(f"In {origin}, {clause}." if origin else f"{clause[0].upper()}{clause[1:]}.")


def shown(value: Any, limit: int = 60) -> str:
    """A value as JSON, short and without line breaks."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        if not text.isprintable():
            text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):  # not JSON, or a number with thousands of digits
        try:
            text = " ".join(repr(value).split())
        except Exception:  # a broken __repr__ must not hide the real mistake
            text = f"a {type(value).__name__}"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def origin_of(value: Any) -> str:
    """The name of a config's origin in messages."""
    if is_path(value):
        return shown(os.fsdecode(value), limit=200)
    return "the speculative config"


def is_inline(value: Any) -> bool:
    """Whether a value is JSON text rather than a path."""
    return isinstance(value, str) and value.lstrip()[:1] in ("{", "[", '"')


def is_path(value: Any) -> bool:
    """Whether a value is the path of a file."""
    return isinstance(value, os.PathLike) or (isinstance(value, str) and value != "" and not is_inline(value))


def read(value: Any) -> dict[str, Any]:
    """Read a JSON object from a file or from the text itself.

    Raises:
        GSDConfigError: the file cannot be read, or does not hold a JSON object with distinct keys.
    """
    origin = origin_of(value)
    if is_path(value):
        text = _read_file(Path(os.fsdecode(value)), origin)
    elif isinstance(value, str):
        text = value
    else:
        fail(f"{origin} is {shown(value)}, but must be a path, a JSON object or a dict")
    if not text.strip():
        fail(f"{origin} is empty, but must hold a JSON object")
    try:
        parsed = json.loads(
            text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant, parse_int=_short_integer
        )
    except json.JSONDecodeError as error:
        fail(f"{origin} is not JSON ({error.msg} at line {error.lineno}, column {error.colno})")
    except RecursionError:
        fail(f"{origin} is nested too deeply, but must hold a JSON object with plain values")
    except ValueError as error:
        fail(str(error), origin)
    if not isinstance(parsed, dict):
        fail(f"{origin} holds {shown(parsed)}, but must hold a JSON object")
    return parsed


def with_underscores(keys: dict[Any, Any], origin: str) -> dict[str, Any]:
    """Replace '-' by '_' in the keys, as vLLM does.

    Raises:
        GSDConfigError: a key is not a string, or is given in both spellings.
    """
    renamed: dict[str, Any] = {}
    for key, value in keys.items():
        if not isinstance(key, str):
            fail(f"the key {shown(key)} is not a string, but keys must be strings", origin)
        name = key.replace("-", "_")
        if name in renamed:
            fail(f"{shown(name)} is given with '-' and with '_', but must be given once", origin)
        renamed[name] = value
    return renamed


def _read_file(file: Path, origin: str) -> str:
    try:
        if not (problem := _why_not_a_file(file)):
            with file.open("rb") as stream:
                data = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        reason = error.strerror if isinstance(error, OSError) else error
        problem = f"cannot be read as a file ({reason}); give a path of a JSON file or a JSON object"
    if problem:
        fail(f"{origin} {problem}")
    if len(data) > MAX_BYTES:
        fail(f"{origin} is larger than {MAX_BYTES} bytes, but must be a small JSON file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        fail(f"{origin} is not UTF-8 text (byte {error.start}), but must be a JSON file")


def _why_not_a_file(file: Path) -> str:
    if file.is_dir():
        return "is a directory, but must be a JSON file"
    if not file.exists():
        return "does not exist; give a path of a JSON file or a JSON object"
    if not file.is_file():  # a pipe could block, and a device might never end
        return "is not a regular file, but must be a JSON file"
    return ""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for key, value in pairs:
        if key in keys:
            raise ValueError(f"{shown(key)} is given twice, but must be given once")
        keys[key] = value
    return keys


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"a value is {name}, but numbers must be finite")


def _short_integer(digits: str) -> int:
    if len(digits) > 20:  # Python's own message about thousands of digits is not meant for users
        raise ValueError(f"a number has {len(digits)} digits, but none needs more than 7")
    return int(digits)
