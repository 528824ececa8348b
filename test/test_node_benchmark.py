"""The benchmark of the node measures what it says; its limits hold on a machine with nothing else to do."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pi05_ros.node.benchmark import HORIZON, InstantPolicy, Measured, measure
from pi05_ros.observation import Observation
from pi05_ros.profile import load_profile


def test_it_measures_robot_and_node_as_processes(tmp_path: Path) -> None:
    measured = measure(2.0, tmp_path)
    assert 0.02 < measured.cpu_share < 2.0
    assert set(measured.rates_hz) == set(measured.dropped) == {"base", "left_wrist", "right_wrist", "joints"}
    assert measured.rates_hz["joints"] > measured.rates_hz["base"] > 10.0
    assert len(measured.overhead_ms) > 20
    # The way to another process comes on top of the node's own.
    assert 0.0 < np.median(measured.overhead_ms) < np.median(measured.arrival_ms)
    assert np.median(measured.wait_ms) < np.median(measured.overhead_ms)
    assert "| chunks |" in measured.table()


def test_a_missed_limit_is_said() -> None:
    fast, slow = np.full(10, 4.0), np.full(10, 6.0)
    for share, overhead, fits in ((0.5, fast, True), (0.7, fast, False), (0.5, slow, False)):
        assert Measured(1.0, share, overhead, overhead, fast, fast, {}, {}, 0.0).fits is fits


def test_the_instant_model_answers_every_dimension() -> None:
    profile = load_profile("demo")
    chunk = InstantPolicy(profile).infer(Observation({}, np.zeros(7), "go", stamp_ns=1, input_stamps_ns={}))
    assert chunk.actions.shape == (HORIZON, 7) and list(chunk.timings_ms) == ["model"]
