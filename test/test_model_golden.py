"""The network against the reference implementations: every stage, every golden case."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from golden_data import Case, case, config, read_json, tensors, tiny_model
from torch import Tensor

from pi05_ros.checkpoint.keys import canonical_key
from pi05_ros.model.gemma import KeyValues, rotary
from pi05_ros.model.pi05 import MASKED, Pi05
from pi05_ros.model.precision import cast_model, is_float32_parameter

INTERMEDIATE = 1e-4
ACTIONS = {"lerobot": 2e-5, "openpi": 2e-4}
FLOAT32_CASES = [name for name in read_json("cases.json") if "bf16" not in name]
DETAILED_CASES = [name for name in FLOAT32_CASES if "steps" not in name]


def close(got: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    assert got.shape == wanted.shape, what
    difference = (got - wanted).abs().max().item()
    assert difference <= tolerance, f"{what}: {difference:.2e} > {tolerance:.0e}"


def sample(model: Pi05, one: Case) -> Tensor:
    with torch.inference_mode():
        return model.sample_actions(one.images, one.image_masks, one.tokens, one.token_mask, one.noise, one.num_steps)


@pytest.mark.parametrize("name", FLOAT32_CASES)
def test_actions(name: str):
    one = case(name)
    close(sample(tiny_model(), one), one.tensors["actions"], ACTIONS[one.peer], name)


def follow(model: Pi05, one: Case, times: Tensor) -> dict[str, Tensor]:
    """Run the plain modules stage by stage, keeping what the references kept."""
    seen: dict[str, Tensor] = {}
    batch = one.tokens.shape[0]
    for camera, image in enumerate(one.images):
        x = model.vision.vision_model.embeddings(image)
        seen[f"siglip.embeddings.cam{camera}"] = x
        for index, layer in enumerate(model.vision.vision_model.encoder.layers):
            x = layer(x)
            seen[f"siglip.layer{index}.cam{camera}"] = x
        features = model.vision.vision_model.post_layernorm(x)
        seen[f"siglip.post_layernorm.cam{camera}"] = features
        seen[f"image_embeds.cam{camera}"] = model.projector(features)
    patches = model.config.tokens_per_image
    valid = torch.cat([*(mask[:, None].expand(-1, patches) for mask in one.image_masks), one.token_mask], dim=1)
    embedded = torch.cat([model.embed_images(one.images), model.embed_tokens(one.tokens)], dim=1)
    seen["prefix_embs"], seen["prefix_pad_masks"] = embedded, valid
    seen["prefix_position_ids"] = valid.cumsum(1) - 1

    config_ = model.config.vlm
    angles = rotary(seen["prefix_position_ids"], config_.head_dim)
    mask = torch.zeros(batch, 1, 1, valid.shape[1]).masked_fill_(~valid[:, None, None], MASKED)
    x = embedded
    for index, prefix_layer in enumerate(model.prefix.blocks):
        shape = (batch, config_.num_kv_heads, valid.shape[1], config_.head_dim)
        store = KeyValues(torch.empty(shape), torch.empty(shape))
        x = prefix_layer(x, angles, mask, store)
        seen[f"prefix.layer{index}.hidden"] = x
        seen[f"prefix.layer{index}.k"], seen[f"prefix.layer{index}.v"] = store

    prefix = model.encode_prefix(one.images, one.image_masks, one.tokens, one.token_mask, one.noise.shape[1])
    seen["step0.action_emb"] = model.action_in_proj(one.noise)
    seen["step0.adarms_cond"] = model.time_conditioning(times[:1]).expand(batch, -1)

    def keep(key: str) -> Callable[..., None]:
        def hook(_module: object, _inputs: object, output: Tensor) -> None:
            seen.setdefault(key, output)

        return hook

    handles = [
        block.register_forward_hook(keep(f"step0.layer{index}.hidden"))
        for index, block in enumerate(model.expert.blocks)
    ]
    x, velocities, positions = one.noise, [], []
    for modulation in model.modulations(times.tolist()):
        velocities.append(model.velocity(prefix, x, modulation))
        x = x - velocities[-1] / len(times)
        positions.append(x)
    for handle in handles:
        handle.remove()
    seen["v_t"], seen["x_t"], seen["time"], seen["actions"] = torch.stack(velocities), torch.stack(positions), times, x
    return seen


@pytest.mark.parametrize("name", DETAILED_CASES)
def test_every_intermediate(name: str):
    """With the reference's own time values, so that every stage is compared on the same ground."""
    one = case(name)
    with torch.inference_mode():
        seen = follow(tiny_model(), one, one.tensors["time"])
    compared = 0
    for key, wanted in one.tensors.items():
        got = seen[key]
        if key.startswith("prefix.layer"):
            # What masked tokens hold is arbitrary; nobody reads it.
            valid = seen["prefix_pad_masks"]
            where = valid[:, None, :, None] if key.endswith((".k", ".v")) else valid[:, :, None]
            got, wanted = got * where, wanted * where
        if wanted.dtype in (torch.bool, torch.int64):
            assert torch.equal(got, wanted), key
        elif key == "actions":
            close(got, wanted, ACTIONS["lerobot"], key)
        else:
            close(got, wanted, INTERMEDIATE, key)
        compared += 1
    assert compared == len(read_json("cases.json")[name]["tensors"])


