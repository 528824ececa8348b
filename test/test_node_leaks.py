"""Configure, activate, deactivate, clean up, again and again: nothing grows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from ros_helpers import COMMAND, Graph, Process, stand_in_robot

from pi05_ros.checkpoint.formats import open_checkpoint
from pi05_ros.checkpoint.make import RobotSide, random_statistics, write_lerobot
from pi05_ros.paths import builtin_checkpoint

# The first cycles import, compile and fill caches.
SETTLING = 3
VOCABULARY = 200_000


@dataclass(frozen=True)
class Usage:
    threads: int
    files: int
    rss_mb: float


@pytest.fixture
def graph() -> Iterator[Graph]:
    with Graph() as graph:
        yield graph


def usage(pid: int) -> Usage:
    process = Path("/proc") / str(pid)
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    return Usage(
        threads=int(status["Threads"]),
        files=len(list((process / "fd").iterdir())),
        rss_mb=int(status["RssAnon"].split()[0]) / 1024,
    )


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """As fast as the built-in one, but with an embedding so large that a copy kept by mistake shows."""
    config = replace(open_checkpoint(builtin_checkpoint()).config, vocab=VOCABULARY)
    statistics = random_statistics(7, seed=0)
    robot = RobotSide(
        state_dim=7, action_dim=7, executed_steps=25, state_statistics=statistics, action_statistics=statistics
    )
    return write_lerobot(tmp_path / "checkpoint", config, robot)


@pytest.mark.parametrize("cycles", [8, pytest.param(30, marks=pytest.mark.soak)])
def test_cycles_leak_nothing(graph: Graph, checkpoint: Path, cycles: int) -> None:
    size_mb = VOCABULARY * open_checkpoint(checkpoint).config.vlm.width * 4 / 2**20
    options = ["--no-autostart", "--checkpoint", str(checkpoint), "--profile", "demo"]
    with (
        Process([*COMMAND, "node", *options, "--ros-args", "-p", "trigger_rate_hz:=20.0"]) as node,
        stand_in_robot(),
    ):
        chunks = graph.chunks()
        usages = []
        for _ in range(cycles):
            count = len(chunks)
            assert graph.change_state("configure", timeout=60.0)
            assert graph.change_state("activate")
            chunks.wait_for_count(count + 2, timeout=30.0)
            assert graph.change_state("deactivate")
            assert graph.change_state("cleanup")
            time.sleep(0.2)  # the thread that answered the last service call ends a moment later
            usages.append(usage(node.pid))
        print("\n".join(map(str, usages)))
        settled, last = usages[SETTLING - 1], usages[-1]
        assert last.threads == settled.threads
        assert last.files == settled.files
        assert last.rss_mb - settled.rss_mb < size_mb, "as much as one checkpoint was kept over all cycles"
