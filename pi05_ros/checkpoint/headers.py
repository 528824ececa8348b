"""What safetensors files say about themselves, read without touching the weights."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pi05_ros.errors import CheckpointError

# Larger headers do not occur (the full model's has 100 kB); a corrupt length must not make us read gigabytes.
_MAX_HEADER_BYTES = 100_000_000
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

    The format is eight bytes of length, that much JSON, then the data (safetensors' README, "Format"); the library
    itself gives no byte positions.

    Raises:
        CheckpointError: ``checkpoint.broken_weights`` for a file that is cut short, not safetensors, or inconsistent.
    """
    return [tensor for file in files for tensor in sorted(_read_header(file), key=lambda tensor: tensor.start)]


def _read_header(file: Path) -> list[StoredTensor]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise ValueError(f"its header should be {length} bytes long, the whole file has {size}")
            table = json.loads(stream.read(length))
        data = 8 + length
        tensors = [
            StoredTensor(
                file=file,
                key=key,
                dtype=str(entry["dtype"]),
                shape=tuple(int(side) for side in entry["shape"]),
                start=data + int(entry["data_offsets"][0]),
                end=data + int(entry["data_offsets"][1]),
            )
            for key, entry in table.items()
            if key != "__metadata__"
        ]
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise CheckpointError(
            "broken_weights", f"{file} is not a whole safetensors file: {error}; copy or download it again"
        ) from error
    end = max((tensor.end for tensor in tensors), default=data)
    if end != size:
        raise CheckpointError(
            "broken_weights", f"{file} should have {end} bytes by its header and has {size}; copy or download it again"
        )
    return tensors


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
