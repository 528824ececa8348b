"""Frames become the model's images exactly as in the references, or are refused by name."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from pi05_ros.errors import ConfigurationError, ObservationError
from pi05_ros.transforms.images import absent_image, as_hwc_uint8, fitted_size, resize_with_pad

GOLDEN = Path(__file__).parent / "golden"
RESIZE = json.loads((GOLDEN / "resize.json").read_text())


@pytest.fixture(scope="module")
def inputs() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "inputs.safetensors")


@pytest.fixture(scope="module")
def resized() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "resize.safetensors")


def bytes_of(image: torch.Tensor) -> torch.Tensor:
    return torch.round((image.permute(1, 2, 0) + 1) / 2 * 255).to(torch.uint8)


@pytest.mark.parametrize("name", ["odd", "sq225"])
def test_torch_resize_equals_lerobots_bit_for_bit(
    name: str, inputs: dict[str, torch.Tensor], resized: dict[str, torch.Tensor]
) -> None:
    image = resize_with_pad(inputs[f"raw.{name}"].numpy(), 224, "torch")
    assert torch.equal(image, resized[f"lerobot_float.{name}"][0])


@pytest.mark.parametrize(("name", "slot"), [("base", "cam0"), ("left", "cam1"), ("right", "cam2")])
def test_torch_resize_is_within_the_stated_rounding_of_the_formula(
    name: str, slot: str, inputs: dict[str, torch.Tensor]
) -> None:
    image = resize_with_pad(inputs[f"raw.{name}"].numpy(), 224, "torch")
    stated = RESIZE["peer_diff_report"][name]["lerobot vs formula"]
    assert (image - inputs[f"b1.image.{slot}"][0]).abs().max().item() <= stated


@pytest.mark.parametrize("name", ["base", "left", "right", "odd", "sq225"])
def test_pil_resize_equals_openpis_bytes(
    name: str, inputs: dict[str, torch.Tensor], resized: dict[str, torch.Tensor]
) -> None:
    image = resize_with_pad(inputs[f"raw.{name}"].numpy(), 224, "pil")
    assert torch.equal(bytes_of(image), resized[f"openpi_client_pil_uint8.{name}"])


def test_pil_resize_equals_openpis_scaled_image(inputs: dict[str, torch.Tensor]) -> None:
    golden = load_file(GOLDEN / "openpi_e2e.safetensors")["image.cam0"][0]
    assert torch.equal(resize_with_pad(inputs["raw.base"].numpy(), 224, "pil"), golden)


def test_the_kinds_differ_as_the_references_do(inputs: dict[str, torch.Tensor]) -> None:
    frame = inputs["raw.base"].numpy()
    difference = (resize_with_pad(frame, 224, "pil") - resize_with_pad(frame, 224, "torch")).abs()
    stated = RESIZE["peer_diff_report"]["base"]
    assert difference.max().item() == pytest.approx(stated["openpi PIL (after /255*2-1) vs lerobot max"], abs=1e-6)
    assert difference.mean().item() == pytest.approx(stated["...mean"], abs=1e-6)


@pytest.mark.parametrize("kind", ["torch", "pil"])
@pytest.mark.parametrize("row", RESIZE["size_table"], ids=lambda row: "x".join(map(str, row["hw"])))
def test_sizes_and_padding(row: dict, kind: str) -> None:
    height, width = row["hw"]
    assert fitted_size(height, width, 224, 224) == tuple(row["resized"])
    white = resize_with_pad(np.full((height, width, 3), 255, dtype=np.uint8), 224, kind)
    top, bottom, left, right = row["pad_top_bottom_left_right"]
    inner = white[:, top : 224 - bottom, left : 224 - right]
    assert tuple(inner.shape[1:]) == tuple(row["resized"])
    assert (inner == 1).all()
    assert (white == 1).sum() == inner.numel()
    assert (white == -1).sum() == white.numel() - inner.numel()


@settings(max_examples=40, deadline=None)
@given(
    height=st.integers(8, 400),
    width=st.integers(8, 400),
    size=st.sampled_from([56, 224, (84, 112)]),
    seed=st.integers(),
)
def test_any_frame_gives_a_whole_image_in_range(
    height: int, width: int, size: int | tuple[int, int], seed: int
) -> None:
    frame = np.random.default_rng(seed % 2**32).integers(0, 256, (height, width, 3), dtype=np.uint8)
    expected = (3, *((size, size) if isinstance(size, int) else size))
    for kind in ("torch", "pil"):
        image = resize_with_pad(frame, size, kind)
        assert image.shape == expected
        assert image.dtype == torch.float32
        assert image.is_contiguous()
        assert image.abs().max() <= 1


@pytest.mark.parametrize("kind", ["torch", "pil"])
def test_a_frame_of_the_target_size_is_not_resampled(kind: str) -> None:
    frame = np.random.default_rng(0).integers(0, 256, (224, 224, 3), dtype=np.uint8)
    expected = torch.from_numpy(frame).permute(2, 0, 1).float() / 255 * 2 - 1
    assert torch.equal(resize_with_pad(frame, 224, kind), expected)


def test_tall_frames_are_interpolated_as_torch_does() -> None:
    """A frame far larger than the target takes the same values as torch's own interpolation of all of it."""
    for height, width in ((1080, 1920), (1920, 1080), (2160, 3840), (1000, 999)):
        frame = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
        fitted = fitted_size(height, width, 224, 224)
        unit = torch.from_numpy(frame).permute(2, 0, 1).contiguous().float() / 255
        whole = torch.nn.functional.interpolate(unit[None], size=fitted, mode="bilinear", align_corners=False)[0]
        image = resize_with_pad(frame, 224, "torch")
        top, left = (224 - fitted[0]) // 2, (224 - fitted[1]) // 2
        assert torch.equal(image[:, top : top + fitted[0], left : left + fitted[1]], whole.clamp(0, 1) * 2 - 1)


