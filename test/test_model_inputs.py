"""What the network takes, what it refuses, and what may be left away without changing the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_cuda import NoWaiting, fake_cuda
from golden_data import Case, case, config, tiny_model

from pi05_ros.errors import ObservationError, Pi05Error
from pi05_ros.model.config import GemmaConfig, Pi05Config
from pi05_ros.model.gemma import attend
from pi05_ros.model.pi05 import MASKED, Pi05
from pi05_ros.model.precision import parameter_dtype, resolve_dtype

TINY = config("TINY")
ACROSS_SHAPES = 2e-5


@torch.inference_mode()
def sample(model: Pi05, one: Case) -> torch.Tensor:
    return model.sample_actions(one.images, one.image_masks, one.tokens, one.token_mask, one.noise, one.num_steps)


def test_absent_cameras_and_prompt_padding_may_be_left_away():
    one = case("b1_2cam_missing_last")
    length = int(one.token_mask.sum())
    short = one._replace(
        images=one.images[:2],
        image_masks=one.image_masks[:2],
        tokens=one.tokens[:, :length],
        token_mask=one.token_mask[:, :length],
    )
    assert (sample(tiny_model(), short) - one.tensors["actions"]).abs().max() <= ACROSS_SHAPES


def test_what_is_masked_has_no_say():
    one = case("b1_2cam_missing_last")
    other = one._replace(
        images=[*one.images[:2], torch.rand_like(one.images[2])],
        tokens=torch.where(one.token_mask, one.tokens, torch.full_like(one.tokens, 7)),
    )
    assert torch.equal(sample(tiny_model(), one), sample(tiny_model(), other))


def test_members_of_a_batch_do_not_see_each_other():
    batch = case("b4")
    together = sample(tiny_model(), batch)
    for member in range(4):
        part = slice(member, member + 1)
        alone = batch._replace(
            images=[image[part] for image in batch.images],
            image_masks=[mask[part] for mask in batch.image_masks],
            tokens=batch.tokens[part],
            token_mask=batch.token_mask[part],
            noise=batch.noise[part],
        )
        assert (sample(tiny_model(), alone) - together[part]).abs().max() <= ACROSS_SHAPES


def test_a_prefix_serves_any_number_of_denoisings():
    """The suffix part of the key/value buffer is overwritten; the prefix part must not be."""
    one, model = case("b1_3cam"), tiny_model()
    with torch.inference_mode():
        prefix = model.encode_prefix(one.images, one.image_masks, one.tokens, one.token_mask)
        first = model.denoise(prefix, one.noise, 10)
        model.denoise(prefix, one.noise.flip(1), 3)
        again = model.denoise(prefix, one.noise, 10)
    assert torch.equal(first, again)


def _with_camera(one: Case, **change: Any) -> Case:
    parts = {"image": one.images[1], "mask": one.image_masks[1]} | change
    return one._replace(
        images=[one.images[0], parts["image"], one.images[2]],
        image_masks=[one.image_masks[0], parts["mask"], one.image_masks[2]],
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda one: one._replace(image_masks=one.image_masks[:2]), "2 masks for 3 images"),
        (lambda one: one._replace(images=[], image_masks=[]), "at least one image"),
        (lambda one: _with_camera(one, image=one.images[1][..., :223]), r"images\[1\].*224, 224.*224, 223"),
        (lambda one: _with_camera(one, image=one.images[1].to(torch.uint8)), r"images\[1\].*float32.*uint8"),
        (lambda one: _with_camera(one, mask=torch.ones(2, dtype=torch.bool)), r"image_masks\[1\].*\[1\].*\[2\]"),
        (lambda one: _with_camera(one, mask=torch.ones(1)), r"image_masks\[1\].*bool.*float32"),
        (lambda one: one._replace(tokens=one.tokens.int()), "tokens.*int64.*int32"),
        (lambda one: one._replace(tokens=one.tokens[0]), r"tokens.*\[1, 200\].*\[200\]"),
        (lambda one: one._replace(token_mask=one.token_mask[:, :9]), r"token_mask.*\[1, 200\].*\[1, 9\]"),
        (lambda one: one._replace(noise=one.noise[..., :7]), r"noise.*\[1, 50, 32\].*\[1, 50, 7\]"),
        (lambda one: one._replace(noise=one.noise.double()), "noise.*float32.*float64"),
        (lambda one: one._replace(num_steps=0), "num_steps.*at least 1.*0"),
    ],
)
def test_misshapen_inputs_are_refused_by_name(change: Callable[[Case], Case], named: str):
    with pytest.raises(ObservationError, match=named) as caught:
        sample(tiny_model(), change(case("b1_3cam")))
    assert caught.value.code == "observation.model_input"


def test_noise_of_another_horizon_than_the_prefix_made_room_for():
    one, model = case("b1_3cam"), tiny_model()
    with torch.inference_mode():
        prefix = model.encode_prefix(one.images, one.image_masks, one.tokens, one.token_mask, horizon=50)
        with pytest.raises(ObservationError, match=r"\[1, 50, 32\].*\[1, 15, 32\]"):
            model.denoise(prefix, one.noise[:, :15].clone(), 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_waits_for_the_device(dtype: torch.dtype):
    """On pretended CUDA tensors; runs without a GPU."""
    with torch.device("meta"):
        model = Pi05(TINY)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    with fake_cuda():
        with torch.device("cuda"):
            weights = {name: torch.empty(shape, dtype=parameter_dtype(name, dtype)) for name, shape in shapes.items()}
            images = [torch.empty(2, 3, 224, 224) for _ in range(3)]
            masks = [torch.empty(2, dtype=torch.bool) for _ in range(3)]
            tokens, mask = torch.empty(2, 200, dtype=torch.int64), torch.empty(2, 200, dtype=torch.bool)
            noise = torch.empty(2, 50, 32)
        model.load_state_dict(weights, assign=True)
        with torch.inference_mode(), NoWaiting():
            actions = model.sample_actions(images, masks, tokens, mask, noise, 10)
    assert (actions.shape, actions.dtype, actions.device.type) == (noise.shape, torch.float32, "cuda")


@pytest.mark.parametrize("patch", [14, 16, 32, 60])
def test_patches_of_any_size(patch: int):
    """The matrix product over patches is the convolution of the paper, also where pixels are left over."""
    sizes = replace(TINY, vision=replace(TINY.vision, patch_size=patch))
    torch.manual_seed(0)
    model = Pi05(sizes).eval()
    images = torch.rand(2, 3, 224, 224)
    with torch.inference_mode():
        assert model.embed_images([images, images]).shape == (2, 2 * sizes.tokens_per_image, 64)
        embedding = model.vision.vision_model.embeddings.patch_embedding.double()
        images = images.double()
        convolved = torch.nn.functional.conv2d(images, embedding.weight, embedding.bias, stride=patch)
        assert (embedding(images) - convolved.flatten(2).transpose(1, 2)).abs().max() < 1e-12


def test_several_key_value_heads_pair_with_their_own_queries():
    """One head at a time gives the same; in the second member only four keys are visible."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, 5, 8, generator=generator)
    key, value = torch.randn(2, 2, 2, 7, 8, generator=generator)
    mask = torch.zeros(2, 1, 1, 7)
    mask[1, ..., 4:] = MASKED
    heads = []
    for head in range(6):
        scores = query[:, head] @ key[:, head // 3].transpose(1, 2) / 8**0.5 + mask[:, 0]
        heads.append(scores.softmax(-1) @ value[:, head // 3])
    assert (attend(query, key, value, mask) - torch.cat(heads, dim=-1)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda: replace(TINY, expert=replace(TINY.expert, depth=3)), "vlm.depth 2 and expert.depth 3"),
        (lambda: replace(TINY, expert=replace(TINY.expert, head_dim=32)), "vlm.head_dim 16 and expert.head_dim 32"),
        (lambda: replace(TINY, vision=replace(TINY.vision, num_attention_heads=5)), "48.*5 heads"),
        (lambda: replace(TINY, vision=replace(TINY.vision, patch_size=225)), "225.*224"),
        (lambda: replace(TINY, horizon=0), "horizon.*0"),
        (lambda: replace(TINY, vocab=True), "vocab.*True"),
        (
            lambda: replace(TINY, vlm=GemmaConfig(64, 2, 160, 8, 3, 16), expert=GemmaConfig(48, 2, 96, 8, 3, 16)),
            "8.*3",
        ),
        (lambda: Pi05Config.from_architecture({"vlm": {}}), "vocab.*got.*vlm"),
    ],
)
def test_sizes_that_do_not_fit_name_both_sides(change: Callable[[], Pi05Config], named: str):
    with pytest.raises(Pi05Error, match=named):
        change()


def test_precision_words():
    assert resolve_dtype("auto", "cpu") is torch.float32
    assert resolve_dtype("auto", "cuda:0") is torch.bfloat16
    assert resolve_dtype("bfloat16", "cpu") is torch.bfloat16
    for word, device in (("float16", "cpu"), ("auto", "mps")):
        with pytest.raises(Pi05Error, match="dtype"):
            resolve_dtype(word, device)
