"""Random checkpoints come out the same everywhere, and the built-in one is one of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoint_folders import GOLDEN, TINY
from safetensors.torch import load_file
from tokenizers import Tokenizer

from pi05_ros.checkpoint.formats import open_checkpoint
from pi05_ros.checkpoint.loader import load_model
from pi05_ros.checkpoint.make import (
    SIZES,
    RobotSide,
    random_statistics,
    random_weight,
    stored_shapes,
    write_builtin,
    write_lerobot,
)
from pi05_ros.checkpoint.small_tokenizer import small_tokenizer
from pi05_ros.cli import main
from pi05_ros.errors import CheckpointError, ConfigurationError
from pi05_ros.model.config import Pi05Config
from pi05_ros.paths import builtin_checkpoint


def test_golden_weights_are_reproduced_bit_for_bit(tmp_path: Path) -> None:
    reference = load_file(GOLDEN / "hub_style_tiny" / "model.safetensors")
    folder = write_lerobot(tmp_path / "c", TINY, tokenizer=False)
    made = load_file(folder / "model.safetensors")
    assert made.keys() == reference.keys()
    for key, value in reference.items():
        assert torch.equal(made[key], value), key


def test_sizes_are_the_references() -> None:
    stated = json.loads((GOLDEN / "sizes.json").read_text())
    for name, config in SIZES.items():
        block = stated[name.upper()]
        widths = {key: block.pop(key) for key in ("action_dim", "horizon", "max_token_len")}
        assert Pi05Config.from_architecture(block, **widths) == config, name


def test_full_size_stores_exactly_the_published_keys() -> None:
    keys = json.loads((GOLDEN / "keys_full.json").read_text())["keys"]
    shapes = stored_shapes(SIZES["full"], "saved")
    assert shapes == {key: tuple(entry["shape"]) for key, entry in keys.items()}
    assert len(shapes) == 813 and len(stored_shapes(SIZES["full"], "hub")) == 812


def test_seeds_and_names_draw_different_weights() -> None:
    first = random_weight("time_mlp_in.weight", (4, 4), 0)
    assert torch.equal(first, random_weight("time_mlp_in.weight", (4, 4), 0))
    assert not torch.equal(first, random_weight("time_mlp_in.weight", (4, 4), 1))
    assert not torch.equal(first, random_weight("time_mlp_out.weight", (4, 4), 0))


def test_builtin_checkpoint_is_what_its_recipe_makes(tmp_path: Path) -> None:
    made, shipped = write_builtin(tmp_path / "c"), builtin_checkpoint()
    names = sorted(file.name for file in shipped.iterdir())
    assert sorted(file.name for file in made.iterdir()) == names
    for name in names:
        assert (made / name).read_bytes() == (shipped / name).read_bytes(), name
    assert sum(file.stat().st_size for file in shipped.iterdir()) < 1_500_000


def test_builtin_checkpoint_fits_the_demo_robot() -> None:
    checkpoint = open_checkpoint(builtin_checkpoint())
    assert checkpoint.cameras == ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
    assert (checkpoint.state_dim, checkpoint.action_dim, checkpoint.config.horizon) == (7, 7, 50)
    assert checkpoint.action_names == (*(f"joint_{i}" for i in range(1, 7)), "gripper")
    assert checkpoint.state_statistics is not None and checkpoint.action_statistics is not None
    assert checkpoint.state_statistics.missing("quantile") == checkpoint.action_statistics.missing("quantile") == ()
    assert checkpoint.tokenizer_path is not None


def test_builtin_checkpoint_keeps_the_demo_arm_within_reach() -> None:
    checkpoint = open_checkpoint(builtin_checkpoint())
    statistics = checkpoint.action_statistics
    assert statistics is not None and statistics.q01 is not None and statistics.q99 is not None
    generator = torch.Generator().manual_seed(0)
    batch = 4
    actions = load_model(checkpoint).sample_actions(
        [torch.rand(batch, 3, 224, 224, generator=generator) * 2 - 1 for _ in checkpoint.cameras],
        [torch.ones(batch, dtype=torch.bool) for _ in checkpoint.cameras],
        torch.randint(4, 512, (batch, 200), generator=generator),
        (torch.arange(200) < 40).expand(batch, -1),
        torch.randn(batch, 50, 32, generator=generator),
        checkpoint.num_steps,
    )
    q01, q99 = torch.from_numpy(statistics.q01), torch.from_numpy(statistics.q99)
    robot = (actions[..., :7] + 1) / 2 * (q99 - q01) + q01
    assert robot[..., :6].abs().max() < 1.5  # rad
    assert robot[..., 6].min() >= 0 and robot[..., 6].max() <= 1
    # It moves: a network whose output died would pass the bounds above.
    assert robot[..., :6].std() > 0.05


class TestTokenizer:
    def test_shape_is_gemmas(self) -> None:
        tokenizer = small_tokenizer()
        assert tokenizer.get_vocab_size() == 512
        assert [tokenizer.id_to_token(i) for i in range(4)] == ["<pad>", "<eos>", "<bos>", "<unk>"]
        encoded = tokenizer.encode("Task: pick up the red block, State: 128 255;\nAction: ")
        assert encoded.ids[0] == 2
        state = ["▁", "1", "2", "8", "▁", "2", "5", "5", ";", "\n"]
        assert encoded.tokens[-len(state) - 2 :] == [*state, "Action:", "▁"]

    @pytest.mark.parametrize("text", ["Task: pick up", "  two  spaces ", "Grüße, 世界 🙂", "\t\n\x00", "a" * 1000, ""])
    def test_every_text_survives(self, text: str) -> None:
        tokenizer = small_tokenizer()
        ids = tokenizer.encode(text).ids
        assert 3 not in ids and max(ids) < 512
        assert tokenizer.decode(ids) == text

    def test_training_is_repeatable_and_what_is_shipped(self) -> None:
        shipped = Tokenizer.from_file(str(builtin_checkpoint() / "tokenizer.json"))
        assert shipped.to_str() == small_tokenizer().to_str() == small_tokenizer().to_str()


class TestCommand:
    def test_lerobot(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        options = (
            "--cameras image,image2 --empty-cameras 1 --state-dim 8 --action-dim 7 --executed-steps 10 --horizon 20"
        )
        options += " --normalization mean_std --spelling saved --max-shard-mb 0.5 --dtype bfloat16 --seed 3"
        options += " --relative"
        assert main(["make-checkpoint", str(tmp_path / "c"), *options.split()]) == 0
        assert "image, image2, empty_camera_0" in capsys.readouterr().out
        checkpoint = open_checkpoint(tmp_path / "c")
        assert (checkpoint.config.horizon, checkpoint.executed_steps) == (20, 10)
        assert checkpoint.action_normalization == "mean_std" and checkpoint.relative_actions is not None
        assert len(checkpoint.weight_files) > 1

    def test_openpi_with_several_assets(self, tmp_path: Path) -> None:
        options = ["--format", "openpi", "--assets", "a,b/c", "--state-dim", "14", "--no-tokenizer"]
        assert main(["make-checkpoint", str(tmp_path / "c"), *options]) == 0
        checkpoint = open_checkpoint(tmp_path / "c", assets="b/c")
        assert checkpoint.state_statistics is not None and checkpoint.state_statistics.width == 14
        assert checkpoint.tokenizer_path is None

    def test_architecture_from_a_file(self, tmp_path: Path) -> None:
        file = GOLDEN / "hub_style_tiny" / "config.json"
        block = json.loads(file.read_text())["architecture"]
        block["vlm"]["depth"] = block["expert"]["depth"] = 3
        (tmp_path / "sizes.json").write_text(json.dumps(block))
        options = ["--architecture", str(tmp_path / "sizes.json"), "--no-statistics"]
        assert main(["make-checkpoint", str(tmp_path / "c"), *options]) == 0
        checkpoint = open_checkpoint(tmp_path / "c")
        assert checkpoint.config.vlm.depth == 3 and checkpoint.state_statistics is None

    def test_builtin(self, tmp_path: Path) -> None:
        assert main(["make-checkpoint", str(tmp_path / "c"), "--builtin"]) == 0
        assert open_checkpoint(tmp_path / "c").fingerprint == open_checkpoint(builtin_checkpoint()).fingerprint

    def test_folder_in_use_is_left_alone(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "mine.txt").write_text("kept")
        assert main(["make-checkpoint", str(tmp_path)]) == 2
        assert "checkpoint.folder_in_use" in capsys.readouterr().err
        assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


def test_impossible_plans_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="8 wide, the state is 7"):
        write_lerobot(tmp_path / "a", TINY, RobotSide(state_dim=7, state_statistics=random_statistics(8, 0)))
    with pytest.raises(ConfigurationError, match="padded width 32"):
        write_lerobot(tmp_path / "b", TINY, RobotSide(state_dim=33))
    with pytest.raises(CheckpointError, match="folder_in_use"):
        write_lerobot(Path(__file__), TINY)
    assert list(tmp_path.iterdir()) == []
