"""What clients may know of the served policy: one description for every door."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pi05_ros import __version__
from pi05_ros.checkpoint.formats import Checkpoint
from pi05_ros.contract import Contract
from pi05_ros.profile import Profile


@dataclass(frozen=True)
class PolicyFacts:
    """The served policy in numbers and names; known before the weights are loaded.

    Attributes:
        horizon: rows of an answer; ``padded_action_dim`` and it are the shape of a given noise.
        served_model_names: what a request may say as ``model``; the first is said in answers.
        prefix_length: tokens of the prefix, padding included.
        prefix_cache, cuda_graph: whether the engine has them.
    """

    profile: Profile
    slots: tuple[tuple[str, str | None], ...]
    checkpoint_id: str
    checkpoint_format: str
    served_model_names: tuple[str, ...]
    image_size: int
    state_dim: int
    action_dim: int
    padded_action_dim: int
    horizon: int
    executed_steps: int | None
    step_time_s: float | None
    num_steps: int
    normalization: str
    prefix_length: int
    dtype: str
    device: str
    prefix_cache: bool = False
    cuda_graph: bool = False

    @classmethod
    def of(
        cls,
        contract: Contract,
        checkpoint: Checkpoint,
        *,
        dtype: str,
        device: str,
        served_model_names: tuple[str, ...] = (),
        prefix_cache: bool = False,
        cuda_graph: bool = False,
    ) -> PolicyFacts:
        """Collect the facts of a checkpoint that has been fitted to a robot."""
        config = checkpoint.config
        return cls(
            profile=contract.profile,
            slots=contract.slots,
            checkpoint_id=checkpoint.id,
            checkpoint_format=checkpoint.format,
            served_model_names=served_model_names or (checkpoint.id,),
            image_size=config.vision.image_size,
            state_dim=contract.state_dim,
            action_dim=contract.action_dim,
            padded_action_dim=config.action_dim,
            horizon=contract.horizon,
            executed_steps=contract.executed_steps,
            step_time_s=contract.step_time_s,
            num_steps=contract.num_steps,
            normalization=contract.normalization,
            prefix_length=len(contract.slots) * config.tokens_per_image + config.max_token_len,
            dtype=dtype,
            device=device,
            prefix_cache=prefix_cache,
            cuda_graph=cuda_graph,
        )

    @property
    def model(self) -> str:
        return self.served_model_names[0]

    @property
    def image_keys(self) -> tuple[str, ...]:
        """Cameras that feed the model, as the profile names them, in the model's order."""
        return tuple(camera for _, camera in self.slots if camera is not None)

    def metadata(self, *, max_group: int) -> dict[str, Any]:
        """``action.metadata``, the same at every door; plain values only.

        Beside the served system's fields it says what a robot's client must know: names, units and control mode of
        each dimension, which camera feeds which slot, the step time, and ``reset_pose`` where the profile has one.
        """
        profile = self.profile
        described: dict[str, Any] = {
            "object": "action.metadata",
            "model": self.model,
            "model_path": self.checkpoint_id,
            "policy_family": "pi05",
            "server": f"pi05_ros {__version__}",
            "input": {
                "image_keys": list(self.image_keys),
                "image_size": [self.image_size, self.image_size],
                "state_dim": self.state_dim,
            },
            "output": {
                "action_type": "continuous",
                "action_horizon": self.horizon,
                "action_dim": self.action_dim,
                "padded_action_dim": self.padded_action_dim,
                "dtype": "float32",
            },
            "runtime": {
                "dtype": self.dtype,
                "device": self.device,
                "cuda_graph": self.cuda_graph,
                "prefix_cache": self.prefix_cache,
                "max_group": max_group,
                "parallel": PARALLEL,
            },
            "defaults": {"num_inference_steps": self.num_steps, "prefix_cache": "auto", "cuda_graph": "auto"},
            "capabilities": {
                "exact_prefix_cache": self.prefix_cache,
                "cuda_graph": self.cuda_graph,
                "realtime_websocket": True,
                "openpi_websocket": True,
                "batch_inputs": False,
                "num_candidates": True,
                "action_horizon": True,
                "seed": True,
                "normalized_actions": True,
            },
            "checkpoint": {"id": self.checkpoint_id, "format": self.checkpoint_format},
            "profile": {"name": profile.name, "description": profile.description, "family": profile.family},
            "cameras": [
                {
                    "name": name,
                    "slot": camera.slot,
                    "required": camera.slot is not None and not camera.optional,
                    "rotate": camera.rotate,
                }
                for name, camera in profile.cameras.items()
            ],
            "camera_slots": dict(self.slots),
            "state": [{"name": dim.name, "unit": dim.unit} for dim in profile.state.dims],
            "action": [
                {"name": dim.name, "unit": dim.unit, "control_mode": dim.control, "limits": _listed(dim.limits)}
                for dim in profile.action.dims
            ],
            "action_names": [dim.name for dim in profile.action.dims],
            "action_horizon": self.horizon,
            "action_dim": self.action_dim,
            "executed_steps": self.executed_steps,
            "step_time_s": self.step_time_s,
            "normalization": self.normalization,
            "prompt": profile.prompt,
        }
        if profile.reset_pose is not None:
            described["reset_pose"] = list(profile.reset_pose)
        return described


# One process on one device.
PARALLEL = {"world_size": 1, "tensor_parallel": 1, "sequence_parallel": 1}


def _listed(limits: tuple[float, float] | None) -> list[float] | None:
    return None if limits is None else list(limits)
