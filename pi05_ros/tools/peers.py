"""Reference implementations beside ours, with the same weights, for comparisons of time and actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pi05_ros.checkpoint.keys import canonical_key
from pi05_ros.checkpoint.make import random_weight
from pi05_ros.engine.requests import ModelInputs
from pi05_ros.errors import ConfigurationError
from pi05_ros.model.config import Pi05Config

# A group of observations, its noise [B, H, D] and a number of steps -> actions [B, H, D].
Sampler = Callable[[Sequence[ModelInputs], Tensor, int], Tensor]


def lerobot(config: Pi05Config, seed: int | None, device: torch.device, dtype: torch.dtype) -> Sampler:
    """LeRobot's own Pi0.5 at any size, with the weights of `random_weight` (its own first ones without a seed).

    LeRobot builds only the published sizes, so its size table is replaced while the network is made; nothing that it
    computes is touched.

    Raises:
        ConfigurationError: ``config.peer`` where LeRobot is not installed.
    """
    try:
        from lerobot.configs.types import FeatureType, PolicyFeature
        from lerobot.policies.pi05 import modeling_pi05 as theirs
        from lerobot.policies.pi05.configuration_pi05 import PI05Config
    except ImportError as error:
        raise ConfigurationError(
            "peer", f"LeRobot cannot be imported ({error}); pip install 'lerobot[pi]==0.6.1' (Python 3.12), or skip it"
        ) from error
    sizes = {"gemma_2b": config.vlm, "gemma_300m": config.expert}
    paligemma, expert = theirs.PaliGemmaForConditionalGenerationWithPiGemma, theirs.PiGemmaForCausalLM
    table = theirs.get_gemma_config

    def sized_paligemma(config_hf: Any = None, **rest: Any) -> nn.Module:
        settings = config_hf if config_hf is not None else rest["config"]
        vision = settings.vision_config
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "patch_size"):
            setattr(vision, name, getattr(config.vision, name))
        vision.image_size = config.vision.image_size
        vision.projection_dim = settings.projection_dim = config.vlm.width
        settings.text_config.vocab_size = settings._vocab_size = config.vocab
        settings.image_token_index = config.vocab - 1
        return paligemma(config=settings)

    def sized_expert(config: Any) -> nn.Module:
        config.vocab_size = 8  # an unused head
        return expert(config=config)

    theirs.get_gemma_config = lambda variant: theirs.GemmaConfig(**vars_of(sizes[variant]))
    theirs.PaliGemmaForConditionalGenerationWithPiGemma = sized_paligemma
    theirs.PiGemmaForCausalLM = sized_expert
    try:
        settings = PI05Config(
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
            chunk_size=config.horizon,
            n_action_steps=config.horizon,
            max_action_dim=config.action_dim,
            image_resolution=(config.vision.image_size, config.vision.image_size),
            compile_model=False,
            input_features={"observation.state": PolicyFeature(FeatureType.STATE, (config.action_dim,))},
            output_features={"action": PolicyFeature(FeatureType.ACTION, (config.action_dim,))},
        )
        with torch.device(device):
            model = theirs.PI05Pytorch(settings)
    finally:
        theirs.get_gemma_config = table
        theirs.PaliGemmaForConditionalGenerationWithPiGemma, theirs.PiGemmaForCausalLM = paligemma, expert
    if seed is not None:
        fill(model, seed)
    model = model.to(device).eval()
    return lambda members, noise, steps: _sample(model, members, noise, steps, device)


def openpi(config: Pi05Config, seed: int | None, device: torch.device, dtype: torch.dtype) -> Sampler:
    """OpenPI's PyTorch Pi0.5; it has the published sizes only.

    Raises:
        ConfigurationError: ``config.peer`` where OpenPI is not installed or the size is another.
    """
    if config.vlm != Pi05Config.full().vlm or config.expert != Pi05Config.full().expert:
        raise ConfigurationError("peer", "OpenPI builds the published size only; compare it with --size full")
    try:
        from openpi.models.pi0_config import Pi0Config
        from openpi.models_pytorch.pi0_pytorch import PI0Pytorch
    except ImportError as error:
        raise ConfigurationError(
            "peer", f"OpenPI cannot be imported ({error}); install it from its repository, or skip it"
        ) from error
    settings = Pi0Config(
        pi05=True,
        action_dim=config.action_dim,
        action_horizon=config.horizon,
        max_token_len=config.max_token_len,
        dtype=str(dtype).removeprefix("torch."),
    )
    model = PI0Pytorch(settings)
    if seed is not None:
        fill(model, seed)
    model = model.to(device).eval()

    def sample(members: Sequence[ModelInputs], noise: Tensor, steps: int) -> Tensor:
        from openpi.models.model import Observation

        images, masks, tokens, token_mask = _batched(members, device)
        names = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
        observation = Observation(
            images=dict(zip(names, images, strict=True)),
            image_masks=dict(zip(names, masks, strict=True)),
            state=torch.zeros(len(members), config.action_dim, device=device),
            tokenized_prompt=tokens,
            tokenized_prompt_mask=token_mask,
        )
        return model.sample_actions(device, observation, noise=noise.to(device), num_steps=steps)

    return sample


PEERS = {"lerobot": lerobot, "openpi": openpi}


def fill(model: nn.Module, seed: int) -> None:
    """Give a reference network the weights that a random checkpoint of this seed has.

    Raises:
        ConfigurationError: ``config.peer`` where fewer parameters are recognised than there are.
    """
    unknown = []
    with torch.no_grad():
        for key, parameter in model.state_dict().items():
            name = canonical_key(key)
            if name is not None:
                parameter.copy_(random_weight(name, tuple(parameter.shape), seed))
            elif "lm_head" not in key:
                unknown.append(key)
    if unknown:
        raise ConfigurationError("peer", f"parameters of the reference that are not ours: {unknown[:5]}")


def vars_of(gemma: Any) -> dict[str, int]:
    names = ("width", "depth", "mlp_dim", "num_heads", "num_kv_heads", "head_dim")
    return {name: getattr(gemma, name) for name in names}


def _batched(members: Sequence[ModelInputs], device: torch.device) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    cameras = range(len(members[0].images))
    return (
        [torch.stack([one.images[camera] for one in members]).to(device) for camera in cameras],
        [torch.tensor([one.image_masks[camera] for one in members], device=device) for camera in cameras],
        torch.stack([one.tokens for one in members]).to(device),
        torch.stack([one.token_mask for one in members]).to(device),
    )


@torch.no_grad()
def _sample(model: Any, members: Sequence[ModelInputs], noise: Tensor, steps: int, device: torch.device) -> Tensor:
    images, masks, tokens, token_mask = _batched(members, device)
    actions: Tensor = model.sample_actions(images, masks, tokens, token_mask, noise=noise.to(device), num_steps=steps)
    return actions.float().cpu()
