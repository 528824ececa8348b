"""The wire codec: every spelling of arrays, every number type, limits, and never an exception of another family."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import random
import time

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pi05_ros.errors import ObservationError, Pi05Error, RequestError
from pi05_ros.serving.codec import Limits, packb, parse_json, unpackb

NUMBERS = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?"),
    hnp.complex_number_dtypes(endianness="?"),
)
ARRAYS = hnp.arrays(NUMBERS, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))


def openpi(array: np.ndarray, text: bool = False) -> dict:
    spelled = {b"__ndarray__": True, b"data": array.tobytes(), b"dtype": array.dtype.str, b"shape": array.shape}
    return {key.decode(): value for key, value in spelled.items()} if text else spelled


def msgpack_numpy(array: np.ndarray) -> dict:
    return {b"nd": True, b"type": array.dtype.str, b"kind": b"", b"shape": array.shape, b"data": array.tobytes()}


def json_numpy(array: np.ndarray) -> dict:
    data = base64.b64encode(array.tobytes()).decode()
    return {"__numpy__": data, "dtype": array.dtype.str, "shape": list(array.shape)}


def npy(array: np.ndarray) -> dict:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return {"__ndarray_class__": True, "as_npy": file.getvalue()}


def assert_same(got: np.ndarray, sent: np.ndarray) -> None:
    assert isinstance(got, np.ndarray)
    assert got.dtype == sent.dtype.newbyteorder("=") and got.dtype.isnative
    assert got.shape == sent.shape
    assert got.flags.c_contiguous and not got.flags.writeable
    np.testing.assert_array_equal(got, sent)


@given(ARRAYS, st.sampled_from(["C", "F", "reversed", "strided"]))
@settings(max_examples=300, deadline=None)
def test_every_number_array_survives_in_every_spelling(array: np.ndarray, layout: str) -> None:
    if layout == "F":
        array = np.asfortranarray(array)
    elif layout == "reversed" and array.ndim:
        array = array[::-1]
    elif layout == "strided" and array.ndim:
        array = np.repeat(array, 2, axis=-1)[..., ::2]
    assert_same(unpackb(packb({"key": array}))["key"], array)
    for spelled in (openpi(array), openpi(array, text=True), msgpack_numpy(array), json_numpy(array), npy(array)):
        assert_same(unpackb(msgpack.packb({"key": spelled}))["key"], array)
    assert_same(parse_json(json.dumps({"key": json_numpy(array)}).encode())["key"], array)


@given(hnp.from_dtype(np.dtype("f4")) | hnp.from_dtype(np.dtype("i8")) | hnp.from_dtype(np.dtype("?")))
def test_numpy_scalars_come_back_as_python_numbers(scalar: np.generic) -> None:
    for spelled in (
        {b"__npgeneric__": True, b"data": scalar.item(), b"dtype": scalar.dtype.str},
        {b"nd": False, b"type": scalar.dtype.str, b"data": scalar.tobytes()},
    ):
        got = unpackb(msgpack.packb([spelled]))[0]
        assert type(got) in (bool, int, float)
        np.testing.assert_equal(got, scalar.item())


def test_text_that_went_through_numpy_is_text() -> None:
    assert unpackb(packb({"prompt": np.array("stack the blocks")}))["prompt"] == "stack the blocks"
    assert unpackb(packb({"prompt": np.array(b"stack")}))["prompt"] == b"stack"


def test_nested_lists_of_numbers_become_arrays() -> None:
    rows = [[[1, 2, 3], [4, 5, 6]]]
    for got in (unpackb(msgpack.packb({"image": rows})), parse_json(json.dumps({"image": rows}).encode())):
        np.testing.assert_array_equal(got["image"], np.array(rows))
    ragged = parse_json(b'{"image": [[1, 2], [3]]}')["image"]
    assert ragged == [[1, 2], [3]]
    listed = unpackb(packb([np.float32(0.5), {"x": np.int16(3)}]))
    assert listed == [0.5, {"x": 3}]


def test_decoding_takes_views_where_it_can() -> None:
    message = packb({"image": np.zeros((64, 64, 3), np.uint8)})
    with pytest.raises(ValueError, match="read-only"):
        unpackb(message)["image"][0, 0, 0] = 1


@pytest.mark.parametrize(
    ("spelled", "said"),
    [
        ({"__ndarray__": True, "data": b"x", "dtype": "|O", "shape": [1]}, "|O"),
        ({"__ndarray__": True, "data": b"x" * 8, "dtype": [["a", "<f4"], ["b", "<f4"]], "shape": [1]}, "a"),
        ({"__ndarray__": True, "data": b"x" * 8, "dtype": "f4,f4", "shape": [1]}, "f4,f4"),
        ({"__ndarray__": True, "data": b"x" * 8, "dtype": "<M8[s]", "shape": [1]}, "M8"),
        ({"__ndarray__": True, "data": b"x" * 8, "dtype": "(2,)<f4", "shape": [1]}, "(2,)"),
        ({"nd": True, "kind": b"O", "type": "|O", "data": b"\x80\x04K\x01.", "shape": [1]}, "pickled"),
        ({"nd": True, "kind": b"V", "type": [["a", "<f4"]], "data": b"xxxx", "shape": [1]}, "a"),
        ({"__ndarray__": True, "data": b"xxx", "dtype": "<f4", "shape": [1]}, "4 bytes"),
        ({"__ndarray__": True, "data": b"", "dtype": "<f4", "shape": [-1]}, "shape"),
        ({"__ndarray__": True, "data": b"", "dtype": "<f4", "shape": [0] * 40}, "shape"),
        ({"__ndarray__": True, "data": b"", "dtype": "<f4", "shape": [2.0]}, "shape"),
        ({"__ndarray__": True, "data": "text", "dtype": "<f4", "shape": [1]}, "bytes"),
        ({"__ndarray__": True, "data": b"", "dtype": "bfloat16", "shape": [0]}, "bfloat16"),
        ({"__npgeneric__": True, "data": "1", "dtype": "<f4"}, "number"),
        ({"__npgeneric__": True, "data": 300, "dtype": "|u1"}, "300"),
        ({"__numpy__": "%%%", "dtype": "<f4", "shape": [1]}, "base64"),
        ({"__ndarray_class__": True, "as_npy": b"no file"}, "npy"),
        ({"__ndarray__": True}, "data"),
    ],
)  # fmt: skip
def test_what_is_no_number_array_is_refused_naming_key_and_reason(spelled: dict, said: str) -> None:
    with pytest.raises(ObservationError) as caught:
        unpackb(msgpack.packb({"observation": {"wrist": spelled}}))
    assert caught.value.code == "observation.array"
    assert "observation.wrist" in caught.value.message and said in caught.value.message


def test_an_npy_file_of_objects_is_refused() -> None:
    file = io.BytesIO()
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ObservationError, match="O"):
        unpackb(msgpack.packb({"x": {"__ndarray_class__": True, "as_npy": file.getvalue()}}))


def test_booleans_with_other_bytes_are_booleans() -> None:
    spelled = {"__ndarray__": True, "data": b"\x00\x01\x02\xff", "dtype": "|b1", "shape": [4]}
    np.testing.assert_array_equal(unpackb(msgpack.packb(spelled)), [False, True, True, True])


def test_limits() -> None:
    with pytest.raises(RequestError, match="at most 10 bytes"):
        unpackb(b"\x00" * 11, Limits(max_bytes=10))
    deep: object = 1
    for _ in range(40):
        deep = {"a": deep}
    for call, message in ((unpackb, msgpack.packb(deep)), (parse_json, json.dumps(deep).encode())):
        with pytest.raises(ObservationError, match="levels"):
            call(message)
    for depth in (2000, 100_000):
        with pytest.raises(ObservationError):
            unpackb(b"\x91" * depth + b"\x00")
        with pytest.raises(ObservationError):
            parse_json(b"[" * depth + b"]" * depth)
    # One byte per list: eight cells each.
    many = msgpack.packb([[]] * 1000)
    with pytest.raises(RequestError, match="more than 4000 values"):
        unpackb(many, Limits(max_cells=4000))
    with pytest.raises(RequestError, match="more than 4000 values"):
        parse_json(json.dumps([[]] * 1000).encode(), Limits(max_cells=4000))
    with pytest.raises(RequestError, match="at most 100 numbers"):
        unpackb(packb(np.zeros(101, np.uint8)), Limits(max_elements=100))
    with pytest.raises(ObservationError):
        unpackb(b"\xdd\xff\xff\xff\xff")  # a header that promises four billion elements


def test_extension_types_and_trailing_bytes_are_refused() -> None:
    for message in (msgpack.packb(msgpack.ExtType(5, b"x")), msgpack.packb(msgpack.Timestamp(1)), b"\x00\x00", b""):
        with pytest.raises(ObservationError) as caught:
            unpackb(message)
        assert caught.value.code == "observation.malformed"


def test_a_foreign_format_is_named_by_its_first_bytes() -> None:
    with pytest.raises(ObservationError, match="<html>"):
        unpackb(b"<html><body>proxy error</body></html>")


def test_only_plain_values_are_encoded() -> None:
    with pytest.raises(TypeError):
        packb({"x": np.array([object()])})
    with pytest.raises(TypeError):
        packb({"x": object()})


def fuzz(count: int, seed: int) -> None:
    """Mutations of valid messages and plain noise: every one decodes or is refused by the family's own error."""
    rng = random.Random(seed)
    arrays = [np.zeros((4, 4, 3), np.uint8), np.arange(5, dtype=">f4"), np.array(3.0)]
    seeds = [packb({"images": {"a": array}, "state": [1, 2.5], "prompt": "x"}) for array in arrays]
    seeds += [msgpack.packb({"x": spell(array)}) for array in arrays for spell in (msgpack_numpy, json_numpy, npy)]
    seeds += [json.dumps({"input": {"task": "x", "s": [[1, 2], [3, 4.5]]}, "n": json_numpy(arrays[1])}).encode()]
    limits = Limits(max_bytes=4096, max_cells=4000, max_elements=4000)
    for _ in range(count):
        data = bytearray(rng.choice(seeds) if rng.random() < 0.9 else rng.randbytes(rng.randrange(64)))
        for _ in range(rng.randrange(6)):
            at = rng.randrange(len(data) + 1)
            action = rng.randrange(4)
            if action == 0:
                data[at : at + 1] = rng.randbytes(1)
            elif action == 1:
                data[at:at] = rng.randbytes(rng.randrange(1, 5))
            elif action == 2:
                del data[at : at + rng.randrange(1, 9)]
            else:
                other = rng.choice(seeds)
                start = rng.randrange(len(other))
                data[at:at] = other[start : start + rng.randrange(40)]
        for decode in (unpackb, parse_json):
            with contextlib.suppress(Pi05Error):
                decode(bytes(data), limits)


def test_fuzzed_messages_decode_or_are_refused() -> None:
    fuzz(2000, seed=0)


@pytest.mark.soak
def test_fuzzed_messages_decode_or_are_refused_at_length() -> None:
    fuzz(200_000, seed=1)


def test_no_npy_header_takes_long() -> None:
    for filling in (b"1" * 400, b"1, " * 130, b" " * 400, b"1" * 4000):
        header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + filling + b"x"
        content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
        started = time.monotonic()
        with pytest.raises(ObservationError):
            unpackb(msgpack.packb({"x": {"__ndarray_class__": True, "as_npy": content}}))
        assert time.monotonic() - started < 0.1
