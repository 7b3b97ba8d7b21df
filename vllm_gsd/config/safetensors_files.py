"""The headers of a model's safetensors files: names and shapes of its tensors, without their data."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

# Far above the header of any model.
_MAX_HEADER = 100 << 20


class Stored(NamedTuple):
    """Where a tensor lies."""

    file: Path
    dtype: str  # as safetensors names it
    shape: list[int]
    start: int  # of its bytes in the file
    end: int


def stored_tensors(files: Iterable[Path]) -> dict[str, Stored]:
    """The tensors in safetensors files, by name.

    Raises:
        ValueError: a file is damaged or cut off.
    """
    tensors = {}
    for file in files:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size)) if size <= _MAX_HEADER else None
        if not isinstance(header, dict):
            raise ValueError(f"{file.name} has no header")
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = (8 + size + offset for offset in entry["data_offsets"])
                tensors[name] = Stored(file, entry["dtype"], entry["shape"], start, end)
        if max((stored.end for stored in tensors.values() if stored.file == file), default=0) > file.stat().st_size:
            raise ValueError(f"{file.name} is cut off")
    return tensors


def read_integers(stored: Stored) -> np.ndarray:
    """The values of a small tensor of 64-bit or 32-bit integers, int64 and flat."""
    types = {"I64": "<i8", "I32": "<i4"}
    if stored.dtype not in types:
        raise ValueError(f"a tensor of {stored.dtype} instead of integers")
    with stored.file.open("rb") as stream:
        stream.seek(stored.start)
        return np.frombuffer(stream.read(stored.end - stored.start), types[stored.dtype]).astype(np.int64)
