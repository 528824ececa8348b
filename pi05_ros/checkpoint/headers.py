"""What safetensors files say about themselves, read without touching the weights."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from pi05_ros.errors import CheckpointError

_SAMPLE_BYTES = 1024


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file; ``start`` and ``end`` are byte positions in the file."""

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self.end - self.start


def read_headers(files: Iterable[Path]) -> list[StoredTensor]:
    """Every tensor of the files, in the order in which the bytes lie.

    Raises:
        CheckpointError: ``checkpoint.broken_weights`` for a file that is cut short, not safetensors, or inconsistent.
    """
    return [tensor for file in files for tensor in sorted(_read_header(file), key=lambda tensor: tensor.start)]


def _read_header(file: Path) -> list[StoredTensor]:
    try:
        # Opening checks everything: lengths, dtypes, that the tensors cover the file. It does not tell where they lie,
        # so the header (eight bytes of length, that much JSON, then the data) is read once more.
        with safe_open(file, framework="np"), file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            table: dict[str, Any] = json.loads(stream.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            "broken_weights", f"{file} is not a whole safetensors file: {error}; copy or download it again"
        ) from error
    table.pop("__metadata__", None)
    data = 8 + length
    return [
        StoredTensor(
            file=file,
            key=key,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            start=data + entry["data_offsets"][0],
            end=data + entry["data_offsets"][1],
        )
        for key, entry in table.items()
    ]


def fingerprint(tensors: Iterable[StoredTensor], small_files: Iterable[Path]) -> str:
    """SHA-256 (hex) that tells one checkpoint's content from another's in a fraction of a second.

    It covers the small files whole, every tensor's name, dtype and shape, and three kilobytes of every tensor: its
    beginning, middle and end. Neither paths nor times enter, so a copy keeps its fingerprint; headers and sizes alone
    would not do, because two fine-tunes of one model share them. Training or merging moves every number of a tensor,
    so the samples see it; a hand-made change of a few numbers inside a large tensor they do not see. Hashing all
    seven gigabytes would cost more than loading them.

    Raises:
        CheckpointError: ``checkpoint.broken_weights`` for a file that cannot be read.
    """
    digest = hashlib.sha256()

    def add(label: str, content: bytes) -> None:
        digest.update(f"{len(label)}:{len(content)}:{label}".encode() + content)

    for file in sorted(small_files, key=lambda file: file.name):
        add(file.name, _read_small(file))
    descriptors: dict[Path, int] = {}
    try:
        for tensor in sorted(tensors, key=lambda tensor: tensor.key):
            if tensor.file not in descriptors:
                descriptors[tensor.file] = os.open(tensor.file, os.O_RDONLY)
            last = max(tensor.start, tensor.end - _SAMPLE_BYTES)
            samples = b"".join(
                os.pread(descriptors[tensor.file], min(_SAMPLE_BYTES, tensor.size), position)
                for position in (tensor.start, (tensor.start + last) // 2, last)
            )
            add(f"{tensor.key} {tensor.dtype} {tensor.shape}", samples)
    except OSError as error:
        raise CheckpointError("broken_weights", f"the weights cannot be read: {error}") from error
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    return digest.hexdigest()


def _read_small(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise CheckpointError("missing_file", f"{file} cannot be read: {error}") from error
