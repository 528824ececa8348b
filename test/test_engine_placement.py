"""Offload: the same actions whatever lives where, the memory that was foretold, and nothing lost by a failure."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_cases import answer, engine, observations, run_one, small_config, small_model

from pi05_ros.engine.engine import Engine
from pi05_ros.engine.placement import Placement
from pi05_ros.engine.planner import GIB, OVERHEAD_BYTES, choices, measure_parts, place_weights, plan_placement, predict
from pi05_ros.engine.settings import EngineSettings, load_preset
from pi05_ros.errors import ConfigurationError, EngineError
from pi05_ros.model.config import Pi05Config

# Each mode of the reference document's list, and all at once.
MODES = {
    "image encoder leaves after embedding": Placement(vision="stage"),
    "image encoder layer by layer": Placement(vision="layer"),
    "token embedding on the host": Placement(token_embedding="host"),
    "two language layers leave after the prefix": Placement(language="stage", language_layers=1),
    "language layer by layer": Placement(language="layer", empty_cache=True),
    "last language layer streamed": Placement(language="layer", language_layers=1),
    "expert leaves after denoising": Placement(expert="stage"),
    "expert layer by layer": Placement(expert="layer"),
    "everything": Placement("layer", "layer", "layer", None, "host", True),
}


def placed(placement: Placement) -> Engine:
    return engine(placement=placement)


@pytest.mark.parametrize("mode", MODES)
def test_same_actions(mode: str):
    one, members = placed(MODES[mode]), observations()
    resident = engine()
    for group in (members[:1], members[1:3], members[:1]):
        assert torch.equal(answer(one, group, num_steps=3), answer(resident, group, num_steps=3))


@pytest.mark.parametrize("mode", MODES)
def test_weights_off_the_device_cannot_be_used(mode: str):
    """On one device there is no second memory; what is away is on torch's meta device, so that use of it fails."""
    one = placed(MODES[mode])
    run_one(one, observations()[0], num_steps=1)
    away = [one for one in one.model.parameters() if one.device.type == "meta"]
    host = MODES[mode].token_embedding == "host"
    assert bool(away) == (MODES[mode] != Placement(token_embedding="host"))
    assert hasattr(one.model.prefix.embed_tokens, "weight") != host
    for parameter in away:
        with pytest.raises(NotImplementedError):
            parameter.cpu()


@pytest.mark.parametrize("stage", ["vision", "language", "expert"])
@pytest.mark.parametrize(
    "mode", ["everything", "expert leaves after denoising", "image encoder leaves after embedding"]
)
def test_an_exception_leaves_the_engine_usable(stage: str, mode: str):
    one, member = placed(MODES[mode]), observations()[0]
    wanted = run_one(one, member).actions
    before = one.placement.device_bytes
    layer = {
        "vision": one.model.vision.vision_model.blocks[1],
        "language": one.model.prefix.blocks[0],
        "expert": one.model.expert.blocks[1],
    }[stage]

    def fail(*_: object) -> None:
        raise MemoryError("no memory")

    handle = (
        layer.self_attn.register_forward_pre_hook(fail)
        if stage == "vision"
        else layer.mlp.register_forward_pre_hook(fail)
    )
    with pytest.raises(MemoryError):
        run_one(one, member)
    assert one.placement.device_bytes == before
    handle.remove()
    assert torch.equal(run_one(one, member).actions, wanted)


@pytest.mark.parametrize("mode", MODES)
def test_foretold_and_measured_weights(mode: str):
    placement = MODES[mode]
    foretold = predict(placement, measure_parts(small_config(), torch.float32), 0, 3)
    one = placed(placement)
    run_one(one, observations()[0], num_steps=3)
    if placement.token_embedding == "host":
        assert one.placement.device_bytes <= foretold.weights * 1.02
    assert one.placement.peak_bytes == pytest.approx(foretold.weights + foretold.moving, rel=0.1)


