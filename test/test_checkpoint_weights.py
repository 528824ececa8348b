"""Every weight is accounted for: spellings, ties, shards, and what does not fit."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_folders import copy, edit_json, edit_weights, libero_folder
from safetensors.torch import load_file, save_file

from pi05_ros.checkpoint.formats import open_checkpoint
from pi05_ros.checkpoint.keys import EMBEDDING, EXPERT_LM_HEAD, LM_HEAD, canonical_key
from pi05_ros.checkpoint.loader import count_dtypes, load_model, terminal_progress
from pi05_ros.checkpoint.make import SIZES, RobotSide, random_weight, stored_shapes, write_lerobot
from pi05_ros.errors import CheckpointError
from pi05_ros.model.precision import is_float32_parameter

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def libero(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return libero_folder(tmp_path_factory.mktemp("weights") / "libero")


@pytest.fixture(scope="module")
def loaded(libero: Path) -> Weights:
    return dict(load_model(open_checkpoint(libero)).state_dict())


def refusal(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load_model(open_checkpoint(folder))
    return caught.value


def assert_same(folder: Path, expected: Weights) -> None:
    found = load_model(open_checkpoint(folder)).state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def respelled(pattern: str, replacement: str) -> Callable[[Weights], Weights]:
    """Rename every weight that the pattern matches; at least one must."""

    def change(weights: Weights) -> Weights:
        renamed = {re.sub(pattern, replacement, key): value for key, value in weights.items()}
        assert renamed.keys() != weights.keys()
        return renamed

    return change


def test_weights_are_the_drawn_ones(loaded: Weights) -> None:
    for name, value in loaded.items():
        assert torch.equal(value, random_weight(name, value.shape, 0)), name


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (r"^", "model."),
        (r"^time_mlp_", "action_time_mlp_"),
        (r"^time_mlp_", "model.action_time_mlp_"),
        (r"vision_tower\.vision_model\.", "vision_tower."),
        (r"paligemma\.model\.(language_model|vision_tower|multi_modal_projector)", r"paligemma.\1"),
        (r"paligemma\.model\.language_model", "paligemma.language_model.model"),
        (r"paligemma\.model\.vision_tower\.vision_model", "paligemma.vision_tower"),
        (r"^paligemma_with_expert\.paligemma\.lm_head", "paligemma_with_expert.paligemma.language_model.lm_head"),
        (r"paligemma\.lm_head\.weight", "paligemma.model.language_model.embed_tokens.weight"),
    ],
)
def test_every_spelling_loads_the_same(
    libero: Path, loaded: Weights, tmp_path: Path, pattern: str, replacement: str
) -> None:
    folder = copy(libero, tmp_path / "c")
    edit_weights(folder, respelled(pattern, replacement))
    assert_same(folder, loaded)


@pytest.mark.parametrize(
    "extra",
    [
        {"state_proj.weight": torch.ones(48, 32), "state_proj.bias": torch.ones(48)},
        {"paligemma_with_expert.gemma_expert.model.layers.1.input_layernorm.weight": torch.ones(48)},
        {"paligemma_with_expert.gemma_expert.model.layers.0.post_attention_layernorm.weight": torch.ones(48)},
        {"paligemma_with_expert.gemma_expert.model.norm.weight": torch.ones(48)},
        {EMBEDDING: None},
    ],
)
def test_known_surplus_is_left_out(libero: Path, loaded: Weights, tmp_path: Path, extra: Weights) -> None:
    folder = copy(libero, tmp_path / "c")
    edit_weights(
        folder,
        lambda weights: weights.update(
            {key: weights[LM_HEAD].clone() if value is None else value for key, value in extra.items()}
        ),
    )
    assert_same(folder, loaded)


def test_heads_are_not_needed_when_the_embedding_is_stored(libero: Path, loaded: Weights, tmp_path: Path) -> None:
    folder = copy(libero, tmp_path / "c")

    def without_heads(weights: Weights) -> None:
        weights[EMBEDDING] = weights.pop(LM_HEAD)
        del weights[EXPERT_LM_HEAD]

    edit_weights(folder, without_heads)
    assert_same(folder, loaded)


def test_saved_folder_equals_hub_folder(loaded: Weights, tmp_path: Path) -> None:
    folder = libero_folder(tmp_path / "c", spelling="saved")
    keys = load_file(folder / "model.safetensors").keys()
    assert all(key.startswith("model.") for key in keys) and {f"model.{EMBEDDING}", f"model.{LM_HEAD}"} <= set(keys)
    assert_same(folder, loaded)


def test_shards_equal_one_file(loaded: Weights, tmp_path: Path) -> None:
    folder = libero_folder(tmp_path / "c", max_shard_bytes=300_000)
    checkpoint = open_checkpoint(folder)
    assert len(checkpoint.weight_files) >= 4
    assert not (folder / "model.safetensors").exists()
    assert_same(folder, loaded)


def test_statistics_files_are_no_weights(libero: Path) -> None:
    names = {file.name for file in open_checkpoint(libero).weight_files}
    assert len(list(libero.glob("*.safetensors"))) == 3
    assert names == {"model.safetensors"}


def test_missing_weights_are_named(libero: Path, tmp_path: Path) -> None:
    folder = copy(libero, tmp_path / "c")
    gone = [f"paligemma_with_expert.gemma_expert.model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up")]
    edit_weights(folder, lambda weights: [weights.pop(key) for key in gone])
    error = refusal(folder)
    assert error.code == "checkpoint.weights_mismatch"
    assert "2 missing" in error.message and all(key in error.message for key in gone)
    assert error.details["missing"] == [f"{key} [96, 48]" for key in gone]


def test_missing_embedding_without_its_tie_is_named(libero: Path, tmp_path: Path) -> None:
    folder = copy(libero, tmp_path / "c")
    edit_weights(folder, lambda weights: weights.pop(LM_HEAD))
    assert EMBEDDING in refusal(folder).message


def test_unexpected_weights_are_named_five_at_most(libero: Path, tmp_path: Path) -> None:
    folder = copy(libero, tmp_path / "c")
    edit_weights(folder, lambda weights: weights.update({f"surprise_{i}": torch.zeros(1) for i in range(7)}))
    error = refusal(folder)
    assert "7 unexpected" in error.message and "surprise_4 [1]" in error.message
    assert "surprise_5" not in error.message


def test_misshaped_weights_show_both_shapes(libero: Path, tmp_path: Path) -> None:
    folder = copy(libero, tmp_path / "c")
    edit_weights(folder, lambda weights: weights.update({"time_mlp_in.bias": torch.zeros(49)}))
    message = refusal(folder).message
    assert "time_mlp_in.bias: [48] by config.json, [49] in model.safetensors" in message


def test_small_weights_without_sizes_are_measured_against_full_size(libero: Path, tmp_path: Path) -> None:
    folder = copy(libero, tmp_path / "c")
    edit_json(folder / "config.json", lambda content: content.pop("architecture"))
    message = refusal(folder).message
    assert "no `architecture` block" in message
    assert "[1024, 32] by config.json, [48, 32] in model.safetensors" in message


def test_one_weight_under_two_spellings_is_refused(libero: Path, tmp_path: Path) -> None:
    folder = copy(libero, tmp_path / "c")
    edit_weights(folder, lambda weights: weights.update({"model.time_mlp_in.bias": torch.zeros(48)}))
    error = refusal(folder)
    assert error.code == "checkpoint.duplicate_weight"
    assert "model.time_mlp_in.bias" in error.message


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(libero: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    folder = copy(libero, tmp_path / "c")
    edit_weights(folder, lambda weights: weights.update({"time_mlp_in.bias": torch.zeros(48).to(dtype)}))
    assert refusal(folder).code == "checkpoint.unsupported_dtype"


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_dtype_is_the_wanted_one_with_the_float32_set(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    model = load_model(open_checkpoint(libero_folder(tmp_path / "c", dtype=stored)), "cpu", wanted)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if is_float32_parameter(name) else wanted), name
        assert torch.equal(parameter, random_weight(name, parameter.shape, 0).to(stored).to(parameter.dtype)), name
    assert set(count_dtypes(model)) == {str(wanted).removeprefix("torch."), "float32"}
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())


def test_model_outlives_its_files(libero: Path, loaded: Weights, tmp_path: Path) -> None:
    folder = copy(libero, tmp_path / "c")
    model = load_model(open_checkpoint(folder))
    file = folder / "model.safetensors"
    with file.open("r+b") as stream:
        stream.write(b"\xff" * file.stat().st_size)
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded[name]), name
    assert not any(buffer.is_meta for buffer in model.buffers())


def test_loading_does_not_import_the_compiler(libero: Path) -> None:
    program = (
        "import sys\n"
        "from pi05_ros.checkpoint.formats import open_checkpoint\n"
        "from pi05_ros.checkpoint.loader import load_model\n"
        f"load_model(open_checkpoint({str(libero)!r}))\n"
        "print(sorted({'sympy', 'torch._dynamo'} & sys.modules.keys()))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert result.stdout == "[]\n", result.stderr


def test_progress_counts_every_byte_once(libero: Path) -> None:
    calls: list[tuple[int, int]] = []
    model = load_model(open_checkpoint(libero), progress=lambda done, total: calls.append((done, total)))
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert calls[-1][0] == calls[-1][1] == sum(parameter.nbytes for parameter in model.parameters())
    assert len({total for _, total in calls}) == 1


def test_terminal_bar_only_where_asked_or_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal_progress("tiny") as progress:
        assert progress is None
    with terminal_progress("tiny", enabled=True) as progress:
        assert progress is not None
        progress(500, 1000)
    assert "tiny" in capsys.readouterr().err


class TestBrokenFiles:
    @pytest.mark.parametrize("keep", [0, 4, 100, -1])
    def test_cut_short(self, libero: Path, tmp_path: Path, keep: int) -> None:
        folder = copy(libero, tmp_path / "c")
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:keep])
        assert refusal(folder).code == "checkpoint.broken_weights"

    @pytest.mark.parametrize(
        "content",
        [
            b"<!DOCTYPE html><html></html>",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
            (5).to_bytes(8, "little") + b"[1,2]",
            (13).to_bytes(8, "little") + b'{"a": {"b":1}}'[:13],
            (14).to_bytes(8, "little") + b'{"a": {"b":1}}',
            (9).to_bytes(8, "little") + b'{"a": 30}',
            (2**62).to_bytes(8, "little") + b"{}",
        ],
    )
    def test_not_safetensors(self, libero: Path, tmp_path: Path, content: bytes) -> None:
        folder = copy(libero, tmp_path / "c")
        (folder / "model.safetensors").write_bytes(content)
        assert refusal(folder).code == "checkpoint.broken_weights"

    @pytest.mark.parametrize(
        ("change", "code"),
        [
            (lambda c: c["weight_map"].update({"time_mlp_in.bias": "gone.safetensors"}), "missing_file"),
            (lambda c: c["weight_map"].update({"time_mlp_in.bias": "../../etc/passwd"}), "bad_index"),
            (lambda c: c["weight_map"].update({"no_such_weight": next(iter(c["weight_map"].values()))}), "bad_index"),
            (lambda c: c.update(weight_map={}), "bad_index"),
            (lambda c: c.update(weight_map={"time_mlp_in.bias": 3}), "bad_index"),
            (lambda c: c.pop("weight_map"), "bad_index"),
        ],
    )
    def test_index_that_does_not_fit(
        self, tmp_path: Path, change: Callable[[dict[str, dict[str, str]]], object], code: str
    ) -> None:
        folder = libero_folder(tmp_path / "c", max_shard_bytes=600_000)
        edit_json(folder / "model.safetensors.index.json", change)
        assert refusal(folder).code == f"checkpoint.{code}"

    def test_missing_shard(self, tmp_path: Path) -> None:
        folder = libero_folder(tmp_path / "c", max_shard_bytes=600_000)
        shard = open_checkpoint(folder).weight_files[1]
        shard.unlink()
        error = refusal(folder)
        assert error.code == "checkpoint.missing_file" and shard.name in error.message

    def test_index_beside_a_single_file(self, tmp_path: Path) -> None:
        folder = libero_folder(tmp_path / "c", max_shard_bytes=600_000)
        save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
        assert refusal(folder).code == "checkpoint.ambiguous_weights"

    def test_index_is_no_json(self, tmp_path: Path) -> None:
        folder = libero_folder(tmp_path / "c", max_shard_bytes=600_000)
        (folder / "model.safetensors.index.json").write_text("{")
        assert refusal(folder).code == "checkpoint.bad_json"


def test_canonical_names_are_fixed_points() -> None:
    for key in stored_shapes(SIZES["tiny"], "saved"):
        assert canonical_key(key) == (None if key == EXPERT_LM_HEAD else key)


def test_sizes_other_than_the_named_ones(tmp_path: Path) -> None:
    config = replace(SIZES["tiny"], vision=replace(SIZES["tiny"].vision, patch_size=28), action_dim=16, horizon=7)
    robot = RobotSide(state_dim=6, action_dim=6)
    checkpoint = open_checkpoint(write_lerobot(tmp_path / "c", config, robot, tokenizer=False))
    assert checkpoint.config == config
    assert load_model(checkpoint).state_dict()["action_in_proj.weight"].shape == (48, 16)
