"""Keys and values of prefixes that were computed before; exact or not at all."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pi05_ros.engine.requests import ModelInputs


@dataclass
class CacheCounters:
    """Since the engine was made; ``bytes`` and ``entries`` as of now."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    entries: int = 0
    bytes: int = 0


class PrefixCache:
    """Least recently used first out, bounded by entries and bytes. 0 entries: no cache."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self.max_entries = max_entries
        self.max_bytes = max_bytes
        self.counters = CacheCounters()
        self._entries: OrderedDict[bytes, torch.Tensor] = OrderedDict()

    @property
    def enabled(self) -> bool:
        return self.max_entries > 0 and self.max_bytes > 0

    def get(self, keys: Sequence[bytes]) -> list[torch.Tensor] | None:
        """Entries of a whole group, or ``None`` where one is missing: a pass computes all of its members or none."""
        found = [self._entries.get(key) for key in keys]
        entries = [entry for entry in found if entry is not None]
        if len(entries) < len(keys):
            self.counters.misses += len(keys)
            return None
        self.counters.hits += len(keys)
        for key in keys:
            self._entries.move_to_end(key)
        return entries

    def put(self, key: bytes, entry: torch.Tensor) -> None:
        """Keep an entry; what does not fit at all is not kept."""
        size = _size(entry)
        self._drop(key)
        if size > self.max_bytes:
            return
        while self._entries and (len(self._entries) >= self.max_entries or self.counters.bytes + size > self.max_bytes):
            self._drop(next(iter(self._entries)))
            self.counters.evictions += 1
        self._entries[key] = entry
        self.counters.bytes += size
        self.counters.entries = len(self._entries)

    def clear(self) -> None:
        self._entries.clear()
        self.counters.bytes = self.counters.entries = 0

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.counters.bytes -= _size(entry)
            self.counters.entries = len(self._entries)


def prefix_key(inputs: ModelInputs, cameras: Sequence[int], layout: str) -> bytes:
    """Hash of all that a prefix's keys and values depend on.

    Args:
        cameras: those that are computed, in order.
        layout: everything else that has a say in the last bit: weights, dtype, shape of the pass and place in it.
    """
    digest = hashlib.blake2b(layout.encode(), digest_size=32)
    digest.update(repr((inputs.image_masks, tuple(cameras), inputs.tokens.shape)).encode())
    for camera in cameras:
        digest.update(inputs.images[camera].contiguous().numpy().data)
    tokens = torch.where(inputs.token_mask, inputs.tokens, 0)
    digest.update(tokens.numpy().tobytes())
    digest.update(inputs.token_mask.numpy().tobytes())
    return digest.digest()


def _size(entry: torch.Tensor) -> int:
    return entry.numel() * entry.element_size()