def test_nothing_is_captured_that_moves():
    one = Engine(
        copy.deepcopy(small_model()),
        10,
        EngineSettings(placement=Placement(expert="stage"), cuda_graph=True),
        capture=lambda function: function,
    )
    assert not run_one(one, observations()[0]).graph


class TestPlanner:
    full = Pi05Config.full()

    def choose(self, gib: float, dtype: torch.dtype = torch.bfloat16, unified: bool = False):
        return plan_placement(self.full, dtype, int(gib * GIB), cameras=3, unified=unified)

    def test_16_gb_holds_everything(self):
        chosen = self.choose(16)
        assert chosen.placement.all_resident and chosen.copied == 0
        assert chosen.weights == 119_720_608 * 4 + 3_233_713_264 * 2
        assert chosen.peak < 12.8 * GIB

    def test_less_memory_costs_more_traffic(self):
        chosen = [self.choose(gib) for gib in (8, 6.6, 5.8, 5, 3, 2.1)]
        assert [one.copied for one in chosen] == sorted(one.copied for one in chosen)
        assert not chosen[1].placement.all_resident
        for one, gib in zip(chosen, (8, 6.6, 5.8, 5, 3, 2.1), strict=True):
            assert one.peak <= gib * GIB

    def test_what_fits_nowhere_is_refused_with_the_smallest_need(self):
        with pytest.raises(EngineError, match=r"1\.00 GiB.*smallest is.*layer") as caught:
            self.choose(1)
        assert caught.value.code == "engine.memory"

    def test_shared_memory_gains_nothing_by_moving(self):
        assert self.choose(8, unified=True).placement.all_resident
        with pytest.raises(EngineError, match="host and GPU share"):
            self.choose(6, unified=True)

    def test_predictions_tell_everything(self):
        text = str(self.choose(5))
        for part in ("weights", "passing", "buffers", "overhead", "copied per request", "token embedding host"):
            assert part in text

    def test_every_choice_is_lossless_by_construction(self):
        assert len({str(one) for one in choices(18)}) == len(choices(18))
        assert OVERHEAD_BYTES > 0


class TestPresets:
    @pytest.mark.parametrize("name", ["resident_16gb", "moderate_offload", "layerwise_offload"])
    def test_shipped(self, name: str):
        settings = load_preset(name)
        assert settings.prefix_cache_entries == 0
        assert settings.placement is not None
        assert settings.placement.all_resident == (name == "resident_16gb")

    def test_resident_preset_refuses_less(self):
        settings = load_preset("resident_16gb")
        cpu = torch.device("cpu")
        fits = place_weights(settings, Pi05Config.full(), cpu, torch.bfloat16, cameras=3, num_steps=10)
        assert fits.placement == Placement()
        smaller = replace(settings, memory_budget_gb=7.0)
        with pytest.raises(EngineError, match=r"7\.00 GiB does not hold resident"):
            place_weights(smaller, Pi05Config.full(), cpu, torch.bfloat16, cameras=3, num_steps=10)

    @pytest.mark.parametrize(
        ("text", "named"),
        [
            ("cuda_graphs: true", "cuda_graphs"),
            ("placement: {vision: gone}", "resident.*gone"),
            ("placement: {visions: stage}", "visions"),
            ("placement: {language_layers: -1}", "language_layers"),
            ("placement: stage", "a map expected"),
            ("prompt_bucket: 0", "prompt_bucket"),
            ("memory_budget_gb: -3", "memory_budget_gb"),
            ("compile: fast", "compile"),
            ("[1]", "a map of engine settings"),
        ],
    )
    def test_mistakes_are_named(self, text: str, named: str, tmp_path: Path):
        file = tmp_path / "engine.yaml"
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigurationError, match=named):
            load_preset(file)

    def test_unknown_name(self):
        with pytest.raises(ConfigurationError, match="layerwise_offload"):
            load_preset("turbo")
