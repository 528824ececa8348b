"""Camera frames to model images: layout, resize with padding, scaling to [-1, 1].

Both reference resizes shrink a frame to fit, truncate the fitted size to whole pixels, centre it and fill the rest with
black; an odd pixel goes to the bottom or right. They differ in the filter: LeRobot interpolates bilinearly on [0, 1]
without antialiasing, OpenPI uses Pillow's antialiased bilinear filter on bytes.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import cv2
import numpy as np
import torch
from PIL import Image
from torch.nn import functional

from pi05_ros.errors import ConfigurationError, ObservationError

ResizeKind = Literal["torch", "pil"]
Layout = Literal["hwc", "chw"]
ImageSize: TypeAlias = "int | tuple[int, int]"

BLACK = -1.0
_LAYOUT_TEXT = {
    "hwc": "[height, width, 3]",
    "chw": "[3, height, width]",
    None: "[height, width, 3] or [3, height, width]",
}


def as_hwc_uint8(
    image: np.ndarray,
    layout: Layout | None,
    camera: str,
    float_range: tuple[float, float] | None = None,
) -> np.ndarray:
    """Bring one RGB frame into uint8 [height, width, 3].

    ``layout`` is what the profile declares. The other layout is accepted where only one reading is possible; where both
    are (three rows and three columns of channels), the declared one is taken, and without a declaration it is refused.

    Float frames need a declared ``float_range`` (low, high), which black and white stand for; they are rounded to the
    nearest byte. OpenPI truncates (``(255 * x).astype(uint8)``), which wraps what lies above 1 and loses a level
    wherever a byte came through [-1, 1] or a reciprocal; rounding restores the byte exactly. The two agree on bytes
    that were divided by 255, and are never more than one level apart.

    Returns:
        uint8 [height, width, 3], contiguous; ``image`` itself where it already is.

    Raises:
        ObservationError: ``observation.image_layout``, ``.image_empty``, ``.image_dtype``, ``.image_range`` or
            ``.image_not_finite``, naming the camera.
    """
    image = np.asarray(image)
    expected = _LAYOUT_TEXT[layout]
    shape = list(image.shape)
    details = {"camera": camera, "shape": shape, "layout": layout}
    if image.ndim != 3:
        raise ObservationError(
            "image_layout", f"camera {camera!r}: expected one frame {expected}, got shape {shape}", details
        )
    could_be_hwc, could_be_chw = image.shape[2] == 3, image.shape[0] == 3
    if not (could_be_hwc or could_be_chw):
        raise ObservationError(
            "image_layout",
            f"camera {camera!r}: expected RGB {expected}, got shape {shape}, which has no axis of 3 channels first or "
            "last; convert grey, depth or RGBA frames before sending them",
            details,
        )
    if could_be_hwc and could_be_chw and layout is None:
        raise ObservationError(
            "image_layout",
            f"camera {camera!r}: shape {shape} can be read as {expected}; declare the layout",
            details,
        )
    if image.size == 0:
        raise ObservationError("image_empty", f"camera {camera!r}: the frame of shape {shape} holds no pixels", details)
    planar = could_be_chw and (layout == "chw" or not could_be_hwc)
    if image.dtype != np.uint8:
        image = _float_to_bytes(image, camera, float_range)
    if planar:
        # OpenCV interleaves planes about forty times as fast as NumPy copies a transposed view.
        return cv2.merge([np.ascontiguousarray(plane) for plane in image])
    return np.ascontiguousarray(image)


def _float_to_bytes(image: np.ndarray, camera: str, float_range: tuple[float, float] | None) -> np.ndarray:
    if not np.issubdtype(image.dtype, np.floating):
        raise ObservationError(
            "image_dtype",
            f"camera {camera!r}: expected uint8 pixels (0..255), got {image.dtype}; convert before sending",
            {"camera": camera, "dtype": str(image.dtype)},
        )
    low, high = float(image.min()), float(image.max())
    if not (np.isfinite(low) and np.isfinite(high)):
        raise ObservationError(
            "image_not_finite", f"camera {camera!r}: the frame holds NaN or infinity", {"camera": camera}
        )
    details = {"camera": camera, "found": [low, high], "declared": list(float_range) if float_range else None}
    if float_range is None:
        raise ObservationError(
            "image_dtype",
            f"camera {camera!r}: expected uint8 pixels (0..255), got {image.dtype} in [{low:g}, {high:g}] without a "
            "declared range; send uint8 or declare the range",
            details,
        )
    black, white = float_range
    if not (np.isfinite(black) and np.isfinite(white) and black < white):
        raise ConfigurationError("image_range", f"the float range of an image must be (low, high), got {float_range}")
    if low < black or high > white:
        raise ObservationError(
            "image_range",
            f"camera {camera!r}: {image.dtype} pixels were declared in [{black:g}, {white:g}] and lie in "
            f"[{low:g}, {high:g}]",
            details,
        )
    scaled = (image.astype(np.float64) - black) * (255.0 / (white - black))
    return np.rint(scaled).astype(np.uint8)


def fitted_size(height: int, width: int, target_height: int, target_width: int) -> tuple[int, int]:
    """(height, width) of a frame shrunk or grown to fit the target; truncated, so 225x225 becomes 223x223 in 224x224.

    The same float divisions as in both references, because the truncation depends on their rounding.
    """
    ratio = max(width / target_width, height / target_height)
    return int(height / ratio), int(width / ratio)


def resize_with_pad(image: np.ndarray, size: ImageSize, kind: ResizeKind) -> torch.Tensor:
    """Fit a frame into the model's image, black around it; a frame of the target size is not resampled.

    Args:
        image: uint8 [height, width, 3], RGB; any strides, may be read-only.
        size: side of the square image, or (height, width).
        kind: ``torch`` (LeRobot) or ``pil`` (OpenPI).

    Returns:
        float32 [3, height, width] in [-1, 1], newly allocated.

    Raises:
        ObservationError: ``observation.image_layout`` where ``image`` is not a uint8 [height, width, 3] frame, and
            ``observation.image_shape`` where it is so thin that nothing would be left of it.
        ConfigurationError: ``config.resize_kind`` for another kind.
    """
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or image.size == 0:
        raise ObservationError(
            "image_layout", f"expected uint8 [height, width, 3], got {image.dtype} {list(image.shape)}"
        )
    if kind not in ("torch", "pil"):
        raise ConfigurationError("resize_kind", f"the resize kind is 'torch' or 'pil', got {kind!r}")
    target = (size, size) if isinstance(size, int) else size
    height, width = image.shape[:2]
    if (height, width) == target:
        return _bytes_to_unit(image).mul_(2.0).sub_(1.0)
    fitted = fitted_size(height, width, *target)
    if min(fitted) == 0:
        raise ObservationError(
            "image_shape",
            f"a frame of {height}x{width} pixels is too thin: it shrinks to {fitted[0]}x{fitted[1]} "
            f"in {target[0]}x{target[1]}",
        )
    if kind == "pil":
        resized = Image.fromarray(np.ascontiguousarray(image)).resize(fitted[::-1], Image.Resampling.BILINEAR)
        unit = _bytes_to_unit(np.asarray(resized))
    else:
        unit = functional.interpolate(
            _bytes_to_unit(image)[None], size=fitted, mode="bilinear", align_corners=False, antialias=False
        )[0].clamp_(0.0, 1.0)
    top, left = (target[0] - fitted[0]) // 2, (target[1] - fitted[1]) // 2
    out = absent_image(target)
    # 2x - 1 on [0, 1], in this order: the references' rounding.
    out[:, top : top + fitted[0], left : left + fitted[1]] = unit.mul_(2.0).sub_(1.0)
    return out


def absent_image(size: ImageSize) -> torch.Tensor:
    """The image of an absent camera: float32 [3, height, width], black (-1) everywhere."""
    height, width = (size, size) if isinstance(size, int) else size
    return torch.full((3, height, width), BLACK, dtype=torch.float32)


def _bytes_to_unit(image: np.ndarray) -> torch.Tensor:
    """uint8 [H, W, 3] to float32 [3, H, W] in [0, 1], contiguous.

    NumPy reads the bytes, because torch takes neither negative strides nor, without a warning, read-only buffers.
    """
    unit = np.empty((3, *image.shape[:2]), dtype=np.float32)
    # The dtype is said because NumPy 1 would otherwise divide bytes in half precision.
    np.divide(image.transpose(2, 0, 1), 255.0, out=unit, dtype=np.float32)
    return torch.from_numpy(unit)
