"""The benchmark tool and its roofline."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from pi05_ros.engine.plan import PlanKey
from pi05_ros.errors import ConfigurationError
from pi05_ros.model.config import Pi05Config
from pi05_ros.tools import bench
from pi05_ros.tools.roofline import stages


def call(*words: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(list(words)))


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output, picture = tmp_path / "times.json", tmp_path / "times.png"
    options = ["--size", "tiny", "--cameras", "1", "--num-inference-steps", "2", "--repeats", "3", "--batch-size", "2"]
    options += ["--same-observation", "--prefix-cache", "4", "--rate-hz", "1000000", "--peak-tflops", "0.1"]
    assert call(*options, "--peak-gb-per-s", "10", "--output", str(output), "--plot", str(picture)) == 0
    report = json.loads(output.read_text(encoding="utf-8"))
    side = report["sides"]["pi05_ros"]
    assert side["repeats"] == len(report["times_ms"]["pi05_ros"]) == side["deadline_misses"] == 3
    assert side["min_ms"] <= side["p50_ms"] <= side["p99_ms"]
    assert report["prefix_cache"] == {"hits": 6, "misses": 2, "bytes": report["prefix_cache"]["bytes"]}
    assert report["roofline"]["floor_total_ms"] < side["min_ms"]
    assert picture.stat().st_size > 1000
    assert "p95" in capsys.readouterr().out


def test_nothing_to_measure():
    with pytest.raises(ConfigurationError, match="nothing to measure"):
        call("--skip-ours")


def test_floor_of_the_full_size():
    """Against figures worked out by hand for an H200 (790 TFLOP/s, 4.3 TB/s): 0.84, 4.75 and 1.49 ms."""
    config = Pi05Config.full()
    key = PlanKey(1, 1, 3, 200, False, 50, 32, 10, "off", torch.bfloat16)
    floors = {one.name: one.floor_ms(790e12, 4.3e12) for one in stages(config, key)}
    assert floors == pytest.approx({"siglip": 0.84, "prefix": 4.75, "expert": 1.49}, rel=0.1)
