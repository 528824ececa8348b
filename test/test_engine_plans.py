"""One plan, many requests: nothing of one request is left in the next, and every door to a plan gives the same bits."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from engine_cases import ACROSS_PLANS, answer, engine, golden_engine, inputs, leftover, noise, observations, run_one
from golden_data import case, read_json

from pi05_ros.engine.engine import InferenceOptions, ModelInputs
from pi05_ros.errors import EngineError, ObservationError

GOLDEN_CASES = [name for name in read_json("cases.json") if "bf16" not in name and name != "b4"]


@pytest.mark.parametrize("name", GOLDEN_CASES)
def test_golden_actions_through_the_engine(name: str):
    """Cut prompt, absent cameras left out, packed weights and tables: still the references' actions."""
    one = case(name)
    got = run_one(
        golden_engine(), inputs(one), noise=one.noise[0].numpy(), num_steps=one.num_steps, horizon=one.noise.shape[1]
    )
    tolerance = 2e-5 if one.peer == "lerobot" else 2e-4
    assert (got.actions - one.tensors["actions"][0]).abs().max() <= tolerance


def test_golden_group():
    one = case("b4")
    options = [InferenceOptions(noise=one.noise[member].numpy()) for member in range(4)]
    members = [inputs(one, member) for member in range(4)]
    got = torch.stack([result.actions for result in golden_engine().run(members, options)])
    assert (got - one.tensors["actions"]).abs().max() <= 2e-5


def requests() -> list[tuple[str, list[ModelInputs], dict]]:
    """Requests that share plans pairwise: two observations each, alone and grouped, 5 and 10 steps, RTC on and off."""
    first, second, third, fourth = observations()
    groups = {"single": ([first], [second]), "group": ([first, second], [third, fourth])}
    found = []
    for (size, pair), steps, mode in itertools.product(groups.items(), (5, 10), ("off", "guided", "hard_prefix")):
        for turn, members in enumerate(pair):
            options = {"num_steps": steps}
            if mode != "off":
                options["rtc"] = leftover(7 + turn, mode)
            found.append((f"{size} {turn}, {steps} steps, rtc {mode}", members, options))
    return found