@pytest.mark.parametrize("kind", ["torch", "pil"])
def test_read_only_and_strided_frames(kind: str) -> None:
    frame = np.random.default_rng(1).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    expected = resize_with_pad(frame, 32, kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_only = np.frombuffer(frame.tobytes(), dtype=np.uint8).reshape(frame.shape)
        assert torch.equal(resize_with_pad(read_only, 32, kind), expected)
        bgr = np.ascontiguousarray(frame[:, :, ::-1])
        assert torch.equal(resize_with_pad(bgr[:, :, ::-1], 32, kind), expected)
        padded_rows = np.zeros((48, 70, 3), dtype=np.uint8)
        padded_rows[:, :64] = frame
        assert torch.equal(resize_with_pad(padded_rows[:, :64], 32, kind), expected)


def test_resize_leaves_the_frame_alone_and_shares_nothing() -> None:
    frame = np.full((32, 32, 3), 7, dtype=np.uint8)
    image = resize_with_pad(frame, 32, "torch")
    image.zero_()
    assert (frame == 7).all()


def test_channel_order_is_kept() -> None:
    red = np.zeros((4, 4, 3), dtype=np.uint8)
    red[..., 0] = 255
    image = resize_with_pad(red, 8, "pil")
    assert (image[0] == 1).all() and (image[1:] == -1).all()


def test_too_thin_a_frame_and_an_unknown_kind_are_refused() -> None:
    with pytest.raises(ObservationError, match="1x500") as caught:
        resize_with_pad(np.zeros((1, 500, 3), dtype=np.uint8), 224, "torch")
    assert caught.value.code == "observation.image_shape"
    with pytest.raises(ConfigurationError, match="bicubic"):
        resize_with_pad(np.zeros((9, 9, 3), dtype=np.uint8), 224, "bicubic")  # type: ignore[arg-type]
    with pytest.raises(ObservationError, match="float32"):
        resize_with_pad(np.zeros((9, 9, 3), dtype=np.float32), 224, "torch")


def test_an_absent_camera_is_black() -> None:
    image = absent_image(224)
    assert image.shape == (3, 224, 224) and image.dtype == torch.float32 and (image == -1).all()
    assert absent_image((4, 6)).shape == (3, 4, 6)


HWC = np.random.default_rng(2).integers(0, 256, (48, 64, 3), dtype=np.uint8)
CHW = np.ascontiguousarray(HWC.transpose(2, 0, 1))


@pytest.mark.parametrize("layout", ["hwc", "chw", None])
@pytest.mark.parametrize("frame", [HWC, CHW], ids=["hwc", "chw"])
def test_an_unambiguous_layout_is_accepted_whatever_was_declared(frame: np.ndarray, layout: str | None) -> None:
    out = as_hwc_uint8(frame, layout, "front")  # type: ignore[arg-type]
    assert np.array_equal(out, HWC) and out.flags.c_contiguous


def test_an_ambiguous_layout_follows_the_declaration_and_is_refused_without_one() -> None:
    frame = np.random.default_rng(3).integers(0, 256, (3, 5, 3), dtype=np.uint8)
    assert np.array_equal(as_hwc_uint8(frame, "hwc", "front"), frame)
    assert np.array_equal(as_hwc_uint8(frame, "chw", "front"), frame.transpose(1, 2, 0))
    with pytest.raises(ObservationError, match=r"front.*\[3, 5, 3\].*declare") as caught:
        as_hwc_uint8(frame, None, "front")
    assert caught.value.code == "observation.image_layout"


@pytest.mark.parametrize(
    ("shape", "code"),
    [
        ((48, 64), "image_layout"),
        ((48, 64, 1), "image_layout"),
        ((48, 64, 4), "image_layout"),
        ((4, 48, 64), "image_layout"),
        ((1, 48, 64, 3), "image_layout"),
        ((), "image_layout"),
        ((0, 64, 3), "image_empty"),
        ((48, 0, 3), "image_empty"),
    ],
)
def test_what_is_no_frame_is_refused_with_its_shape(shape: tuple[int, ...], code: str) -> None:
    with pytest.raises(ObservationError) as caught:
        as_hwc_uint8(np.zeros(shape, dtype=np.uint8), "hwc", "wrist_left")
    assert caught.value.code == f"observation.{code}"
    assert "wrist_left" in caught.value.message and str(list(shape)) in caught.value.message


def test_float_frames_need_a_declared_range() -> None:
    with pytest.raises(ObservationError, match="declare") as caught:
        as_hwc_uint8(HWC.astype(np.float32) / 255, "hwc", "front")
    assert caught.value.code == "observation.image_dtype"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [(0.0, 1.0), (-1.0, 1.0), (0.0, 255.0)])
