"""The one road from an observation to an action chunk; every door of the package leads here."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch

from pi05_ros.checkpoint.description import Checkpoint
from pi05_ros.checkpoint.formats import open_checkpoint
from pi05_ros.checkpoint.loader import load_model
from pi05_ros.chunk import ActionChunk
from pi05_ros.contract import Contract, check_contract
from pi05_ros.engine.engine import Engine, EngineResult, InferenceOptions, ModelInputs
from pi05_ros.engine.planner import place_weights
from pi05_ros.engine.settings import EngineSettings, load_preset
from pi05_ros.errors import CheckpointError, ConfigurationError, ContractError, ObservationError
from pi05_ros.guard import apply_limits, check_actions, check_network_output, check_state
from pi05_ros.model.pi05 import Pi05
from pi05_ros.model.precision import resolve_dtype
from pi05_ros.observation import Observation
from pi05_ros.paths import builtin_checkpoint
from pi05_ros.playback.leftover import Continuation
from pi05_ros.playback.rtc import model_leftover
from pi05_ros.profile import Profile, load_profile
from pi05_ros.transforms.images import absent_image, as_hwc_uint8, resize_with_pad
from pi05_ros.transforms.prompt import discretize_state
from pi05_ros.transforms.robots import StateActionConvention
from pi05_ros.transforms.tokenizer import Tokenizer, load_tokenizer

Space = Literal["robot", "normalized"]


@dataclass(frozen=True)
class Prepared:
    """An observation in the model's terms, with what `Policy.finish` needs to answer it.

    Attributes:
        start_state: [dims], state in the model's units and conventions; relative actions are added to it.
        action_space: ``robot``, or ``normalized`` for the network's own numbers.
        flags: codes of what was noticed on the way (prompt shortened, state beyond its statistics).
    """

    inputs: ModelInputs
    observation: Observation
    prompt: str
    start_state: np.ndarray
    action_space: Space
    preprocess_ms: float
    flags: tuple[str, ...]


class Policy:
    """Pi0.5 for one robot. Not thread-safe: one thread calls it.

    ``model`` is the network, ``profile`` the robot, ``checkpoint`` what was loaded, ``contract`` what they agreed on.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        contract: Contract,
        model: Pi05,
        tokenizer: Tokenizer | None,
        settings: EngineSettings | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.contract = contract
        self.profile: Profile = contract.profile
        self.model = model
        self.tokenizer = tokenizer
        self.engine = Engine(model, contract.num_steps, settings, revision=checkpoint.fingerprint, device=device)
        self._convention = StateActionConvention.from_profile(contract.profile, contract.relative)
        self._size = model.config.vision.image_size
        self._feeding = {camera: slot for slot, camera in contract.slots if camera is not None}

    def infer(
        self,
        observation: Observation,
        noise: np.ndarray | None = None,
        seed: int | None = None,
        num_steps: int | None = None,
        *,
        continuing: Continuation | None = None,
    ) -> ActionChunk:
        """Answer one observation.

        Args:
            observation: images by camera name (uint8 HWC RGB), state in robot units, prompt.
            noise: initial noise, float32 [horizon, padded action width]; replaces ``seed``.
            seed: of the initial noise, in [0, 2**64); drawn from the operating system where not given.
            num_steps: Euler steps; the checkpoint's number where not given.
            continuing: what of the last chunk is still to be executed; binds the new one to it (real-time chunking).

        Returns:
            The chunk: ``actions`` float32 [horizon, dims] in robot units.

        Raises:
            ObservationError: the observation does not fit the profile or is not finite.
            ActionError: the network's output is not finite.
        """
        options = InferenceOptions(noise=noise, seed=seed, num_steps=num_steps)
        return self.answer(self.prepare(observation), options, continuing)

    def answer(
        self, prepared: Prepared, options: InferenceOptions, continuing: Continuation | None = None
    ) -> ActionChunk:
        """Answer one prepared observation; the second half of `infer`."""
        if continuing is None:
            return self.finish(prepared, self.run([prepared], [options])[0])
        normalizer = self.contract.action_normalizer
        rtc = model_leftover(continuing, self._convention, normalizer, prepared.start_state)
        chunk = self.finish(prepared, self.run([prepared], [replace(options, rtc=rtc)])[0])
        return replace(chunk, rtc_delay=continuing.delay)

    def prepare(
        self,
        observation: Observation,
        *,
        action_space: Space = "robot",
        state_space: Space = "robot",
        image_masks: Mapping[str, bool] | None = None,
    ) -> Prepared:
        """Check an observation and turn it into the model's numbers.

        Args:
            action_space: ``normalized`` makes `finish` return the network's own numbers.
            state_space: ``normalized`` says that the state already is in the network's numbers.
            image_masks: camera -> False blanks that camera, which may then be missing.

        Raises:
            ObservationError: ``observation.camera``, ``image_*``, ``state_width``, ``nan``, ``inf``, ``no_prompt``.
            CheckpointError: ``checkpoint.no_tokenizer``.
        """
        started = time.perf_counter()
        prompt = self._prompt(observation)
        state = self._state(observation)
        images, masks = self._images(observation.images, image_masks or {})
        normalizer = self.contract.state_normalizer
        if state_space == "normalized":
            normalized, model_state = state, normalizer.unnormalize(state)
        else:
            model_state = self._convention.state_to_model(state)
            normalized = normalizer.normalize(model_state)
        flags: list[str] = []
        bins = None
        if self.contract.state_in_prompt:
            written = normalized
            if self.profile.model.padded_state:
                written = np.pad(normalized, (0, self.model.config.action_dim - len(normalized)))
            bins = discretize_state(written).tolist()
            beyond = normalizer.outside_dimensions(normalized)
            flags += [f"state.beyond_statistics:{self.contract.state_names[index]}" for index in beyond]
        if self.tokenizer is None:
            raise CheckpointError(
                "no_tokenizer",
                f"a prompt needs PaliGemma's tokenizer, and checkpoint {self.checkpoint.id} carries none; "
                "give the path of a tokenizer.json or a SentencePiece .model as tokenizer",
            )
        tokens, token_mask, report = self.tokenizer.encode_prompt(prompt, bins, self.model.config.max_token_len)
        if report.tokens_cut:
            flags.append("prompt.shortened")
        inputs = ModelInputs(images, masks, tokens, token_mask)
        elapsed = (time.perf_counter() - started) * 1e3
        return Prepared(inputs, observation, prompt, model_state, action_space, elapsed, tuple(flags))

    def run(self, members: Sequence[Prepared], options: Sequence[InferenceOptions]) -> list[EngineResult]:
        """Put prepared observations through the network in one pass; see `Engine.run`."""
        return self.engine.run([one.inputs for one in members], options)

    def finish(self, prepared: Prepared, result: EngineResult) -> ActionChunk:
        """Turn the network's output into a chunk in robot units.

        Raises:
            ActionError: ``action.nan``, ``action.inf`` or ``action.zero``.
        """
        started = time.perf_counter()
        contract = self.contract
        output = result.actions.numpy()[:, : contract.action_dim]
        check_network_output(output)
        dims = self.profile.action.dims
        clamp_count = 0
        limits: tuple[str, ...] = ()
        if prepared.action_space == "normalized":
            actions = np.array(output, dtype=np.float32)
            units = ("normalized",) * len(dims)
        else:
            model_actions = contract.action_normalizer.unnormalize(output)
            actions = self._convention.actions_to_robot(model_actions, prepared.start_state)
            actions = np.ascontiguousarray(actions, dtype=np.float32)
            check_actions(actions, contract.action_names)
            actions, clamp_count, limits = apply_limits(actions, dims, contract.step_time_s)
            units = tuple(dim.unit for dim in dims)
        observation = prepared.observation
        timings = {
            "preprocess": prepared.preprocess_ms,
            **result.timings_ms,
            "postprocess": (time.perf_counter() - started) * 1e3,
        }
        return ActionChunk(
            actions=actions,
            names=contract.action_names,
            units=units,
            control_modes=tuple(dim.control for dim in dims),
            step_time_s=contract.step_time_s,
            executed_steps=contract.executed_steps,
            prompt=prepared.prompt,
            checkpoint_id=self.checkpoint.id,
            profile=self.profile.name,
            denoise_steps=result.num_steps,
            noise_seed=result.noise_seed,
            stamp_ns=observation.stamp_ns,
            input_stamps_ns=MappingProxyType(dict(observation.input_stamps_ns)),
            timings_ms=MappingProxyType(timings),
            cache_hit=result.cache_hit,
            guard_flags=prepared.flags + limits,
            clamp_count=clamp_count,
        )

    def warm_up(self) -> None:
        """Answer one made-up observation and capture its shape, so that no real one pays for what comes first.

        Raises:
            Pi05Error: as `infer`; what cannot answer this cannot answer anything.
        """
        black = np.zeros((480, 640, 3), np.uint8)
        dims = self.profile.state.dims
        state = np.zeros(len(dims)) if self.profile.reset_pose is None else np.array(self.profile.reset_pose)
        prompt = self.profile.prompt or "warm up"
        self.infer(Observation(dict.fromkeys(self._feeding, black), state, prompt), seed=0)
        self.engine.warm_up()

    def capture_pending(self) -> bool:
        """Capture one plan that is still run eagerly; whether there are more. Called while nothing else is to do."""
        return self.engine.capture_pending()

    def close(self) -> None:
        """Give the network's memory back; nothing can be asked afterwards."""
        device = self.engine.device
        del self.engine, self.model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def _prompt(self, observation: Observation) -> str:
        prompt = self.profile.prompt if observation.prompt is None else observation.prompt
        if not isinstance(prompt, str) or not prompt.strip():
            raise ObservationError(
                "no_prompt",
                f"prompt: an instruction is expected, got {observation.prompt!r}, and profile {self.profile.name} "
                "has no prompt of its own",
            )
        return prompt

    def _state(self, observation: Observation) -> np.ndarray:
        """float32 [dims]; every door's state becomes the same numbers here."""
        dims = self.profile.state.dims
        state = np.asarray(observation.state)
        width = state.shape[0] if state.ndim == 1 else -1
        fits = width == len(dims) if self.profile.state.exact else 0 < width <= len(dims)
        if not fits or state.dtype.kind not in "fiu":
            names = [dim.name for dim in dims]
            expected = f"{len(dims)} numbers {names}" if self.profile.state.exact else f"1 to {len(dims)} numbers"
            raise ObservationError(
                "state_width", f"state: {expected} expected, got {state.dtype} of shape {list(state.shape)}"
            )
        check_state(state, self.contract.state_names)
        with np.errstate(over="ignore"):
            narrowed = state.astype(np.float32)
        check_state(narrowed, self.contract.state_names)
        return narrowed

    def _images(
        self, images: Mapping[str, np.ndarray], image_masks: Mapping[str, bool]
    ) -> tuple[tuple[torch.Tensor, ...], tuple[bool, ...]]:
        known = self.profile.cameras
        blank = {camera for camera, mask in image_masks.items() if not mask}
        unknown = sorted({*images, *image_masks} - set(known))
        needed = [name for name in self._feeding if name not in blank and not known[name].optional]
        missing = [name for name in needed if name not in images]
        used = {name for name in images if name not in blank}
        if unknown or missing or not used.intersection(self._feeding):
            raise ObservationError(
                "camera",
                f"cameras: expected {list(self._feeding)}, got {sorted(images)}; missing {missing}, unknown {unknown}",
                {"expected": list(self._feeding), "received": sorted(images), "missing": missing, "unknown": unknown},
            )
        present: list[tuple[torch.Tensor, bool]] = []
        absent: list[tuple[torch.Tensor, bool]] = []
        for _, camera in self.contract.slots:
            if camera is not None and camera in used:
                frame = as_hwc_uint8(images[camera], layout="hwc", camera=camera)
                if known[camera].rotate == 180:
                    frame = frame[::-1, ::-1]
                present.append((resize_with_pad(frame, self._size, self.contract.resize), True))
            elif self.contract.absent_camera_order == "in_place":
                present.append((absent_image(self._size), False))
            else:
                absent.append((absent_image(self._size), False))
        ordered = present + absent
        return tuple(pixels for pixels, _ in ordered), tuple(mask for _, mask in ordered)


