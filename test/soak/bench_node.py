"""What the node itself costs: CPU time of its process, and the time between the last input and the chunk.

    python test/soak/bench_node.py [--seconds 20]

Three raw 640x480 cameras at 30 Hz and joints at 50 Hz from the stand-in robot in another process; the policy is a stub
that answers at once, asked for every observation. The overhead of a chunk is the time from the callback of its last
input to its publication, less the policy's own time.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
from ros_helpers import Graph, stand_in_robot, stub_node

from pi05_ros.paths import config_dir

CAMERAS = ("base", "left_wrist", "right_wrist")


def three_raw_cameras(folder: Path) -> Path:
    """The profile of the demo with all three cameras raw."""
    profile = yaml.safe_load((config_dir() / "profiles" / "demo.yaml").read_text(encoding="utf-8"))
    for name in CAMERAS:
        profile["cameras"][name] |= {"topic": f"{name}/image_raw", "type": "image"}
    path = folder / "three_raw.yaml"
    path.write_text(yaml.safe_dump(profile), encoding="utf-8")
    return path


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, all its threads."""
    fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    seconds = parser.parse_args().seconds
    profile = three_raw_cameras(Path(tempfile.mkdtemp()))
    with (
        Graph() as graph,
        stub_node(f"profile:={profile}", "trigger:=continuous") as node,
        stand_in_robot("--profile", str(profile)),
    ):
        chunks, status = graph.chunks(), graph.status()
        assert graph.change_state("configure")
        assert graph.change_state("activate")
        chunks.wait_for_count(60, timeout=60.0)
        first, cpu, began = len(chunks), cpu_seconds(node.pid), time.monotonic()
        before = {stream.name: stream.received for stream in status[-1].streams}
        time.sleep(seconds)
        elapsed = time.monotonic() - began
        used = cpu_seconds(node.pid) - cpu
        measured = chunks[first:]
        received = {stream.name: stream.received - before[stream.name] for stream in status[-1].streams}
    stages = [dict(zip(chunk.stage_names, chunk.stage_ms, strict=True)) for chunk in measured]
    overhead = np.array([stage["wait"] + stage["total"] - stage["stub"] for stage in stages])
    waits = np.array([stage["wait"] for stage in stages])
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {elapsed:.0f} s")
    print("| what | measured | at most |")
    print("|---|---|---|")
    print(f"| CPU of the node's process | {100 * used / elapsed:.0f} % of one core | 60 % |")
    print(f"| overhead p50 | {np.percentile(overhead, 50):.2f} ms | 5 ms |")
    print(f"| overhead p95 | {np.percentile(overhead, 95):.2f} ms | - |")
    print(f"| of it waiting for the inference thread, p50 | {np.percentile(waits, 50):.2f} ms | - |")
    rates = ", ".join(f"{name} {count / elapsed:.1f} Hz" for name, count in received.items())
    print(f"| inputs | {rates} | - |")
    print(f"| chunks | {len(measured) / elapsed:.1f} Hz | - |")


if __name__ == "__main__":
    main()
