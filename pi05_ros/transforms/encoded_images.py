"""JPEG and PNG bytes to RGB pixels; the size is checked before anything is decoded.

Pillow and not OpenCV: OpenCV turns pictures by their EXIF tag and fills the rest of a truncated JPEG with grey, both
without a word.
"""

from __future__ import annotations

import io
import warnings

import numpy as np
from PIL import Image

from pi05_ros.errors import ObservationError

# A decoder allocates what the header claims; no camera of a robot has more.
MAX_PIXELS = 4096 * 4096
_PNG_RGB = (2, 6)


def decode_image(data: bytes, origin: str) -> np.ndarray:
    """Pixels of a JPEG or an 8-bit RGB(A) PNG; alpha is left out.

    Args:
        origin: names the picture in errors (a topic, a key of a request).

    Returns:
        uint8 [height, width, 3], RGB, contiguous.

    Raises:
        ObservationError: ``observation.image_corrupt``, ``observation.image_size`` or ``observation.image_encoding``.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            picture = Image.open(io.BytesIO(data), formats=("JPEG", "PNG"))  # reads the header alone
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ObservationError("image_size", f"{origin}: at most {MAX_PIXELS} pixels are taken; {error}") from None
    except Exception:  # Pillow raises many kinds for broken headers
        raise ObservationError(
            "image_corrupt",
            f"{origin}: a JPEG or PNG is expected, got {len(data)} bytes beginning with {data[:8].hex(' ')!r}",
        ) from None
    codec = "jpeg" if data.startswith(b"\xff\xd8") else "png"
    size = f"{codec} of {picture.width}x{picture.height}"
    if picture.width * picture.height > MAX_PIXELS:
        raise ObservationError("image_size", f"{origin}: at most {MAX_PIXELS} pixels are taken, got a {size}")
    # Byte 24 and 25 are depth and colour type of IHDR, which comes first; Pillow hides 16-bit samples.
    if (codec == "png" and (data[24] != 8 or data[25] not in _PNG_RGB)) or (codec == "jpeg" and picture.mode != "RGB"):
        raise ObservationError(
            "image_encoding", f"{origin}: an 8-bit colour picture is expected, got a {size} of mode {picture.mode}"
        )
    try:
        return np.array(picture.convert("RGB"))
    except Exception as error:
        raise ObservationError("image_corrupt", f"{origin}: the {size} is broken: {str(error)[:120]}") from None
