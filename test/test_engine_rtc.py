"""Real-time chunking against LeRobot's guided and the trained hard-prefix results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_cases import engine, golden_engine, inputs, leftover, noise, observations, run_one
from golden_data import case, read_json, tensors

from pi05_ros.engine.chunking import RealTimeChunking
from pi05_ros.errors import ObservationError

CASES = read_json("rtc.json")


def chunking(described: dict) -> RealTimeChunking:
    last = tensors("rtc")["prev_chunk"][0]
    rows, dims = described["leftover_steps"], described["leftover_dims"]
    start = int(described["leftover"].split("[:, ")[1].split(":")[0]) if described["leftover"] else 0
    return RealTimeChunking(
        leftover=last[start:, :dims][:rows].numpy() if rows else np.zeros((0, dims), np.float32),
        delay=described["inference_delay"],
        mode="guided" if described["mode"] == "guided" else "hard_prefix",
        execution_horizon=described["execution_horizon"],
        schedule=described["schedule"].lower(),
        max_guidance_weight=described["max_guidance_weight"],
    )


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str):
    described, one, wanted = CASES[name], case("b1_3cam"), tensors("rtc")
    rtc = chunking(described)
    if f"{name}.prefix_weights" in wanted:
        assert (rtc.row_weights(50) - wanted[f"{name}.prefix_weights"]).abs().max() <= 1e-7
    got = run_one(golden_engine(), inputs(one), noise=one.noise[0].numpy(), num_steps=described["num_steps"], rtc=rtc)
    assert (got.actions - wanted[f"{name}.actions"][0]).abs().max() <= 2e-5


def test_nothing_left_over_is_no_chunking():
    one, member = engine(), observations()[0]
    free = run_one(one, member).actions
    empty = RealTimeChunking(np.zeros((0, 32), np.float32), 0)
    unbound = leftover(1, "hard_prefix", delay=0)
    for rtc in (empty, unbound):
        assert torch.equal(run_one(one, member, rtc=rtc).actions, free)
    assert len(one.plans) == 1


def test_a_hard_prefix_is_kept():
    rtc = leftover(3, "hard_prefix", rows=10, delay=6)
    got = run_one(engine(), observations()[0], rtc=rtc).actions
    assert torch.equal(got[:6], torch.from_numpy(rtc.leftover[:6]))
    assert not torch.equal(got[6:10], torch.from_numpy(rtc.leftover[6:10]))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"leftover": noise(0)[:, :1] * float("inf")}, "finite"),
        ({"leftover": np.zeros((13, 32), np.float32)}, r"\[12, 32\]"),
        ({"leftover": np.zeros((5, 33), np.float32)}, r"\[5, 33\]"),
        ({"leftover": np.zeros(5, np.float32)}, "rows, dims"),
        ({"delay": 13}, "delay"),
        ({"delay": -1}, "delay"),
        ({"mode": "hard_prefix", "delay": 11}, "11 rows"),
        ({"mode": "soft"}, "mode"),
        ({"schedule": "cubic"}, "schedule"),
        ({"execution_horizon": 0}, "execution_horizon"),
        ({"max_guidance_weight": float("inf")}, "max_guidance_weight"),
    ],
)
def test_unusable(change: dict, named: str):
    with pytest.raises(ObservationError, match=named) as caught:
        run_one(engine(), observations()[0], rtc=replace(leftover(0), **change))
    assert caught.value.code == "observation.rtc"
