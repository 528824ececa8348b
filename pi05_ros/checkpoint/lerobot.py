"""LeRobot policy folders: config.json, weights, and the two processor pipelines with their statistics.

Field names and defaults are LeRobot's own (`PI05Config`, `make_pi05_pre_post_processors`); a pipeline step that is not
known here is refused, because skipping it would change numbers in silence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from pi05_ros.checkpoint.description import Checkpoint, Normalization, RelativeActions, read_json
from pi05_ros.checkpoint.folder import find_tokenizer, find_weights
from pi05_ros.checkpoint.headers import fingerprint
from pi05_ros.checkpoint.sizes import network_config
from pi05_ros.checkpoint.statistics import Statistics, read_statistics
from pi05_ros.errors import CheckpointError

PREPROCESSOR, POSTPROCESSOR = PROCESSOR_FILES = ("policy_preprocessor.json", "policy_postprocessor.json")
STATE, ACTION, IMAGES = "observation.state", "action", "observation.images."

_KINDS: dict[str, Normalization] = {"QUANTILES": "quantile", "MEAN_STD": "mean_std", "IDENTITY": "identity"}
_EPS = 1e-8
_RELATIVE = ("relative_actions_processor", "delta_actions_processor")
_ABSOLUTE = ("absolute_actions_processor",)
_NORMALIZER, _UNNORMALIZER = "normalizer_processor", "unnormalizer_processor"
_PROMPT, _TOKENIZER, _RENAME = (
    "pi05_prepare_state_tokenizer_processor_step",
    "tokenizer_processor",
    "rename_observations_processor",
)
# These move data and change no number.
_NEUTRAL = ("to_batch_processor", "device_processor")


class _Read(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class _Feature(_Read):
    type: str
    shape: tuple[PositiveInt, ...]


class _Config(_Read):
    input_features: dict[str, _Feature] = Field(default_factory=dict)
    output_features: dict[str, _Feature] = Field(default_factory=dict)
    n_obs_steps: PositiveInt = 1
    chunk_size: PositiveInt = 50
    n_action_steps: PositiveInt = 50
    max_state_dim: PositiveInt = 32
    max_action_dim: PositiveInt = 32
    num_inference_steps: PositiveInt = 10
    min_period: PositiveFloat = 4e-3
    max_period: PositiveFloat = 4.0
    image_resolution: tuple[PositiveInt, PositiveInt] = (224, 224)
    empty_cameras: int = Field(default=0, ge=0)
    tokenizer_max_length: PositiveInt = 200
    normalization_mapping: dict[str, str] = Field(
        default_factory=lambda: {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"}
    )
    use_relative_actions: bool = False
    relative_exclude_joints: list[str] = Field(default_factory=lambda: ["gripper"])
    action_feature_names: list[str] | None = None


class _Step(_Read):
    registry_name: str | None = None
    class_: str | None = Field(default=None, alias="class")
    config: dict[str, Any] = Field(default_factory=dict)
    state_file: str | None = None


class _Pipeline(_Read):
    steps: list[_Step]


class _NormalizerConfig(_Read):
    eps: float = _EPS
    features: dict[str, _Feature] = Field(default_factory=dict)
    norm_map: dict[str, str] = Field(default_factory=dict)


class _RelativeConfig(_Read):
    enabled: bool = False
    exclude_joints: list[str] = Field(default_factory=list)
    action_names: list[str] | None = None


class _TokenizerConfig(_Read):
    max_length: PositiveInt | None = None
    padding_side: str = "right"
    tokenizer_name: str | None = None


class _RenameConfig(_Read):
    rename_map: dict[str, str] = Field(default_factory=dict)


def _parse(model: type[Any], content: Mapping[str, Any], where: str) -> Any:
    try:
        return model.model_validate(content)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()[:5])
        raise CheckpointError("bad_config", f"{where}: {problems}") from error


def read(path: Path, identity: str, commit: str | None, statistics: Mapping[str, Statistics] | None) -> Checkpoint:
    """Describe a LeRobot folder; ``statistics`` replace its own.

    Raises:
        CheckpointError: ``checkpoint.bad_config``, ``checkpoint.unsupported`` (a stated behaviour that is not built),
            ``checkpoint.unknown_processor``, ``checkpoint.inconsistent`` (two files of the folder disagree),
            ``checkpoint.missing_file``, ``checkpoint.bad_statistics``, and those of `folder`, `sizes`, `headers`.
    """
    file = path / "config.json"
    raw = read_json(file)
    config: _Config = _parse(_Config, raw, str(file))
    if config.n_obs_steps != 1:
        raise CheckpointError(
            "unsupported", f"{file}: n_obs_steps is {config.n_obs_steps}; Pi0.5 runs on 1 observation"
        )
    if config.n_action_steps > config.chunk_size:
        raise CheckpointError(
            "bad_config", f"{file}: n_action_steps {config.n_action_steps} exceeds chunk_size {config.chunk_size}"
        )
    pipelines = _Pipelines(path, config)
    cameras, empty = _cameras(config, file)
    state_dim = _width(config.input_features, STATE, config.max_state_dim, file)
    action_dim = _width(config.output_features, ACTION, config.max_action_dim, file)
    network = network_config(
        raw,
        file,
        action_dim=config.max_action_dim,
        horizon=config.chunk_size,
        max_token_len=pipelines.max_token_len,
        min_period=config.min_period,
        max_period=config.max_period,
    )
    size = network.vision.image_size
    if config.image_resolution != (size, size):
        raise CheckpointError(
            "inconsistent",
            f"{file}: image_resolution is {list(config.image_resolution)}, the vision tower takes {[size, size]}",
        )
    found = pipelines.statistics() if statistics is None else statistics
    if statistics is None:
        for feature, width in (("state", state_dim), ("action", action_dim)):
            if feature in found and found[feature].width != width:
                raise CheckpointError(
                    "bad_statistics",
                    f"{path}: {feature} is {width} wide by config.json and {found[feature].width} by its statistics",
                )
    relative, notes = pipelines.relative_actions(action_dim)
    tensors = find_weights(path)
    return Checkpoint(
        path=path,
        format="lerobot",
        id=identity,
        revision=commit,
        fingerprint=fingerprint(tensors, [file, *pipelines.files]),
        config=network,
        cameras=cameras,
        empty_cameras=empty,
        camera_aliases=pipelines.aliases(cameras),
        state_dim=state_dim,
        action_dim=action_dim,
        action_names=tuple(config.action_feature_names) if config.action_feature_names else None,
        num_steps=config.num_inference_steps,
        executed_steps=config.n_action_steps,
        state_in_prompt=True,
        resize="torch",
        absent_camera_order="last",
        state_statistics=found.get("state"),
        action_statistics=found.get("action"),
        state_normalization=pipelines.state_normalization,
        action_normalization=pipelines.action_normalization,
        normalization_style="lerobot",
        relative_actions=relative,
        tokenizer_path=find_tokenizer(path),
        tokenizer_name=pipelines.tokenizer_name,
        weight_files=tuple(dict.fromkeys(tensor.file for tensor in tensors)),
        full_size_assumed="architecture" not in raw,
        notes=notes,
    )


def _cameras(config: _Config, file: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    names = [key for key, feature in config.input_features.items() if feature.type == "VISUAL"]
    foreign = [name for name in names if not name.startswith(IMAGES)]
    if foreign:
        raise CheckpointError("unsupported", f"{file}: cameras are named {IMAGES}<name>; got {foreign}")
    slots = [name.removeprefix(IMAGES) for name in names]
    # LeRobot appends the empty ones unless input_features already lists them, as published folders do.
    for index in range(config.empty_cameras):
        if f"empty_camera_{index}" not in slots:
            slots.append(f"empty_camera_{index}")
    empty = tuple(slot for slot in slots if re.fullmatch(r"empty_camera_\d+", slot))
    if len(slots) == len(empty):
        raise CheckpointError("bad_config", f"{file}: input_features names no camera (a feature of type VISUAL)")
    return tuple(slots), empty


def _width(features: dict[str, _Feature], key: str, widest: int, file: Path) -> int:
    """Width of a vector feature; LeRobot takes the padded width where it is not listed."""
    if key not in features:
        return widest
    shape = features[key].shape
    if len(shape) != 1 or shape[0] > widest:
        raise CheckpointError("bad_config", f"{file}: {key} has shape {list(shape)}; at most [{widest}] was expected")
    return shape[0]


class _Pipelines:
    """The two processor files of a folder; folders without them state their normalisation in config.json alone."""

    def __init__(self, path: Path, config: _Config) -> None:
        self._path = path
        self._config = config
        self.files = [path / name for name in PROCESSOR_FILES if (path / name).exists()]
        if len(self.files) == 1:
            raise CheckpointError(
                "missing_file",
                f"{path} holds {self.files[0].name} alone; {' and '.join(PROCESSOR_FILES)} come together",
            )
        before, after = (self._steps(name) if self.files else {} for name in PROCESSOR_FILES)
        self._refuse_unknown(PREPROCESSOR, before, {_RENAME, _NORMALIZER, _PROMPT, _TOKENIZER, *_RELATIVE, *_NEUTRAL})
        self._refuse_unknown(POSTPROCESSOR, after, {_UNNORMALIZER, *_ABSOLUTE, *_NEUTRAL})
        self._normalizer, self._normalizer_config = self._normalizer_of(PREPROCESSOR, before, _NORMALIZER)
        self._unnormalizer, self._unnormalizer_config = self._normalizer_of(POSTPROCESSOR, after, _UNNORMALIZER)
        self._relative = self._relative_of(before, after)
        self._rename: _RenameConfig = self._parse_step(before, _RENAME, _RenameConfig)
        tokenizer: _TokenizerConfig = self._parse_step(before, _TOKENIZER, _TokenizerConfig)
        if tokenizer.padding_side != "right":
            raise CheckpointError(
                "unsupported",
                f"{path / PREPROCESSOR}: tokens are padded on the {tokenizer.padding_side}; only right is built",
            )
        self.tokenizer_name = tokenizer.tokenizer_name
        self.max_token_len = tokenizer.max_length or config.tokenizer_max_length
        extra = set(before[_PROMPT].config) - {"max_state_dim", "task_key"} if _PROMPT in before else set()
        if extra:
            raise CheckpointError(
                "unsupported", f"{path / PREPROCESSOR}: {_PROMPT} has unknown options {sorted(extra)}"
            )
        self.files += [
            path / step.state_file for step in (self._normalizer, self._unnormalizer) if step and step.state_file
        ]
        self.state_normalization = self._kind(self._normalizer_config, STATE, "STATE")
        self.action_normalization = self._kind(self._unnormalizer_config, ACTION, "ACTION")

    def statistics(self) -> dict[str, Statistics]:
        """State statistics from the normaliser's file, action statistics from the unnormaliser's: those that run."""
        found = {}
        for feature, step in (("state", self._normalizer), ("action", self._unnormalizer)):
            if step is not None and step.state_file is not None:
                table = read_statistics(self._path / step.state_file)
                if feature in table:
                    found[feature] = table[feature]
        return found

    def relative_actions(self, action_dim: int) -> tuple[RelativeActions | None, tuple[str, ...]]:
        """Dimensions whose names contain an excluded word stay absolute, as in LeRobot (letter case ignored)."""
        step = self._relative
        if not step.enabled:
            return None, ()
        words = tuple(word.lower() for word in step.exclude_joints if word)
        names = step.action_names or self._config.action_feature_names
        if names is None:
            note = (
                "relative actions without action names: every dimension is relative, also one that the words "
                f"{list(words)} were meant to keep absolute"
            )
            return RelativeActions((True,) * action_dim, words), (note,) if words else ()
        if len(names) != action_dim:
            raise CheckpointError(
                "inconsistent", f"{self._path}: {len(names)} action names for {action_dim} action dimensions: {names}"
            )
        mask = tuple(not any(word in name.lower() for word in words) for name in names)
        return RelativeActions(mask, words), ()

    def aliases(self, cameras: tuple[str, ...]) -> dict[str, str]:
        """The rename map's camera names, other name -> slot; it renames before anything else reads them."""
        aliases = {}
        for old, new in self._rename.rename_map.items():
            if new.startswith(IMAGES):
                slot = new.removeprefix(IMAGES)
                if slot not in cameras:
                    raise CheckpointError(
                        "inconsistent",
                        f"{self._path / PREPROCESSOR}: the rename map leads to camera {slot!r}; "
                        f"the model's are {list(cameras)}",
                    )
                aliases[old.removeprefix(IMAGES)] = slot
        return aliases

    def _steps(self, name: str) -> dict[str, _Step]:
        file = self._path / name
        pipeline: _Pipeline = _parse(_Pipeline, read_json(file), str(file))
        steps: dict[str, _Step] = {}
        for step in pipeline.steps:
            key = step.registry_name or step.class_ or "a step without a name"
            if key in steps:
                raise CheckpointError("unsupported", f"{file}: step {key} stands twice")
            steps[key] = step
        return steps

    def _refuse_unknown(self, name: str, steps: dict[str, _Step], known: set[str]) -> None:
        unknown = [key for key in steps if key not in known]
        if unknown:
            raise CheckpointError(
                "unknown_processor",
                f"{self._path / name} runs {unknown}, which may change numbers and is not built here; known are "
                f"{sorted(known)}",
            )

    def _parse_step(self, steps: dict[str, _Step], key: str, model: type[Any]) -> Any:
        return _parse(model, steps[key].config if key in steps else {}, f"{self._path}: {key}")

    def _normalizer_of(
        self, name: str, steps: dict[str, _Step], key: str
    ) -> tuple[_Step | None, _NormalizerConfig | None]:
        if not self.files:
            return None, None
        if key not in steps:
            raise CheckpointError("bad_config", f"{self._path / name} has no step {key}; it has {list(steps)}")
        step = steps[key]
        if step.state_file is not None:
            if Path(step.state_file).name != step.state_file:
                raise CheckpointError(
                    "bad_config", f"{self._path / name}: {step.state_file!r} is no file of this folder"
                )
            if not (self._path / step.state_file).is_file():
                raise CheckpointError(
                    "missing_file", f"{self._path / name} keeps its statistics in {step.state_file}, which is not there"
                )
        config: _NormalizerConfig = self._parse_step(steps, key, _NormalizerConfig)
        if config.eps != _EPS:
            raise CheckpointError(
                "unsupported", f"{self._path / name}: {key} has eps {config.eps}; only {_EPS} is built"
            )
        return step, config

    def _kind(self, stated: _NormalizerConfig | None, feature: str, label: str) -> Normalization:
        """The pipeline that runs decides; config.json speaks only for folders without one."""
        mapping = self._config.normalization_mapping if stated is None else stated.norm_map
        visual = mapping.get("VISUAL", "IDENTITY")
        if visual != "IDENTITY":
            raise CheckpointError(
                "unsupported", f"{self._path}: images are normalised by {visual}; only IDENTITY is built"
            )
        kind = mapping.get(label, "IDENTITY")
        if kind not in _KINDS:
            raise CheckpointError(
                "unsupported", f"{self._path}: {feature} is normalised by {kind}; built are {sorted(_KINDS)}"
            )
        # A pipeline touches only the features it lists.
        return _KINDS[kind] if stated is None or feature in stated.features else "identity"

    def _relative_of(self, before: dict[str, _Step], after: dict[str, _Step]) -> _RelativeConfig:
        config = self._config
        if not self.files:
            return _RelativeConfig(
                enabled=config.use_relative_actions,
                exclude_joints=config.relative_exclude_joints,
                action_names=config.action_feature_names,
            )
        key = next((key for key in _RELATIVE if key in before), _RELATIVE[0])
        step: _RelativeConfig = self._parse_step(before, key, _RelativeConfig)
        back: _RelativeConfig = self._parse_step(after, _ABSOLUTE[0], _RelativeConfig)
        stated = {
            PREPROCESSOR: step.enabled,
            POSTPROCESSOR: back.enabled,
            "config.json": config.use_relative_actions,
        }
        if len(set(stated.values())) > 1:
            raise CheckpointError(
                "inconsistent", f"{self._path}: its files disagree whether actions are relative to the state: {stated}"
            )
        return step
