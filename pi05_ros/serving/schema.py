"""A request's body to an `Ask`: what is wanted of the policy, and in what form the answer goes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from pi05_ros.engine.engine import InferenceOptions
from pi05_ros.errors import ObservationError, RequestError
from pi05_ros.observation import Observation
from pi05_ros.serving.facts import PolicyFacts
from pi05_ros.serving.observations import ObservationReader, read_numbers

MAX_STEPS = 1000
MAX_CANDIDATES = 32
MAX_TIMEOUT_MS = 600_000

Switch = bool | Literal["auto"]
Space = Literal["robot", "normalized"]
Text = Annotated[str, BeforeValidator(lambda value: value.decode() if isinstance(value, bytes) else value)]
RequestId = Annotated[str, Field(max_length=256)] | int
Steps = Annotated[int, Field(gt=0, le=MAX_STEPS)]
Seed = Annotated[int, Field(ge=0, lt=2**64)]
Timeout = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_MS, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class GenerationInput(_Section):
    """What the robot sees and is told. ``task`` wins over ``prompt``."""

    task: Text | None = None
    prompt: Text | None = None
    observation: dict[str, Any] = Field(
        description="`images` (map camera -> image) or dotted `observation.images.<camera>`, `state`, and optionally "
        "`noise` [horizon, padded action dim] and `image_masks` (map camera -> bool). An image is a nested list or "
        "array uint8 0..255 or float 0..1, {base64: JPEG or PNG}, or {values or data, dtype, shape}.",
    )


class Parameters(_Section):
    """How the actions are computed; what is not given follows the checkpoint."""

    num_inference_steps: Steps | None = None
    action_horizon: Annotated[int, Field(gt=0)] | None = Field(default=None, description="Rows of the answer.")
    action_dim: Annotated[int, Field(gt=0)] | None = Field(default=None, description="Padded action width, checked.")
    seed: Seed | None = None
    num_candidates: Annotated[int, Field(ge=1, le=MAX_CANDIDATES)] | None = None


class Runtime(_Section):
    """How the request is run and answered."""

    return_timing: bool = True
    prefix_cache: Switch = "auto"
    cuda_graph: Switch = "auto"
    output_format: Literal["list", "numpy"] | None = Field(
        default=None, description="Without it: list in JSON, numpy in msgpack."
    )
    response_format: Literal["envelope", "raw"] = "envelope"
    action_space: Space = "robot"
    state_space: Space = "robot"
    timeout_ms: Timeout | None = None


class GenerationRequest(_Section):
    """Body of ``POST /v1/actions/generations``."""

    model: str | None = None
    request_id: RequestId | None = None
    id: RequestId | None = None
    input: GenerationInput
    parameters: Parameters | None = None
    runtime: Runtime | None = None


class _Controls(_Section):
    """Optional fields beside the keys of a raw observation."""

    enable_prefix_cache: Switch = "auto"
    enable_cuda_graph: Switch = "auto"
    num_inference_steps: Steps | None = None
    seed: Seed | None = None
    request_id: RequestId | None = None
    timeout_ms: Timeout | None = None
    noise: Any = None


_CONTROL_KEYS = frozenset(_Controls.model_fields)
_NO_CONTROLS = _Controls()


@dataclass(frozen=True)
class Ask:
    """One checked request.

    Attributes:
        options: one per candidate.
        how: keyword arguments of `Policy.prepare` that differ from its defaults.
        group: requests with equal keys may share a pass.
        horizon: rows to return.
    """

    observation: Observation
    options: tuple[InferenceOptions, ...]
    how: Mapping[str, Any]
    group: tuple[Any, ...]
    horizon: int
    request_id: str | int | None
    timeout_s: float | None
    return_timing: bool = True
    output_format: Literal["list", "numpy"] | None = None
    response_format: Literal["envelope", "raw"] = "envelope"
    prefix_cache: Switch = "auto"
    action_space: Space = "robot"


Model = TypeVar("Model", bound=BaseModel)


class RequestReader:
    """Checks requests against the served policy."""

    def __init__(self, facts: PolicyFacts) -> None:
        self._facts = facts
        self._observations = ObservationReader(facts.profile)

    def read(self, body: Any) -> Ask:
        """A generation request, or a raw observation where there is no ``input``.

        Raises:
            ObservationError: ``observation.malformed`` and those of `ObservationReader.read`.
            RequestError: ``request.unknown_model``.
        """
        if not isinstance(body, dict):
            raise ObservationError("malformed", f"a map of keys is expected, got {type(body).__name__}")
        return self._generation(body) if "input" in body else self._raw(body)

    def _generation(self, body: dict[str, Any]) -> Ask:
        request = _validate(GenerationRequest, body)
        if request.model is not None and request.model not in self._facts.served_model_names:
            raise RequestError(
                "unknown_model",
                f"model {request.model[:80]!r} is not served; served are {list(self._facts.served_model_names)}",
            )
        parameters, runtime = request.parameters or Parameters(), request.runtime or Runtime()
        given = dict(request.input.observation)
        noise = given.pop("noise", None)
        masks = _masks(given.pop("image_masks", None))
        prompt = request.input.prompt if request.input.task is None else request.input.task
        padded = self._facts.padded_action_dim
        if parameters.action_dim not in (None, padded):
            raise ObservationError(
                "action_dim", f"parameters.action_dim: the checkpoint's {padded} expected, got {parameters.action_dim}"
            )
        how: dict[str, Any] = {}
        if masks:
            how["image_masks"] = masks
        if runtime.action_space != "robot":
            how["action_space"] = runtime.action_space
        if runtime.state_space != "robot":
            how["state_space"] = runtime.state_space
        return self._ask(
            self._observations.read(given, prompt, masks),
            how,
            noise=noise,
            seed=parameters.seed,
            num_steps=parameters.num_inference_steps,
            prefix_cache=runtime.prefix_cache,
            cuda_graph=runtime.cuda_graph,
            num_candidates=parameters.num_candidates or 1,
            horizon=parameters.action_horizon,
            request_id=request.id if request.request_id is None else request.request_id,
            timeout_ms=runtime.timeout_ms,
            return_timing=runtime.return_timing,
            output_format=runtime.output_format,
            response_format=runtime.response_format,
            action_space=runtime.action_space,
        )

    def _raw(self, body: dict[str, Any]) -> Ask:
        beside = {key: body[key] for key in _CONTROL_KEYS if key in body}
        controls = _validate(_Controls, beside) if beside else _NO_CONTROLS
        given = {key: value for key, value in body.items() if key not in beside} if beside else body
        return self._ask(
            self._observations.read(given),
            {},
            noise=controls.noise,
            seed=controls.seed,
            num_steps=controls.num_inference_steps,
            prefix_cache=controls.enable_prefix_cache,
            cuda_graph=controls.enable_cuda_graph,
            num_candidates=1,
            horizon=None,
            request_id=controls.request_id,
            timeout_ms=controls.timeout_ms,
        )

    def _ask(
        self,
        observation: Observation,
        how: Mapping[str, Any],
        *,
        noise: Any,
        seed: int | None,
        num_steps: int | None,
        prefix_cache: Switch,
        cuda_graph: Switch,
        num_candidates: int,
        horizon: int | None,
        request_id: str | int | None,
        timeout_ms: float | None,
        **reply: Any,
    ) -> Ask:
        facts = self._facts
        if horizon is not None and horizon > facts.horizon:
            raise ObservationError(
                "action_horizon", f"parameters.action_horizon: 1 to {facts.horizon} rows expected, got {horizon}"
            )
        steps = facts.num_steps if num_steps is None else num_steps
        if noise is not None:
            with np.errstate(over="ignore"):  # the engine refuses what is not finite
                noise = read_numbers(noise, "noise").astype(np.float32)
            if num_candidates > 1:
                raise ObservationError("noise", "noise fixes one candidate; num_candidates > 1 needs a seed instead")
        shared: dict[str, Any] = {
            "noise": noise,
            "num_steps": steps,
            "horizon": horizon,
            "prefix_cache": prefix_cache,
            "cuda_graph": cuda_graph,
        }
        # Candidate 0 is what one candidate would be; the others take the following seeds.
        seeds = [seed if seed is None else (seed + index) % 2**64 for index in range(num_candidates)]
        return Ask(
            observation=observation,
            options=tuple(InferenceOptions(seed=one, **shared) for one in seeds),
            how=how,
            group=(steps, horizon, prefix_cache, cuda_graph),
            horizon=facts.horizon if horizon is None else horizon,
            request_id=request_id,
            timeout_s=None if timeout_ms is None else timeout_ms / 1e3,
            prefix_cache=prefix_cache,
            **reply,
        )


def _validate(model: type[Model], body: Mapping[str, Any]) -> Model:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        problems = []
        for problem in error.errors(include_url=False, include_context=False)[:8]:
            key = ".".join(str(part)[:80] for part in problem["loc"])
            # The value of a missing key is its whole surrounding.
            got = "" if problem["type"] in ("missing", "extra_forbidden") else f", got {problem['input']!r:.60}"
            problems.append(f"{key}: {problem['msg']}{got}")
        raise ObservationError("malformed", "; ".join(problems), {"problems": problems}) from None
    except UnicodeDecodeError:
        raise ObservationError("malformed", "input: the task is no UTF-8 text") from None


def _masks(value: Any) -> dict[str, bool]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(item, bool) for item in value.values()):
        raise ObservationError("malformed", f"image_masks: a map camera -> bool is expected, got {value!r:.80}")
    return value
