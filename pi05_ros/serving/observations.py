"""Clients' keys to an `Observation`: OpenPI's names by robot family, and generic names. Nothing is computed here.

Generic names: the dotted ``observation.images.<camera>``, a map ``images``, or the bare camera name; ``state`` or
``observation.state``; ``task`` or ``prompt``. A key that is none of these is refused: a robot whose key is ignored
gets actions that mean nothing.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pi05_ros.errors import ObservationError
from pi05_ros.observation import Observation
from pi05_ros.profile import Profile
from pi05_ros.transforms.encoded_images import decode_image
from pi05_ros.transforms.images import Layout, as_hwc_uint8

_DOTTED = "observation.images."
_TENSOR_KEYS = {"values", "data", "dtype", "shape"}
_ENCODED_KEYS = ("b64_json", "base64")
# Far beyond any prompt; a longer text would only occupy the tokenizer.
_MAX_PROMPT = 10_000


@dataclass(frozen=True)
class Family:
    """What OpenPI's clients of one kind of robot send.

    Attributes:
        images: key -> cameras it may mean; the one the profile has is taken.
        state: keys joined into the state in this order, with the widths of the parts.
        nested_layout: of the pictures in the map ``images``.
    """

    images: Mapping[str, tuple[str, ...]]
    state: tuple[tuple[str, int], ...]
    nested_layout: Layout = "hwc"


# openpi/policies/{aloha,droid,libero}_policy.py and examples/ur5 of OpenPI: the keys their clients send.
FAMILIES: Mapping[str, Family] = {
    "aloha": Family(images={}, state=(("state", 14),), nested_layout="chw"),
    "droid": Family(
        images={
            "observation/exterior_image_1_left": ("exterior_image_1_left",),
            "observation/wrist_image_left": ("wrist_image_left",),
        },
        state=(("observation/joint_position", 7), ("observation/gripper_position", 1)),
    ),
    "libero": Family(
        images={
            "observation/image": ("image",),
            "observation/wrist_image": ("wrist_image", "image2"),
        },
        state=(("observation/state", 8),),
    ),
    "ur5e": Family(
        images={"base_rgb": ("base_rgb",), "wrist_rgb": ("wrist_rgb",)},
        state=(("joints", 6), ("gripper", 1)),
    ),
}


class ObservationReader:
    """Reads the observations of one profile's clients."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._family = FAMILIES.get(profile.family or "", Family(images={}, state=()))
        self._image_keys: dict[str, str] = {}
        for key, cameras in self._family.images.items():
            for camera in cameras:
                if camera in profile.cameras:
                    self._image_keys[key] = camera
        reserved = {"state", "observation.state", "images", "task", "prompt", "image_masks", "noise"}
        reserved |= {key for key, _ in self._family.state}
        for camera in profile.cameras:
            self._image_keys[_DOTTED + camera] = camera
            if camera not in reserved:
                self._image_keys[camera] = camera
        self._required = [
            name for name, camera in profile.cameras.items() if camera.slot is not None and not camera.optional
        ]

    @property
    def expected_keys(self) -> list[str]:
        """What a client of this profile sends, in its family's spelling."""
        spelled = {camera: key for key, camera in reversed(self._image_keys.items()) if key in self._family.images}
        nested = self._profile.family == "aloha"
        images = [spelled.get(name, f"images.{name}" if nested else _DOTTED + name) for name in self._required]
        return [*images, *(key for key, _ in self._family.state or (("observation.state", 0),)), "prompt"]

    def read(
        self, given: Mapping[str, Any], prompt: str | None = None, masks: Mapping[str, bool] | None = None
    ) -> Observation:
        """Turn a client's map into an observation.

        Args:
            given: the observation's keys and nothing else.
            prompt: the instruction where it stands beside the observation.
            masks: camera -> False where it is not to be looked at; such a camera may be left out.

        Raises:
            ObservationError: ``observation.keys`` with the expected and the received keys, ``observation.image_*``,
                ``observation.state``, ``observation.prompt``.
        """
        masks = masks or {}
        images: dict[str, np.ndarray] = {}
        state_parts: dict[str, Any] = {}
        unknown: list[str] = []
        prompts: dict[str, Any] = {}
        nested = given.get("images")
        if nested is not None:
            if not isinstance(nested, Mapping):
                raise ObservationError("keys", f"images: a map camera -> image is expected, got {_kind(nested)}")
            for name, value in nested.items():
                if name not in self._profile.cameras:
                    unknown.append(f"images.{name}")
                else:
                    images[name] = read_image(value, f"images.{name}", self._family.nested_layout)
        seen: dict[str, str] = {}
        for key, value in given.items():
            if key == "images":
                continue
            if (camera := self._image_keys.get(key)) is not None:
                if camera in seen:
                    raise ObservationError("keys", f"camera {camera!r} is given twice: as {seen[camera]!r} and {key!r}")
                seen[camera] = key
                images[camera] = read_image(value, key, "hwc")
            elif key in ("state", "observation.state") or any(key == part for part, _ in self._family.state):
                state_parts[key] = value
            elif key in ("task", "prompt"):
                prompts[key] = value
            else:
                unknown.append(key)
        missing = [name for name in self._required if name not in images and masks.get(name, True)]
        unknown += [f"image_masks.{name}" for name in masks if name not in self._profile.cameras]
        if unknown or missing or not state_parts:
            self._refuse_keys(given, missing, unknown, no_state=not state_parts)
        return Observation(
            images=images,
            state=self._state(state_parts),
            prompt=_prompt(prompts.get("task", prompts.get("prompt")) if prompt is None else prompt),
        )

    def _refuse_keys(self, given: Mapping[str, Any], missing: list[str], unknown: list[str], no_state: bool) -> None:
        nested = given.get("images")
        received = [str(key)[:80] for key in given if key != "images"]
        received += [f"images.{str(name)[:80]}" for name in nested] if isinstance(nested, Mapping) else []
        problems = [f"missing cameras {missing}"] * bool(missing) + ["missing state"] * no_state
        problems += [f"unknown keys {[str(key)[:80] for key in unknown[:8]]}"] * bool(unknown)
        expected = self.expected_keys
        raise ObservationError(
            "keys",
            f"profile {self._profile.name} expects {expected}, got {received[:32]}: {'; '.join(problems)}",
            {"expected": expected, "received": received[:32], "missing": missing, "unknown": unknown[:8]},
        )

    def _state(self, parts: Mapping[str, Any]) -> np.ndarray:
        generic = [key for key in ("state", "observation.state") if key in parts]
        family = [key for key, _ in self._family.state if key in parts and key not in generic]
        if len(generic) + bool(family) > 1:
            raise ObservationError("keys", f"the state is given twice: as {sorted(parts)}")
        if generic:
            return read_numbers(parts[generic[0]], generic[0], ndim=1)
        wanted = [key for key, _ in self._family.state]
        if family != wanted:
            raise ObservationError("keys", f"the state is expected as {wanted}, got {family}")
        numbers = []
        for key, width in self._family.state:
            part = read_numbers(parts[key], key)
            if part.shape != (width,) and not (width == 1 and part.shape == ()):
                raise ObservationError("state", f"{key}: {width} numbers are expected, got shape {list(part.shape)}")
            numbers.append(part.reshape(width))
        return np.concatenate(numbers) if len(numbers) > 1 else numbers[0]


