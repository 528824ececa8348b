"""ROS image messages to RGB pixels: one converter, which refuses what it would have to guess.

sensor_msgs/Image is checked against its own header (`step`, size) and converted by rosbags-image; JPEG and PNG are
decoded as on every other door. cv_bridge is never imported: it breaks with numpy 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from rosbags.image import image_to_cvimage

from pi05_ros.errors import ObservationError
from pi05_ros.transforms.encoded_images import MAX_PIXELS, decode_image

if TYPE_CHECKING:
    from sensor_msgs.msg import CompressedImage, Image

# sensor_msgs/image_encodings.hpp; bytes per pixel. 8-bit samples have no byte order, so `is_bigendian` says nothing.
_BYTES_PER_PIXEL = {
    "rgb8": 3,
    "bgr8": 3,
    "rgba8": 4,
    "bgra8": 4,
    "bayer_rggb8": 1,
    "bayer_bggr8": 1,
    "bayer_gbrg8": 1,
    "bayer_grbg8": 1,
    "yuv422": 2,  # the old name of uyvy
    "uyvy": 2,
    "yuyv": 2,
    "yuv422_yuy2": 2,  # the old name of yuyv
}
_MAGIC = {"jpeg": b"\xff\xd8\xff", "png": b"\x89PNG"}


@dataclass(frozen=True)
class _Packed:
    """What rosbags-image reads of an Image, without padding between the rows."""

    height: int
    width: int
    encoding: str
    data: np.ndarray
    is_bigendian: bool = False


def to_rgb(msg: Image | CompressedImage, topic: str) -> np.ndarray:
    """Pixels of an image message.

    Args:
        msg: rgb8, bgr8, rgba8, bgra8, 8-bit bayer or 4:2:2 YUV (sensor_msgs/Image), JPEG or PNG (CompressedImage).
            Alpha is left out.
        topic: names the message in errors.

    Returns:
        uint8 [height, width, 3], RGB, contiguous, owned by the caller.

    Raises:
        ObservationError: ``observation.image_encoding`` (kind of picture that is not used),
            ``observation.image_layout`` (header and data contradict each other), ``observation.image_size``,
            ``observation.image_corrupt``.
    """
    pixels = _from_compressed(msg, topic) if hasattr(msg, "format") else _from_raw(msg, topic)
    # One message may serve two observations, so no picture looks into its data.
    if not pixels.flags.c_contiguous or np.may_share_memory(pixels, np.frombuffer(msg.data, np.uint8)):
        pixels = pixels.copy(order="C")
    return pixels


def _from_raw(msg: Image, topic: str) -> np.ndarray:
    channels = _BYTES_PER_PIXEL.get(msg.encoding)
    if channels is None:
        raise ObservationError(
            "image_encoding",
            f"topic {topic}: one of the encodings {sorted(_BYTES_PER_PIXEL)} expected, got {msg.encoding!r}",
        )
    height, width, step = msg.height, msg.width, msg.step
    data = np.frombuffer(msg.data, np.uint8)
    if not 0 < height * width <= MAX_PIXELS:
        raise ObservationError("image_size", f"topic {topic}: 1 to {MAX_PIXELS} pixels expected, got {width}x{height}")
    if msg.encoding in ("yuv422", "uyvy", "yuyv", "yuv422_yuy2") and width % 2:
        raise ObservationError("image_layout", f"topic {topic}: {msg.encoding} has an even width, got {width}x{height}")
    row = width * channels
    if step < row:
        raise ObservationError(
            "image_layout",
            f"topic {topic}: step of at least {row} bytes expected for {width} pixels of {msg.encoding}, got {step}",
        )
    if data.size != step * height:
        raise ObservationError(
            "image_layout",
            f"topic {topic}: {step * height} bytes expected for {height} rows of step {step}, got {data.size}",
        )
    if step != row:
        data = np.ascontiguousarray(data.reshape(height, step)[:, :row]).reshape(-1)
    try:
        # The library's errors include cv2.error (not importable without OpenCV's own module) and AssertionError.
        return image_to_cvimage(_Packed(height, width, msg.encoding, data), "rgb8")  # type: ignore[arg-type]
    except Exception as error:
        raise ObservationError(
            "image_corrupt", f"topic {topic}: {msg.encoding} {width}x{height} not readable: {error}"
        ) from error


def _from_compressed(msg: CompressedImage, topic: str) -> np.ndarray:
    declared = _codec(msg.format, topic)
    data = bytes(msg.data)
    if not data:
        raise ObservationError("image_corrupt", f"topic {topic}: JPEG or PNG data expected, got an empty message")
    actual = next((codec for codec, magic in _MAGIC.items() if data.startswith(magic)), None)
    if actual is not None and declared not in (None, actual):
        raise ObservationError(
            "image_layout", f"topic {topic}: the format says {msg.format!r}, and the data are {actual}"
        )
    return decode_image(data, f"topic {topic}")


def _codec(text: str, topic: str) -> str | None:
    """``jpeg`` or ``png`` as ``CompressedImage.format`` says, or ``None`` where it is empty.

    compressed_image_transport writes ``<source encoding>; <codec> compressed <encoding given to the codec>``; drivers
    often write the codec alone.
    """
    source, semicolon, rest = (part.strip() for part in text.lower().partition(";"))
    words = (rest if semicolon else source).split()
    if not words and not semicolon:
        return None
    codec = {"jpg": "jpeg"}.get(words[0], words[0]) if words else ""
    if codec not in ("jpeg", "png"):
        raise ObservationError("image_encoding", f"topic {topic}: format jpeg or png expected, got {text!r}")
    given = words[2] if words[1:2] == ["compressed"] and len(words) == 3 else ""
    for encoding in (source if semicolon else "", given):
        if encoding and encoding not in _BYTES_PER_PIXEL:
            raise ObservationError("image_encoding", f"topic {topic}: an 8-bit colour encoding expected, got {text!r}")
    if (semicolon or len(words) > 1) and given not in ("bgr8", "bgra8"):
        # The transport's own decoder takes such data to have red and blue exchanged; many drivers do not mean that.
        raise ObservationError(
            "image_encoding",
            f"topic {topic}: '{source}; {codec} compressed bgr8' or '{codec}' alone expected, got {text!r}: "
            "readers disagree on whether red and blue are exchanged in it",
        )
    return codec
