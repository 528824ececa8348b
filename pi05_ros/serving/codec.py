"""Bytes on the wire <-> Python values with numpy arrays, within limits and without unpickling anything.

Written by hand because no kept library reads all the spellings clients use: OpenPI's (``__ndarray__``,
``__npgeneric__``), msgpack-numpy's (``nd``, ``type``, ``kind``), json-numpy's (``__numpy__``) and GR00T's
(``__ndarray_class__`` around an ``.npy`` file); keys may be bytes or str. Answers use OpenPI's spelling with bytes
keys, the only one its client reads.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import msgpack
import numpy as np
import pydantic_core

from pi05_ros.errors import ObservationError, RequestError

_NUMBER_DTYPE = re.compile(
    r"[<>=|]?[biufc][0-9]{1,2}|[?]|[<>=|][?]"
    r"|bool|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)"
)
_TEXT_DTYPE = re.compile(r"[<>=|]?[US][0-9]{1,6}")
_MAX_DIMENSIONS = 32
_CONTAINER_CELLS = 8
_NOT_PLAIN = {list, dict, msgpack.Timestamp}
# Exactly what numpy writes (numpy.lib.format).
_NPY_HEADER = re.compile(
    rb"\{'descr': '([!-&(-~]{1,16})', 'fortran_order': (True|False), 'shape': \(([0-9, ]{0,400})\), \}\s*"
)
_NPY_MAGIC = b"\x93NUMPY"


@dataclass(frozen=True)
class Limits:
    """What one message may cost.

    Attributes:
        max_bytes: length of the message.
        max_depth: nesting of maps and lists.
        max_cells: list elements plus eight per map or list; bounds the memory that a message of one-byte lists takes.
        max_elements: numbers in one array.
    """

    max_bytes: int = 64 * 2**20
    max_depth: int = 32
    max_cells: int = 16_000_000
    max_elements: int = 64 * 2**20


DEFAULT_LIMITS = Limits()


def packb(value: Any) -> bytes:
    """Encode a value as msgpack, arrays in OpenPI's spelling.

    Raises:
        TypeError: the value holds something that is neither plain data nor an array of numbers or text.
    """
    return msgpack.packb(value, default=_pack_numpy, use_bin_type=True)


def _pack_numpy(value: Any) -> dict[bytes, Any]:
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "OVMm":
        raise TypeError(f"cannot encode an array of dtype {value.dtype}")
    if isinstance(value, np.ndarray):
        # A contiguous array is written from its own memory; msgpack would copy the bytes of tobytes() once more.
        data = value.data.cast("B") if value.flags.c_contiguous and value.ndim and value.size else value.tobytes()
        return {b"__ndarray__": True, b"data": data, b"dtype": value.dtype.str, b"shape": value.shape}
    if isinstance(value, np.generic):
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(f"cannot encode {type(value).__name__}")


def unpackb(data: bytes | bytearray | memoryview, limits: Limits = DEFAULT_LIMITS) -> Any:
    """Decode one msgpack message.

    Arrays come back native, C-contiguous and read-only (views of the message where byte order and layout allow); numpy
    scalars as Python numbers; nested lists of numbers as arrays; keys as str.

    Raises:
        RequestError: ``request.too_large``.
        ObservationError: ``observation.malformed`` or ``observation.array``; the message names the key.
    """
    _check_size(len(data), limits)
    budget = _Budget(limits.max_cells)
    try:
        value = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            list_hook=budget.spend,
            object_hook=budget.spend,
            ext_hook=_refuse_extension,
            # A message cannot hold more elements than bytes; a header that says otherwise must not allocate.
            max_array_len=min(len(data), limits.max_cells),
            max_map_len=min(len(data), limits.max_cells),
        )
    except (ObservationError, RequestError):
        raise
    except msgpack.StackError:
        raise _too_deep(limits) from None
    except (ValueError, TypeError, msgpack.UnpackException, OverflowError, RecursionError, MemoryError) as error:
        raise ObservationError(
            "malformed",
            f"message: one msgpack value expected, got {len(data)} bytes starting with {bytes(data[:16])!r}: "
            f"{type(error).__name__} {str(error)[:120]}",
        ) from None
    return _resolve(value, "message", limits, 0)


def parse_json(data: bytes, limits: Limits = DEFAULT_LIMITS) -> Any:
    """Decode one JSON document; arrays (json-numpy's spelling and nested lists of numbers) as `unpackb` gives them.

    Raises:
        RequestError: ``request.too_large``.
        ObservationError: ``observation.malformed`` or ``observation.array``.
    """
    _check_size(len(data), limits)
    # Counted before parsing: an upper bound on what the parser will allocate.
    cells = data.count(b",") + _CONTAINER_CELLS * (data.count(b"[") + data.count(b"{"))
    if cells > limits.max_cells:
        raise _too_many(limits.max_cells)
    try:
        value = pydantic_core.from_json(data, allow_inf_nan=True, cache_strings="keys")
    except ValueError as error:
        raise ObservationError(
            "malformed", f"body: one JSON document expected, got {bytes(data[:16])!r}...: {str(error)[:160]}"
        ) from None
    return _resolve(value, "body", limits, 0)


class _Budget:
    """Counts what has been built while it is being built, so that a small message cannot become gigabytes."""

    def __init__(self, cells: int) -> None:
        self._cells = cells
        self._left = cells

    def spend(self, container: Any) -> Any:
        self._left -= len(container) + _CONTAINER_CELLS
        if self._left < 0:
            raise _too_many(self._cells)
        return container


def _check_size(size: int, limits: Limits) -> None:
    if size > limits.max_bytes:
        raise RequestError("too_large", f"message: at most {limits.max_bytes} bytes are taken, got {size}")


def _too_many(cells: int) -> RequestError:
    return RequestError(
        "too_large", f"message: more than {cells} values in lists and maps; send arrays instead of nested lists"
    )


def _too_deep(limits: Limits) -> ObservationError:
    return ObservationError("malformed", f"message: at most {limits.max_depth} levels of nesting are taken")


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    raise ObservationError("malformed", f"message: msgpack extension type {code} is not taken ({len(data)} bytes)")


def _resolve(value: Any, path: str, limits: Limits, depth: int) -> Any:
    """Replace spelled arrays by arrays, naming the key where one cannot be."""
    kind = type(value)
    if kind is not dict and kind is not list:
        return _refuse_extension(-1, value.to_bytes()) if kind is msgpack.Timestamp else value
    if depth >= limits.max_depth:
        raise _too_deep(limits)
    if kind is dict:
        spelled = _spelling(value)
        if spelled is not None:
            return spelled(value, path, limits)
        return {_text(key): _resolve(item, _join(path, key), limits, depth + 1) for key, item in value.items()}
    kinds = set(map(type, value))
    if kinds == {list}:
        numbers = _numbers(value)
        if numbers is not None:
            return numbers
    if kinds.isdisjoint(_NOT_PLAIN):
        return value
    return [_resolve(item, f"{path}[{index}]", limits, depth + 1) for index, item in enumerate(value)]


def _numbers(nested: list[Any]) -> np.ndarray | None:
    """A nested list of equally long lists of numbers as a read-only array, else ``None``."""
    try:
        array = np.array(nested)
    except (ValueError, TypeError, OverflowError):
        return None
    return _read_only(array) if array.dtype.kind in "biuf" else None


def _text(key: Any) -> str:
    return key.decode("utf-8", "replace") if isinstance(key, bytes) else str(key)


def _join(path: str, key: Any) -> str:
    text = _text(key)
    return text[:80] if path in ("message", "body") else f"{path}.{text[:80]}"


def _get(spelled: Mapping[Any, Any], key: str) -> Any:
    return spelled[key] if key in spelled else spelled.get(key.encode())


def _spelling(value: dict[Any, Any]) -> Any:
    for marker, decode in _SPELLINGS.items():
        if marker in value and len(value) <= 6:
            return decode
    return None


def _bad(path: str, what: str) -> ObservationError:
    return ObservationError("array", f"{path}: {what}", {"key": path})


def _openpi_array(spelled: dict[Any, Any], path: str, limits: Limits) -> Any:
    return _array(_get(spelled, "data"), _get(spelled, "dtype"), _get(spelled, "shape"), path, limits)


def _openpi_scalar(spelled: dict[Any, Any], path: str, limits: Limits) -> Any:
    data, text = _get(spelled, "data"), _dtype_text(_get(spelled, "dtype"), path)
    if _TEXT_DTYPE.fullmatch(text) and isinstance(data, (str, bytes)):
        return data
    dtype = _number_dtype(text, path)
    if dtype.kind == "c" or not isinstance(data, (bool, int, float)):
        raise _bad(path, f"a numpy scalar of dtype {text} needs one number as data, got {type(data).__name__}")
    try:
        return np.array(data, dtype=dtype).item()
    except (ValueError, OverflowError, TypeError):
        raise _bad(path, f"{data!r:.40} is no number of dtype {text}") from None


def _msgpack_numpy(spelled: dict[Any, Any], path: str, limits: Limits) -> Any:
    if _get(spelled, "kind") in ("O", b"O"):
        raise _bad(path, "an array of Python objects (pickled) is never taken; send an array of numbers")
    if _get(spelled, "nd"):
        return _array(_get(spelled, "data"), _get(spelled, "type"), _get(spelled, "shape"), path, limits)
    value = _array(_get(spelled, "data"), _get(spelled, "type"), (), path, limits)
    return value.item() if isinstance(value, np.ndarray) else value


def _json_numpy(spelled: dict[Any, Any], path: str, limits: Limits) -> Any:
    data = _get(spelled, "__numpy__")
    if isinstance(data, str):
        try:
            data = base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError):
            raise _bad(path, "__numpy__ needs base64 data") from None
    return _array(data, _get(spelled, "dtype"), _get(spelled, "shape"), path, limits)


def _npy_file(spelled: dict[Any, Any], path: str, limits: Limits) -> Any:
    """GR00T's spelling. Its header is read here: ``np.load`` would copy, and evaluates it as Python."""
    content = _get(spelled, "as_npy")
    if not isinstance(content, bytes) or content[:6] != _NPY_MAGIC or len(content) < 12:
        raise _bad(path, "as_npy needs the bytes of an .npy file")
    wide = content[6] >= 2
    (length,) = struct.unpack_from("<I" if wide else "<H", content, 8)
    start = 12 if wide else 10
    header = _NPY_HEADER.fullmatch(content[start : start + min(length, 4096)])
    if header is None:
        raise _bad(path, "the .npy header of a plain array of numbers is expected")
    descr, fortran, lengths = (part.decode() for part in header.groups())
    parts = [part for part in lengths.replace(" ", "").split(",") if part]
    shape = tuple(int(part) for part in parts[: _MAX_DIMENSIONS + 1])
    data = content[start + length :]
    if fortran != "True":
        return _array(data, descr, shape, path, limits)
    return _read_only(np.ascontiguousarray(_array(data, descr, shape[::-1], path, limits).T))


_SPELLINGS: dict[Any, Any] = {}
for _marker, _decode in (
    ("__ndarray__", _openpi_array),
    ("__npgeneric__", _openpi_scalar),
    ("nd", _msgpack_numpy),
    ("__numpy__", _json_numpy),
    ("__ndarray_class__", _npy_file),
):
    _SPELLINGS[_marker] = _SPELLINGS[_marker.encode()] = _decode


def _dtype_text(value: Any, path: str) -> str:
    text = value.decode("ascii", "replace") if isinstance(value, bytes) else value
    if not isinstance(text, str):
        raise _bad(path, f"dtype {value!r:.60} is not taken; send a plain array of numbers")
    return text


def _number_dtype(text: str, path: str) -> np.dtype:
    if not _NUMBER_DTYPE.fullmatch(text):
        raise _bad(
            path, f"dtype {text!r:.60} is not taken; send a plain array of numbers (objects and structs are not)"
        )
    try:
        return np.dtype(text)
    except TypeError:
        raise _bad(path, f"dtype {text!r:.60} is unknown here; send a plain array of numbers") from None


def _array(data: Any, dtype_name: Any, shape: Any, path: str, limits: Limits) -> Any:
    """The array spelled by its bytes, dtype and shape; a single text as ``str`` or ``bytes``."""
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise _bad(path, f"an array needs its bytes as data, got {type(data).__name__}")
    text = _dtype_text(dtype_name, path)
    is_text = _TEXT_DTYPE.fullmatch(text) is not None
    dtype = np.dtype(text) if is_text else _number_dtype(text, path)
    if (
        not isinstance(shape, (list, tuple))
        or len(shape) > _MAX_DIMENSIONS
        or not all(type(length) is int and 0 <= length < 2**31 for length in shape)
    ):
        raise _bad(path, f"shape {shape!r:.80} is not taken; at most {_MAX_DIMENSIONS} whole numbers are expected")
    elements = math.prod(shape)
    if elements > limits.max_elements:
        raise RequestError("too_large", f"{path}: at most {limits.max_elements} numbers are taken, got {list(shape)}")
    if elements * dtype.itemsize != len(data):
        raise _bad(
            path,
            f"{text} of shape {list(shape)} needs {elements * dtype.itemsize} bytes, got {len(data)}",
        )
    if is_text:
        if elements != 1:
            raise _bad(path, f"dtype {text!r} is not taken; send a plain array of numbers")
        try:
            return np.frombuffer(data, dtype).item()
        except ValueError:
            raise _bad(path, "the text is not valid Unicode") from None
    try:
        array = (np.frombuffer(data, dtype) if elements else np.empty(0, dtype)).reshape(tuple(shape))
    except ValueError as error:
        raise _bad(path, f"shape {list(shape)!r:.80} is not taken: {str(error)[:80]}") from None
    if dtype.kind == "b":
        # Bytes other than 0 and 1 are no booleans, and numpy's behaviour with them is undefined.
        array = np.asarray(array.view(np.uint8) != 0)
    elif not dtype.isnative:
        array = array.astype(dtype.newbyteorder("="))
    return _read_only(array)


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
