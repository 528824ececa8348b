"""CUDA graphs: record a function once, replay it as one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Capture(Protocol):
    """Turns a function without arguments, which works on fixed buffers only, into one that repeats it."""

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]: ...


class PlainCall:
    """Where there are no graphs: repeating is calling."""

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        function()
        return function


class CudaGraphs:
    """Captures on a stream of its own.

    ``thread_local`` lets other threads of the process (cameras, an image decoder) use CUDA meanwhile. All graphs share
    one memory pool: they never run at the same time, and nothing lives in it between two replays.
    """

    _WARM_UPS = 2  # cuBLAS and the attention kernels allocate their workspaces at first use

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(self._WARM_UPS):
                    function()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                function()
        return graph.replay