def _kind(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__


def _prompt(value: Any) -> str | None:
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError:
            raise ObservationError("prompt", "prompt: UTF-8 text is expected, got other bytes") from None
    if value is not None and not isinstance(value, str):
        raise ObservationError("prompt", f"prompt: text is expected, got {_kind(value)}")
    if value is not None and len(value) > _MAX_PROMPT:
        raise ObservationError("prompt", f"prompt: at most {_MAX_PROMPT} characters are taken, got {len(value)}")
    return value


def read_numbers(value: Any, key: str, ndim: int | None = None) -> np.ndarray:
    """Numbers as an array, ``ndim`` dimensions where given.

    ``value`` is a number, a list, an array, or a tensor object ``{values or data, dtype, shape}``.

    Raises:
        ObservationError: ``observation.numbers`` naming the key.
    """
    array = _tensor_object(value, key) if isinstance(value, Mapping) else value
    if not isinstance(array, np.ndarray):
        if not isinstance(array, (list, int, float)) or isinstance(array, bool):
            raise ObservationError("numbers", f"{key}: numbers are expected, got {_kind(value)}")
        try:
            array = np.array(array)
        except (ValueError, TypeError, OverflowError):
            raise ObservationError("numbers", f"{key}: numbers of one regular shape are expected") from None
    if array.dtype.kind not in "iuf":
        raise ObservationError("numbers", f"{key}: numbers are expected, got {array.dtype} {list(array.shape)}")
    if ndim is not None and array.ndim != ndim:
        raise ObservationError(
            "numbers", f"{key}: an array of {ndim} dimension{'s' * (ndim > 1)} is expected, got {list(array.shape)}"
        )
    return array


def _tensor_object(value: Mapping[str, Any], key: str) -> np.ndarray:
    content = value.get("values", value.get("data"))
    if content is None or not set(value) <= _TENSOR_KEYS or len({"values", "data"} & set(value)) != 1:
        raise ObservationError(
            "numbers", f"{key}: numbers or {{values or data, dtype, shape}} are expected, got keys {list(value)[:8]}"
        )
    dtype, shape = value.get("dtype"), value.get("shape")
    if dtype is not None and (not isinstance(dtype, str) or dtype not in _TENSOR_DTYPES):
        raise ObservationError("numbers", f"{key}.dtype: one of {list(_TENSOR_DTYPES)} is expected, got {dtype!r:.40}")
    if isinstance(content, bytes):
        if dtype is None or len(content) % np.dtype(dtype).itemsize:
            raise ObservationError("numbers", f"{key}: {len(content)} bytes need a dtype that divides them")
        array = np.frombuffer(content, np.dtype(dtype).newbyteorder("<")).astype(dtype, copy=False)
    else:
        if isinstance(content, Mapping):
            raise ObservationError("numbers", f"{key}: numbers are expected, got a map")
        array = read_numbers(content, key)
        if dtype is not None:
            array = _cast(array, np.dtype(dtype), key)
    if shape is None:
        return array
    lengths = shape.tolist() if isinstance(shape, np.ndarray) else shape
    if (
        not isinstance(lengths, list)
        or not all(type(length) is int and length >= 0 for length in lengths)
        or len(lengths) > 8
        or math.prod(lengths) != array.size
    ):
        raise ObservationError("numbers", f"{key}.shape: {array.size} numbers do not fill {lengths!r:.60}")
    return array.reshape(lengths)


_TENSOR_DTYPES = ("float16", "float32", "float64", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64")


def _cast(array: np.ndarray, dtype: np.dtype, key: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        cast = array.astype(dtype)
    if dtype.kind in "iu" and not np.array_equal(cast, array):
        raise ObservationError("numbers", f"{key}: the numbers do not fit {dtype}")
    return cast


def read_image(value: Any, key: str, layout: Layout) -> np.ndarray:
    """One picture as uint8 [height, width, 3]: an array, nested lists, a tensor object, or base64 of a JPEG or PNG.

    Whole numbers are levels 0..255, floats lie in [0, 1].

    Raises:
        ObservationError: ``observation.image_*`` or ``observation.numbers`` naming the key.
    """
    if isinstance(value, Mapping) and any(name in value for name in _ENCODED_KEYS):
        return decode_image(_base64(value, key), key)
    array = read_numbers(value, key)
    if array.dtype.kind in "iu" and array.dtype != np.uint8:
        if array.size and (array.min() < 0 or array.max() > 255):
            raise ObservationError(
                "image_range", f"{key}: whole numbers 0..255 are expected, got {array.min()} to {array.max()}"
            )
        array = array.astype(np.uint8)
    return as_hwc_uint8(array, layout, key, float_range=(0.0, 1.0))


def _base64(value: Mapping[str, Any], key: str) -> bytes:
    text = next(value[name] for name in _ENCODED_KEYS if name in value)
    if len(value) != 1 or not isinstance(text, (str, bytes)):
        raise ObservationError("image_encoding", f"{key}: {{base64: text}} is expected, got keys {list(value)[:8]}")
    if isinstance(text, str) and text.startswith("data:"):
        head, comma, text = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise ObservationError("image_encoding", f"{key}: a data URL with ;base64 is expected, got {head[:60]!r}")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ObservationError("image_encoding", f"{key}: base64 text is expected") from None