@pytest.mark.parametrize("capture", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("cache", [0, 16], ids=["uncached", "cached"])
def test_alternating_requests_equal_fresh_engines(capture: bool, cache: int):
    """Bit for bit. With the cache every second round hits; with capture every plan is replayed, and self-checked."""
    one = engine(capture, max_plans=64, prefix_cache_entries=cache, cuda_graph=True)
    asked = requests()
    fresh = {name: answer(engine(), members, **options) for name, members, options in asked}
    for turn in range(2):
        for name, members, options in asked:
            assert torch.equal(answer(one, members, **options), fresh[name]), (name, turn)
    assert all(one.plans.values()) == capture
    counters = one.cache_counters
    assert (counters.hits > 0) == (cache > 0)


def test_across_plans_only_rounding_differs():
    """Group of any size against singles; a camera left out against the same camera masked; buckets of any length."""
    members = observations()
    one = engine(max_plans=32)
    alone = torch.cat([answer(one, [member], noise=noise(index)) for index, member in enumerate(members)])
    for size in (2, 3, 4):
        assert (answer(one, members[:size]) - alone[:size]).abs().max() <= ACROSS_PLANS, size
    absent = replace(members[0], image_masks=(True, False, True))
    left_out = answer(one, [absent])
    together = answer(one, [absent, members[1]])[:1]
    assert (left_out - together).abs().max() <= ACROSS_PLANS
    assert {key.cameras for key in one.plans if key.observations == 1} == {2, 3}
    for bucket in (1, 7, 40):
        assert (answer(engine(prompt_bucket=bucket), members[:1]) - alone[:1]).abs().max() <= ACROSS_PLANS, bucket


def test_candidates_share_one_prefix():
    one = engine()
    member = observations()[0]
    together = answer(one, [member] * 4)
    (key,) = one.plans
    assert (key.observations, key.candidates) == (1, 4)
    apart = torch.cat([answer(one, [member], noise=noise(index)) for index in range(4)])
    assert (together - apart).abs().max() <= ACROSS_PLANS
    assert not torch.equal(together[0], together[1])
    assert torch.equal(answer(one, [member] * 4), together)


def test_what_is_not_computed():
    """Padding beyond the bucket and absent cameras do not enter the plan; an unmasked prompt needs no mask."""
    one, members = engine(prompt_bucket=16), observations()
    for member in members:
        run_one(one, member)
    assert [(key.cameras, key.prompt, key.masked) for key in one.plans] == [
        (3, 32, True),
        (2, 32, True),
        (3, 32, False),
    ]


def test_results_are_the_callers():
    one = engine()
    first = run_one(one, observations()[0])
    kept = first.actions.clone()
    run_one(one, observations()[1])
    assert torch.equal(first.actions, kept)


def test_the_attention_backend_is_told(caplog: pytest.LogCaptureFixture):
    one = engine(capture=True, cuda_graph=True)
    with caplog.at_level(logging.INFO):
        run_one(one, observations()[0])
    assert re.search(r"captured .*attention: prefix \w+, suffix \w+", caplog.text)


def test_plans_are_bounded():
    one = engine(max_plans=2)
    for steps in (1, 2, 3, 1):
        run_one(one, observations()[0], num_steps=steps)
    assert [key.num_steps for key in one.plans] == [3, 1]


def test_horizon_seed_and_noise_of_each_request():
    one = engine()
    member = observations()[0]
    results = one.run([member], [InferenceOptions(seed=3, horizon=7, num_steps=2)])
    assert results[0].actions.shape == (7, 32)
    assert (results[0].noise_seed, results[0].num_steps) == (3, 2)
    drawn = torch.randn(7, 32, generator=torch.Generator().manual_seed(3)).numpy()
    assert torch.equal(run_one(one, member, noise=drawn, horizon=7, num_steps=2).actions, results[0].actions)
    unseeded = [one.run([member], [InferenceOptions(num_steps=1)])[0] for _ in range(2)]
    assert unseeded[0].noise_seed != unseeded[1].noise_seed


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"num_steps": 0}, "num_steps"),
        ({"num_steps": True}, "num_steps"),
        ({"num_steps": 1001}, "num_steps"),
        ({"horizon": 13}, "horizon"),
        ({"noise": noise(0)[:11]}, "noise"),
        ({"noise": noise(0) * float("nan")}, "noise"),
        ({"noise": None, "seed": -1}, "seed"),
        ({"noise": None, "seed": 2**64}, "seed"),
        ({"cuda_graph": "yes"}, "cuda_graph"),
        ({"prefix_cache": 3}, "prefix_cache"),
    ],
)
def test_unusable_options(options: dict, code: str):
    with pytest.raises(ObservationError) as caught:
        run_one(engine(), observations()[0], **options)
    assert caught.value.code == f"observation.{code}"


def test_groups_that_do_not_fit():
    one, (first, second, *_) = engine(), observations()
    for options in (
        [InferenceOptions(num_steps=5), InferenceOptions(num_steps=10)],
        [InferenceOptions(horizon=5), InferenceOptions(horizon=10)],
        [InferenceOptions(rtc=leftover(1)), InferenceOptions()],
        [InferenceOptions()],
    ):
        with pytest.raises(EngineError) as caught:
            one.run([first, second], options)
        assert caught.value.code == "engine.group"


class FailingCapture:
    """Fails, or captures something that does nothing."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.calls = 0

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        self.calls += 1
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        function()
        return lambda: None


@pytest.mark.parametrize("fails", [True, False], ids=["capture fails", "replay gives other actions"])
def test_a_graph_that_cannot_be_trusted_leaves_its_shape_eager(fails: bool, caplog: pytest.LogCaptureFixture):
    first, second, *_ = observations()
    one = engine(capture=True, cuda_graph=True)
    one._capture = FailingCapture(fails)
    wanted = [answer(engine(), [member]) for member in (first, second)]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(answer(one, [first]), wanted[0])
            assert torch.equal(answer(one, [second]), wanted[1])
    assert len([record for record in caplog.records if "stays eager" in record.message]) == 1
    assert not any(one.plans.values())


def test_new_shapes_run_eagerly_until_an_idle_moment():
    one = engine(capture=True)
    member = observations()[0]
    first = run_one(one, member)
    assert not first.graph and not any(one.plans.values())
    assert one.capture_pending() and not one.capture_pending()
    again = run_one(one, member)
    assert again.graph and torch.equal(first.actions, again.actions)
    assert not run_one(one, member, cuda_graph=False).graph
    assert run_one(one, member, cuda_graph=True, num_steps=3).graph
    told = []
    run_one(one, member, num_steps=4)
    run_one(one, member, num_steps=6)
    one.warm_up(lambda done, total, shape: told.append((done, total, shape)))
    assert [(done, total) for done, total, _ in told] == [(0, 2), (1, 2)] and "4 steps" in told[0][2]
    assert all(one.plans.values())