def test_every_byte_survives_a_float_frame(scale: tuple[float, float], dtype: type) -> None:
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, axis=2)
    low, high = scale
    as_float = (levels.astype(dtype) / dtype(255)) * dtype(high - low) + dtype(low)
    assert np.array_equal(as_hwc_uint8(as_float, "hwc", "front", float_range=scale), levels)


def test_truncation_would_lose_bytes() -> None:
    """Why float frames are rounded: the reference's truncation changes bytes that went through [-1, 1]."""
    levels = np.arange(256, dtype=np.uint8)
    as_float = (levels.astype(np.float32) / 127.5 - 1 + 1) / 2
    truncated = (255 * as_float).astype(np.uint8)
    frame = np.broadcast_to(as_float[:, None, None], (256, 4, 3))
    rounded = as_hwc_uint8(frame, "hwc", "front", float_range=(0.0, 1.0))[:, 0, 0]
    assert np.array_equal(rounded, levels)
    assert (truncated != levels).sum() > 50
    assert np.abs(truncated.astype(int) - levels).max() == 1


@pytest.mark.parametrize(
    ("value", "code"),
    [(200.0, "image_range"), (-0.01, "image_range"), (1.001, "image_range"), (np.nan, "image_not_finite"),
     (np.inf, "image_not_finite")],
)  # fmt: skip
def test_floats_outside_the_declared_range_are_refused(value: float, code: str) -> None:
    frame = np.full((8, 8, 3), 0.5, dtype=np.float32)
    frame[3, 4, 1] = value
    with pytest.raises(ObservationError, match="front") as caught:
        as_hwc_uint8(frame, "hwc", "front", float_range=(0.0, 1.0))
    assert caught.value.code == f"observation.{code}"


@pytest.mark.parametrize("dtype", [np.int64, np.uint16, bool, np.int8])
def test_other_pixel_types_are_refused(dtype: type) -> None:
    with pytest.raises(ObservationError, match=np.dtype(dtype).name):
        as_hwc_uint8(HWC.astype(dtype), "hwc", "front", float_range=(0.0, 1.0))