def test_euler_times_are_lerobots():
    for name in ("b1_3cam", "b1_steps1", "b1_steps3", "b1_steps5", "b1_steps7", "b1_steps20"):
        one = case(name)
        times = torch.tensor(Pi05.euler_times(one.num_steps), dtype=torch.float32)
        assert torch.equal(times, one.tensors["time"]), name


OPENPI_FINALS = {
    "b1_3cam": "b1_3cam",
    "b1_2cam_missing_last": "b1_2cam_missing_last",
    "b1_3cam_steps1": "b1_steps1",
    "b1_3cam_steps3": "b1_steps3",
    "b1_3cam_steps5": "b1_steps5",
    "b1_3cam_steps7": "b1_steps7",
    "b1_3cam_steps20": "b1_steps20",
    "b1_h15": "b1_h15",
    "b1_missing_first_openpi_order": "b1_missing_first",
    "b4": "b4",
}


@pytest.mark.parametrize("name", OPENPI_FINALS)
def test_openpi_finals(name: str):
    finals = tensors("openpi_fp32_finals")
    one = case(OPENPI_FINALS[name])
    model = tiny_model()
    close(sample(model, one), finals[f"{name}.actions"], ACTIONS["openpi"], f"{name}, our times")
    with torch.inference_mode():
        prefix = model.encode_prefix(one.images, one.image_masks, one.tokens, one.token_mask, one.noise.shape[1])
        x = one.noise
        for modulation in model.modulations(finals[f"{name}.time"].tolist()):
            x = x - model.velocity(prefix, x, modulation) / one.num_steps
    close(x, finals[f"{name}.actions"], ACTIONS["lerobot"], f"{name}, OpenPI's times")


def test_absent_first_camera_in_lerobots_order():
    one = case("b1_missing_first")
    moved = one._replace(
        images=[*one.images[1:], one.images[0]], image_masks=[*one.image_masks[1:], one.image_masks[0]]
    )
    wanted = tensors("openpi_fp32_finals")["b1_missing_first_lerobot_order.actions"]
    close(sample(tiny_model(), moved), wanted, ACTIONS["openpi"], "absent camera last")


def test_bfloat16_is_as_close_to_float32_as_the_references():
    exact = case("b1_3cam").tensors["actions"]
    model = cast_model(copy.deepcopy(tiny_model()), torch.bfloat16)
    ours = (sample(model, case("b1_3cam")) - exact).abs().mean().item()
    for peer in ("lerobot", "openpi"):
        theirs = (case(f"b1_3cam_bf16_fp32rope_{peer}").tensors["actions"] - exact).abs().mean().item()
        assert ours <= 1.25 * theirs, f"{peer}: {ours:.5f} against {theirs:.5f}"


def test_full_size_counts_and_keys():
    with torch.device("meta"):
        model = Pi05(config("FULL"))
    counts = {True: 0, False: 0}
    for name, parameter in model.named_parameters():
        counts[is_float32_parameter(name)] += parameter.numel()
    assert counts == {True: 119_720_608, False: 3_233_713_264}
    theirs = {
        canonical: described
        for key, described in read_json("keys_full.json")["keys"].items()
        # The prefix's LM head is tied to the token embedding, and loaded as that.
        if (canonical := canonical_key(key)) is not None and not canonical.endswith("lm_head.weight")
    }
    assert {name: list(parameter.shape) for name, parameter in model.named_parameters()} == {
        key: described["shape"] for key, described in theirs.items()
    }
    for key, described in theirs.items():
        assert is_float32_parameter(key) == (described["openpi_bf16"] == "float32"), key


def test_absent_everything_gives_no_nan():
    one = case("b1_3cam")
    nothing = one._replace(image_masks=[torch.tensor([False])] * 3, token_mask=torch.zeros_like(one.token_mask))
    assert math.isfinite(sample(tiny_model(), nothing).abs().max().item())