def resolve_device(device: str) -> torch.device:
    """The torch device that a user's word means; ``auto`` is CUDA where there is one.

    Raises:
        ConfigurationError: ``config.device``.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ConfigurationError("device", f"device: auto, cpu, cuda or cuda:N expected, got {device!r}") from error
    if resolved.type not in ("cpu", "cuda"):
        raise ConfigurationError("device", f"device: auto, cpu, cuda or cuda:N expected, got {device!r}")
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(
            "device", f"device {device!r}: this machine has {torch.cuda.device_count()} CUDA devices; use cpu or auto"
        )
    return resolved


def load_policy(
    checkpoint: str | Path | None = None,
    profile: str | Path | Profile | None = None,
    device: str = "auto",
    dtype: str = "auto",
    *,
    revision: str | None = None,
    assets: str | None = None,
    statistics: str | Path | None = None,
    normalization: str | None = None,
    tokenizer: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    engine: EngineSettings | str | Path | None = None,
) -> Policy:
    """Load a checkpoint for a robot.

    Args:
        checkpoint: folder or hub id; ``None`` is the small built-in checkpoint.
        profile: a `Profile`, the name of a shipped one, or a YAML file; ``None`` is ``raw``: the checkpoint's own
            camera names, any state up to its width, its full output width.
        device: ``auto`` (CUDA where there is one), ``cpu``, ``cuda``, ``cuda:1``.
        dtype: ``auto`` (float32 on a CPU, else bfloat16), ``bfloat16`` or ``float32``.
        revision: of a hub id.
        assets: which ``assets/<id>`` of an OpenPI folder holds the statistics, where there are several.
        statistics: a statistics file instead of the checkpoint's.
        normalization: quantile, mean_std or none, overriding profile and checkpoint.
        tokenizer: tokenizer.json or SentencePiece .model instead of the checkpoint's.
        progress: called with (bytes done, bytes in all) while weights are read.
        engine: settings, the name of a preset in config/presets, or a YAML file; see `EngineSettings`.

    Raises:
        CheckpointError, ProfileError, ContractError, ConfigurationError: with both sides named.
    """
    torch_device = resolve_device(device)
    source = builtin_checkpoint() if checkpoint is None else checkpoint
    opened = open_checkpoint(source, revision, assets=assets, statistics=statistics)
    robot = None if profile in (None, "raw") else profile if isinstance(profile, Profile) else load_profile(profile)
    contract = check_contract(robot, opened, normalization)
    tokenizer_path = Path(tokenizer).expanduser() if tokenizer is not None else opened.tokenizer_path
    words = None if tokenizer_path is None else load_tokenizer(tokenizer_path)
    if words is not None and words.vocab_size > opened.config.vocab:
        raise ContractError(
            "tokenizer",
            f"tokenizer {tokenizer_path} knows {words.vocab_size} tokens, checkpoint {opened.id} embeds "
            f"{opened.config.vocab}; give the tokenizer the checkpoint was trained with",
        )
    torch_dtype = resolve_dtype(dtype, torch_device)
    settings = place_weights(
        engine if isinstance(engine, EngineSettings) else load_preset(engine) if engine else EngineSettings(),
        opened.config,
        torch_device,
        torch_dtype,
        cameras=len(contract.slots),
        num_steps=contract.num_steps,
    )
    # Weights that do not stay on the device are put into host memory from the host's side.
    stays = settings.placement is None or settings.placement.all_resident
    model = load_model(opened, torch_device if stays else torch.device("cpu"), torch_dtype, progress)
    return Policy(opened, contract, model, words, settings, torch_device)
