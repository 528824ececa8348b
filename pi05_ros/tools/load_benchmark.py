"""``pi05-ros load-benchmark``: how long a checkpoint takes to load, and how much memory it needs on the way."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from pi05_ros.checkpoint.description import Checkpoint
from pi05_ros.checkpoint.formats import open_checkpoint
from pi05_ros.checkpoint.loader import count_dtypes, load_model, terminal_progress
from pi05_ros.errors import ConfigurationError
from pi05_ros.model.precision import resolve_dtype

_PERIOD_S = 0.002


@dataclass(frozen=True)
class LoadMeasurement:
    """One load. Bytes throughout; anonymous memory is RssAnon of /proc/self/status, which leaves mapped files out."""

    seconds: float
    file_bytes: int
    model_bytes: int
    anonymous_before: int
    anonymous_peak: int
    dtypes: dict[str, int]

    @property
    def ratio(self) -> float:
        """Peak anonymous memory that loading added, over the loaded model."""
        return (self.anonymous_peak - self.anonymous_before) / self.model_bytes


class _PeakSampler:
    """Samples RssAnon from a thread of its own; the kernel keeps a high-water mark only of the sum with files."""

    def __init__(self) -> None:
        self.before = self.peak = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            self.peak = max(self.peak, anonymous_bytes())

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()
            self.peak = max(self.peak, anonymous_bytes())


def anonymous_bytes() -> int:
    """RssAnon of this process."""
    with Path("/proc/self/status").open(encoding="ascii") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    raise ConfigurationError(
        "no_rss_anon", "/proc/self/status has no RssAnon; this measurement needs Linux 4.5 or later"
    )


def measure_load(
    checkpoint: Checkpoint, device: str, dtype: torch.dtype, *, cold: bool = False, show: bool | None = None
) -> LoadMeasurement:
    """Load once and measure. ``cold`` asks the kernel to forget the files first, so that the disk is measured too."""
    if cold:
        for file in checkpoint.weight_files:
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
    sampler = _PeakSampler()
    began = time.monotonic()
    with terminal_progress(checkpoint.id, show) as progress, sampler.running():
        model = load_model(checkpoint, device, dtype, progress)
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.monotonic() - began
    return LoadMeasurement(
        seconds=seconds,
        file_bytes=sum(file.stat().st_size for file in checkpoint.weight_files),
        model_bytes=sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()),
        anonymous_before=sampler.before,
        anonymous_peak=sampler.peak,
        dtypes=count_dtypes(model),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to the sub-command's parser."""
    parser.add_argument(
        "checkpoint", nargs="?", help="folder or hub id; left out: a random one of --size, made for this"
    )
    parser.add_argument("--size", default="small", help="size of the random checkpoint (tiny, small, mid, full)")
    parser.add_argument("--assets", help="OpenPI asset id, where there are several")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache first")
    parser.add_argument("--limit", type=float, default=1.1, help="highest ratio of added memory to the model on a CPU")


def run(args: argparse.Namespace) -> int:
    """Measure and print; status 1 where the ratio on a CPU exceeds the limit."""
    if args.checkpoint is not None:
        return _report(args, open_checkpoint(args.checkpoint, assets=args.assets))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / args.size
        # A process of its own: memory given back after making the weights would be used again and not be counted.
        command = [sys.executable, "-m", "pi05_ros.cli", "make-checkpoint", str(folder), "--size", args.size]
        options = ["--dtype", "bfloat16", "--no-tokenizer", "--no-statistics", "--max-shard-mb", "500"]
        if subprocess.run([*command, *options], check=False).returncode:
            raise ConfigurationError("size", f"no random checkpoint of size {args.size!r} could be made; see above")
        return _report(args, open_checkpoint(folder))


def _report(args: argparse.Namespace, checkpoint: Checkpoint) -> int:
    device = args.device
    measured = measure_load(checkpoint, device, resolve_dtype(args.dtype, device), cold=args.cold)
    dtypes = ", ".join(f"{count:,} {name}" for name, count in measured.dtypes.items())
    rate = measured.file_bytes / measured.seconds / 1e9
    print(f"{checkpoint.id} on {device}: {dtypes}")
    print(f"files {measured.file_bytes / 1e9:.3f} GB in {measured.seconds:.2f} s ({rate:.2f} GB/s)")
    print(
        f"model {measured.model_bytes / 1e9:.3f} GB; RssAnon {measured.anonymous_before / 1e9:.3f} GB before, "
        f"{measured.anonymous_peak / 1e9:.3f} GB at its peak: {measured.ratio:.3f} x the model added"
    )
    return 1 if torch.device(device).type == "cpu" and measured.ratio > args.limit else 0
