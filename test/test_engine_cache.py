"""The prefix cache: exact, bounded, and a miss whenever anything differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from engine_cases import answer, engine, observations, run_one

from pi05_ros.checkpoint.make import SIZES
from pi05_ros.engine.engine import Engine, InferenceOptions, ModelInputs
from pi05_ros.engine.prefix_cache import PrefixCache
from pi05_ros.engine.settings import EngineSettings
from pi05_ros.tools.bench import random_model
from pi05_ros.tools.gpu_check import observations as full_observations


def cached(**settings: object) -> Engine:
    return engine(prefix_cache_entries=8, **settings)


def counts(one: Engine) -> tuple[int, int]:
    return one.cache_counters.hits, one.cache_counters.misses


def test_off_by_default():
    one = engine()
    for _ in range(2):
        assert not run_one(one, observations()[0]).cache_hit
    assert counts(one) == (0, 0)


@pytest.mark.parametrize("capture", [False, True])
def test_a_hit_gives_the_same_bits(capture: bool):
    one, member = engine(capture, prefix_cache_entries=8, cuda_graph=True), observations()[0]
    missed = run_one(one, member)
    run_one(one, observations()[1])
    hit = run_one(one, member)
    assert (missed.cache_hit, hit.cache_hit) == (False, True)
    assert torch.equal(missed.actions, hit.actions)
    assert torch.equal(run_one(one, member, prefix_cache=False).actions, hit.actions)
    # Other noise, other steps, another horizon: the prefix is the same.
    for options in ({"num_steps": 5}, {"horizon": 7, "noise": None, "seed": 1}):
        again = run_one(one, member, **options)
        assert again.cache_hit
        assert torch.equal(again.actions, run_one(engine(), member, **options).actions)


def _pixel(one: ModelInputs) -> ModelInputs:
    image = one.images[1].clone()
    image[2, 17, 40] = torch.nextafter(image[2, 17, 40], torch.tensor(2.0))
    return replace(one, images=(one.images[0], image, one.images[2]))


def _token(one: ModelInputs) -> ModelInputs:
    tokens = one.tokens.clone()
    tokens[4] += 1
    return replace(one, tokens=tokens)


def _token_mask(one: ModelInputs) -> ModelInputs:
    mask = one.token_mask.clone()
    mask[3] = False
    return replace(one, token_mask=mask)


@pytest.mark.parametrize(
    "change",
    [
        _pixel,
        _token,
        _token_mask,
        lambda one: replace(one, image_masks=(True, True, False)),
        lambda one: replace(one, images=(one.images[1], one.images[0], one.images[2])),
    ],
    ids=["pixel", "token", "token mask", "camera mask", "camera map"],
)
def test_whatever_differs_misses(change: Callable[[ModelInputs], ModelInputs]):
    one, member = cached(), observations()[0]
    run_one(one, member)
    other = change(member)
    got = run_one(one, other)
    assert not got.cache_hit and counts(one) == (0, 2)
    assert torch.equal(got.actions, run_one(engine(), other).actions)


def test_what_is_masked_does_not_matter():
    """Ids under the mask and pixels of an absent camera are not part of the key, and not of the answer."""
    one, member = cached(), observations()[2]
    run_one(one, member)
    tokens = torch.where(member.token_mask, member.tokens, 9)
    assert run_one(one, replace(member, tokens=tokens)).cache_hit
    assert run_one(one, replace(member, images=(*member.images[:2], torch.rand_like(member.images[2])))).cache_hit


def test_other_weights_miss():
    one, member = cached(), observations()[0]
    first = run_one(one, member)
    with torch.no_grad():
        one.model.prefix.blocks[0].mlp.down_proj.weight.mul_(1.5)
    second = run_one(one, member)
    assert not second.cache_hit and not torch.equal(first.actions, second.actions)
    assert one.cache_counters.entries == 1
    one.weights_changed()
    assert one.cache_counters.entries == one.cache_counters.bytes == 0
    assert not run_one(one, member).cache_hit


def test_groups_hit_as_a_whole():
    one, members = cached(), observations()
    options = [InferenceOptions(seed=index) for index in range(2)]
    missed = one.run(members[:2], options)
    hit = one.run(members[:2], options)
    mixed = one.run([members[0], members[3]], options)
    assert [result.cache_hit for result in (*missed, *hit, *mixed)] == [False, False, True, True, False, False]
    assert all(torch.equal(a.actions, b.actions) for a, b in zip(missed, hit, strict=True))
    # A group's entry is not taken for a single run: the last bit may differ between shapes of a pass.
    assert not run_one(one, members[0]).cache_hit


def test_candidates_of_a_cached_prefix():
    one, member = cached(), observations()[0]
    fresh = answer(engine(), [member] * 3)
    run_one(one, member)
    assert torch.equal(answer(one, [member] * 3), fresh)
    assert counts(one) == (1, 1)


def test_bytes_and_entries_are_bounded_under_churn():
    entry = torch.zeros(100)  # 400 bytes
    cache = PrefixCache(5, 1500)
    for index in range(200):
        cache.put(bytes([index]), entry.clone())
        cache.get([bytes([index // 2])])
        assert cache.counters.bytes == 400 * cache.counters.entries <= 1500
    assert (cache.counters.entries, cache.counters.evictions) == (3, 197)
    cache.put(b"large", torch.zeros(1000))
    assert cache.get([b"large"]) is None and cache.counters.entries == 3
    by_entries = PrefixCache(2, 10**9)
    for key in (b"a", b"b", b"a", b"c"):
        by_entries.get([key])
        by_entries.put(key, entry)
    assert by_entries.get([b"a"]) is not None and by_entries.get([b"b"]) is None


def test_a_hit_saves_the_prefix_stage():
    """At least 95 % of it, hash and copy included; on a network whose prefix weighs something."""
    config = SIZES["small"]
    one = Engine(random_model(config, 0, torch.device("cpu"), torch.float32), 1, EngineSettings(prefix_cache_entries=2))
    (member,) = full_observations(config, 1, 37)
    missed = min(run_one(one, member, noise=None, prefix_cache=False).timings_ms["prefix"] for _ in range(2))
    run_one(one, member, noise=None)
    hits = [run_one(one, member, noise=None) for _ in range(5)]
    assert all(hit.cache_hit for hit in hits)
    assert min(hit.timings_ms["prefix"] for hit in hits) <= 0.05 * missed
