"""What a folder says about itself, and which folders are refused by name."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_folders import LIBERO, TINY, copy, edit_json, edit_weights, libero_folder, openpi_folder, pipeline_step
from safetensors.torch import save_file

from pi05_ros.checkpoint.formats import open_checkpoint
from pi05_ros.checkpoint.make import RobotSide, random_statistics, write_lerobot, write_openpi
from pi05_ros.errors import CheckpointError
from pi05_ros.model.config import Pi05Config


@pytest.fixture(scope="module")
def libero(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return libero_folder(tmp_path_factory.mktemp("lerobot") / "libero")


@pytest.fixture(scope="module")
def openpi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return openpi_folder(tmp_path_factory.mktemp("openpi") / "trossen")


def refusal(source: Path | str, **options: str) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(source, **options)
    return caught.value


class TestLeRobot:
    def test_libero_says_everything_about_itself(self, libero: Path) -> None:
        checkpoint = open_checkpoint(libero)
        assert (checkpoint.format, checkpoint.id, checkpoint.revision) == ("lerobot", "libero", None)
        assert checkpoint.config == TINY
        assert checkpoint.cameras == ("image", "image2", "empty_camera_0")
        assert checkpoint.empty_cameras == ("empty_camera_0",)
        assert (checkpoint.state_dim, checkpoint.action_dim) == (8, 7)
        assert (checkpoint.num_steps, checkpoint.executed_steps) == (10, 10)
        assert checkpoint.state_in_prompt is True
        assert (checkpoint.resize, checkpoint.absent_camera_order) == ("torch", "last")
        assert (checkpoint.state_normalization, checkpoint.action_normalization) == ("quantile", "quantile")
        assert checkpoint.normalization_style == "lerobot"
        assert checkpoint.relative_actions is None
        assert checkpoint.tokenizer_path is None
        assert checkpoint.weight_files == (libero.resolve() / "model.safetensors",)
        assert checkpoint.state_statistics is not None and LIBERO.state_statistics is not None
        assert checkpoint.action_statistics is not None and LIBERO.action_statistics is not None
        np.testing.assert_array_equal(checkpoint.state_statistics.q01, LIBERO.state_statistics.q01)
        np.testing.assert_array_equal(checkpoint.action_statistics.q99, LIBERO.action_statistics.q99)

    def test_base_has_no_statistics(self, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(write_lerobot(tmp_path / "base", TINY))
        assert checkpoint.cameras == ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
        assert checkpoint.empty_cameras == ()
        assert (checkpoint.state_dim, checkpoint.action_dim) == (32, 32)
        assert checkpoint.state_statistics is None and checkpoint.action_statistics is None
        assert checkpoint.state_normalization == "quantile"
        assert checkpoint.tokenizer_path == (tmp_path / "base" / "tokenizer.json").resolve()

    def test_empty_camera_that_is_not_listed_is_appended(self, libero: Path, tmp_path: Path) -> None:
        folder = copy(libero, tmp_path / "c")
        edit_json(folder / "config.json", lambda c: c["input_features"].pop("observation.images.empty_camera_0"))
        assert open_checkpoint(folder).cameras == ("image", "image2", "empty_camera_0")

    def test_no_architecture_means_the_published_size(self, libero: Path, tmp_path: Path) -> None:
        folder = copy(libero, tmp_path / "c")
        edit_json(folder / "config.json", lambda c: c.pop("architecture"))
        checkpoint = open_checkpoint(folder)
        assert checkpoint.config == Pi05Config.full()
        assert checkpoint.full_size_assumed

    def test_pipeline_decides_the_normalization_where_config_differs(self, libero: Path, tmp_path: Path) -> None:
        folder = copy(libero, tmp_path / "c")
        kinds = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
        pipeline_step(folder, "preprocessor", "normalizer_processor", lambda s: s["config"].update(norm_map=kinds))
        pipeline_step(folder, "postprocessor", "unnormalizer_processor", lambda s: s["config"].update(norm_map=kinds))
        checkpoint = open_checkpoint(folder)
        assert (checkpoint.state_normalization, checkpoint.action_normalization) == ("mean_std", "mean_std")

    def test_kind_stays_as_stated_when_its_statistics_are_missing(self, tmp_path: Path) -> None:
        robot = replace(LIBERO, state_statistics=random_statistics(8, 1, "mean_std"))
        checkpoint = open_checkpoint(write_lerobot(tmp_path / "c", TINY, robot, tokenizer=False))
        assert checkpoint.state_normalization == "quantile"
        assert checkpoint.state_statistics is not None
        assert checkpoint.state_statistics.missing("quantile") == ("q01", "q99")
        assert checkpoint.state_statistics.missing("mean_std") == ()

    def test_feature_that_the_pipeline_does_not_list_is_left_alone(self, libero: Path, tmp_path: Path) -> None:
        folder = copy(libero, tmp_path / "c")
        pipeline_step(
            folder,
            "preprocessor",
            "normalizer_processor",
            lambda s: s["config"]["features"].pop("observation.state"),
        )
        assert open_checkpoint(folder).state_normalization == "identity"

    def test_folder_without_pipelines_follows_config_and_has_no_statistics(self, libero: Path, tmp_path: Path) -> None:
        folder = copy(libero, tmp_path / "c")
        for file in folder.glob("policy_*"):
            file.unlink()
        edit_json(folder / "config.json", lambda c: c["normalization_mapping"].update(ACTION="MEAN_STD"))
        checkpoint = open_checkpoint(folder)
        assert (checkpoint.state_normalization, checkpoint.action_normalization) == ("quantile", "mean_std")
        assert checkpoint.state_statistics is None and checkpoint.action_statistics is None

    def test_relative_actions_keep_grippers_absolute(self, tmp_path: Path) -> None:
        names = ("x", "y", "z", "roll", "pitch", "yaw", "Left_Gripper")
        robot = replace(LIBERO, relative_actions=True, action_names=names)
        checkpoint = open_checkpoint(write_lerobot(tmp_path / "c", TINY, robot, tokenizer=False))
        assert checkpoint.relative_actions is not None
        assert checkpoint.relative_actions.mask == (True,) * 6 + (False,)
        assert checkpoint.action_names == names
        assert checkpoint.notes == ()

    def test_relative_actions_without_names_are_all_relative_and_said_so(self, tmp_path: Path) -> None:
        robot = replace(LIBERO, relative_actions=True)
        checkpoint = open_checkpoint(write_lerobot(tmp_path / "c", TINY, robot, tokenizer=False))
        assert checkpoint.relative_actions is not None and checkpoint.relative_actions.mask == (True,) * 7
        assert "gripper" in checkpoint.notes[0]

    def test_rename_map_gives_aliases(self, tmp_path: Path) -> None:
        renames = (("observation.images.front", "observation.images.image"),)
        folder = write_lerobot(tmp_path / "c", TINY, replace(LIBERO, rename_map=renames), tokenizer=False)
        assert open_checkpoint(folder).camera_aliases == {"front": "image"}

    def test_rename_map_to_an_unknown_camera_is_refused(self, tmp_path: Path) -> None:
        renames = (("observation.images.front", "observation.images.top"),)
        folder = write_lerobot(tmp_path / "c", TINY, replace(LIBERO, rename_map=renames), tokenizer=False)
        error = refusal(folder)
        assert error.code == "checkpoint.inconsistent"
        assert "top" in error.message and "image2" in error.message

    @pytest.mark.parametrize(
        ("pipeline", "step", "change", "code"),
        [
            ("preprocessor", "normalizer_processor", {"state_file": "gone.safetensors"}, "missing_file"),
            ("preprocessor", "normalizer_processor", {"state_file": "../gone.safetensors"}, "bad_config"),
            ("postprocessor", "absolute_actions_processor", {"config": {"enabled": True}}, "inconsistent"),
            ("preprocessor", "device_processor", {"registry_name": "swap_arms_processor"}, "unknown_processor"),
            ("postprocessor", "device_processor", {"registry_name": "clip_actions_processor"}, "unknown_processor"),
            ("preprocessor", "tokenizer_processor", {"config": {"padding_side": "left"}}, "unsupported"),
            (
                "preprocessor",
                "pi05_prepare_state_tokenizer_processor_step",
                {"config": {"include_state_in_prompt": False}},
                "unsupported",
            ),
            ("preprocessor", "normalizer_processor", {"registry_name": "to_batch_processor"}, "unsupported"),
            ("postprocessor", "unnormalizer_processor", {"registry_name": "to_batch_processor"}, "bad_config"),
            ("postprocessor", "unnormalizer_processor", {"config": "nothing"}, "bad_config"),
        ],
    )
    def test_pipelines_that_would_compute_something_else_are_refused(
        self, libero: Path, tmp_path: Path, pipeline: str, step: str, change: dict[str, object], code: str
    ) -> None:
        folder = copy(libero, tmp_path / "c")
        pipeline_step(folder, pipeline, step, lambda entry: entry.update(change))
        assert refusal(folder).code == f"checkpoint.{code}"

    @pytest.mark.parametrize("kind", ["MIN_MAX", "QUANTILE10"])
    def test_other_normalizations_are_refused_by_name(self, libero: Path, tmp_path: Path, kind: str) -> None:
        folder = copy(libero, tmp_path / "c")
        pipeline_step(
            folder, "postprocessor", "unnormalizer_processor", lambda s: s["config"]["norm_map"].update(ACTION=kind)
        )
        error = refusal(folder)
        assert error.code == "checkpoint.unsupported" and kind in error.message

    @pytest.mark.parametrize(
        ("change", "code"),
        [
            ({"chunk_size": "many"}, "bad_config"),
            ({"n_action_steps": 51}, "bad_config"),
            ({"n_obs_steps": 2}, "unsupported"),
            ({"input_features": {}}, "bad_config"),
            ({"image_resolution": [256, 256]}, "inconsistent"),
            ({"output_features": {"action": {"type": "ACTION", "shape": [33]}}}, "bad_config"),
            ({"output_features": {"action": {"type": "ACTION", "shape": [6]}}}, "bad_statistics"),
            ({"architecture": {"vlm": {}}}, "bad_config"),
            ({"architecture": 3}, "bad_config"),
            ({"architecture": None, "paligemma_variant": "gemma_2b_lora"}, "unsupported_variant"),
            ({"min_period": float("nan")}, "bad_config"),
            ({"empty_cameras": -1}, "bad_config"),
        ],
    )
    def test_bad_configurations_are_refused(
        self, libero: Path, tmp_path: Path, change: dict[str, object], code: str
    ) -> None:
        folder = copy(libero, tmp_path / "c")
        edit_json(folder / "config.json", lambda content: content.update(change))
        assert refusal(folder).code == f"checkpoint.{code}"

    def test_one_pipeline_alone_is_refused(self, libero: Path, tmp_path: Path) -> None:
        folder = copy(libero, tmp_path / "c")
        (folder / "policy_postprocessor.json").unlink()
        assert refusal(folder).code == "checkpoint.missing_file"

    def test_asset_id_fits_openpi_only(self, libero: Path) -> None:
        assert refusal(libero, assets="trossen").code == "checkpoint.not_this_format"

    def test_given_statistics_replace_its_own(self, libero: Path, openpi: Path) -> None:
        file = openpi / "assets" / "robot" / "norm_stats.json"
        checkpoint = open_checkpoint(libero, statistics=file)
        assert checkpoint.state_statistics is not None
        assert checkpoint.state_statistics.q01 is not None and checkpoint.state_statistics.q01.dtype == np.float64


class TestOpenPI:
    def test_converted_folder(self, openpi: Path) -> None:
        checkpoint = open_checkpoint(openpi)
        assert (checkpoint.format, checkpoint.assets) == ("openpi", "robot")
        assert checkpoint.config == TINY
        assert checkpoint.cameras == ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
        assert (checkpoint.state_dim, checkpoint.action_dim) == (32, 32)
        assert (checkpoint.num_steps, checkpoint.executed_steps, checkpoint.state_in_prompt) == (10, None, None)
        assert (checkpoint.resize, checkpoint.absent_camera_order) == ("pil", "in_place")
        assert (checkpoint.state_normalization, checkpoint.normalization_style) == ("quantile", "openpi")
        assert checkpoint.state_statistics is not None and checkpoint.state_statistics.width == 8
        assert checkpoint.action_statistics is not None and checkpoint.action_statistics.width == 7

    def test_horizon_comes_from_config(self, openpi: Path, tmp_path: Path) -> None:
        folder = copy(openpi, tmp_path / "c")
        edit_json(folder / "config.json", lambda content: content.update(action_horizon=15))
        assert open_checkpoint(folder).config.horizon == 15

    def test_without_config_it_is_full_size_and_says_what_it_assumes(self, openpi: Path, tmp_path: Path) -> None:
        folder = copy(openpi, tmp_path / "c")
        (folder / "config.json").unlink()
        checkpoint = open_checkpoint(folder)
        assert checkpoint.config == Pi05Config.full() and checkpoint.full_size_assumed
        assert any("horizon 50" in note for note in checkpoint.notes)

    def test_several_assets_must_be_chosen_from(self, tmp_path: Path) -> None:
        folder = openpi_folder(tmp_path / "c", assets=("trossen", "physical-intelligence/libero"))
        error = refusal(folder)
        assert error.code == "checkpoint.choose_assets"
        assert error.details == {"assets": ["physical-intelligence/libero", "trossen"]}
        assert open_checkpoint(folder, assets="trossen").assets == "trossen"
        chosen = open_checkpoint(folder, assets="physical-intelligence/libero")
        assert chosen.state_statistics is not None
        missing = refusal(folder, assets="droid")
        assert missing.code == "checkpoint.unknown_assets" and "trossen" in missing.message

    def test_no_assets_means_no_statistics(self, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(write_openpi(tmp_path / "c", TINY, RobotSide(), tokenizer=False))
        assert checkpoint.state_statistics is None and checkpoint.assets is None

    def test_pi0_weights_are_refused_by_name(self, openpi: Path, tmp_path: Path) -> None:
        folder = copy(openpi, tmp_path / "c")

        def to_pi0(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            weights["state_proj.weight"] = torch.zeros(48, 32)
            return {key: value for key, value in weights.items() if ".dense." not in key}

        edit_weights(folder, to_pi0)
        error = refusal(folder)
        assert error.code == "checkpoint.wrong_type" and "Pi0" in error.message

    def test_weights_of_something_else_are_refused(self, tmp_path: Path) -> None:
        save_file({"encoder.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
        error = refusal(tmp_path)
        assert error.code == "checkpoint.unknown_format" and "encoder.weight" in error.message

    @pytest.mark.parametrize("value", [0, -1, "32", 32.0, True])
    def test_bad_width(self, openpi: Path, tmp_path: Path, value: object) -> None:
        folder = copy(openpi, tmp_path / "c")
        edit_json(folder / "config.json", lambda content: content.update(action_dim=value))
        assert refusal(folder).code == "checkpoint.bad_config"


class TestRefusedKinds:
    @pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
    def test_peft_adapter(self, libero: Path, tmp_path: Path, name: str) -> None:
        folder = copy(libero, tmp_path / "c")
        (folder / name).write_text("{}")
        error = refusal(folder)
        assert error.code == "checkpoint.peft_adapter" and "merge_and_unload" in error.message

    @pytest.mark.parametrize("mark", ["params/_METADATA", "params/manifest.ocdbt", "_CHECKPOINT_METADATA"])
    def test_orbax(self, tmp_path: Path, mark: str) -> None:
        (tmp_path / mark).parent.mkdir(exist_ok=True)
        (tmp_path / mark).write_text("{}")
        error = refusal(tmp_path)
        assert error.code == "checkpoint.orbax" and "convert_jax_model_to_pytorch.py" in error.message

    def test_pickle(self, tmp_path: Path) -> None:
        (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
        assert refusal(tmp_path).code == "checkpoint.pickle"

    @pytest.mark.parametrize("kind", ["pi0", "act", "smolvla", None])
    def test_other_policies(self, libero: Path, tmp_path: Path, kind: str | None) -> None:
        folder = copy(libero, tmp_path / "c")
        edit_json(folder / "config.json", lambda content: content.update(type=kind))
        error = refusal(folder)
        assert error.code == "checkpoint.wrong_type" and repr(kind) in error.message

    def test_transformers_model(self, libero: Path, tmp_path: Path) -> None:
        folder = copy(libero, tmp_path / "c")
        (folder / "config.json").write_text('{"model_type": "paligemma"}')
        assert refusal(folder).code == "checkpoint.wrong_type"

    def test_unknown_config(self, libero: Path, tmp_path: Path) -> None:
        folder = copy(libero, tmp_path / "c")
        (folder / "config.json").write_text('{"hidden": 3}')
        error = refusal(folder)
        assert error.code == "checkpoint.unknown_format" and "hidden" in error.message

    def test_lerobot_without_config(self, libero: Path, tmp_path: Path) -> None:
        folder = copy(libero, tmp_path / "c")
        (folder / "config.json").unlink()
        assert refusal(folder).code == "checkpoint.missing_file"

    def test_empty_folder_names_what_was_looked_for(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("")
        error = refusal(tmp_path)
        assert error.code == "checkpoint.unknown_format"
        assert all(word in error.message for word in ("model.safetensors", "norm_stats.json", "notes.txt"))

    def test_training_output_points_to_its_inner_folder(self, libero: Path, tmp_path: Path) -> None:
        copy(libero, tmp_path / "pretrained_model")
        assert str(tmp_path / "pretrained_model") in refusal(tmp_path).message

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"type": ' + "[" * 100_000, "\udcff"])
    def test_broken_json(self, libero: Path, tmp_path: Path, content: str) -> None:
        folder = copy(libero, tmp_path / "c")
        (folder / "config.json").write_bytes(content.encode(errors="surrogateescape"))
        assert refusal(folder).code == "checkpoint.bad_json"

    def test_several_unknown_tokenizers(self, libero: Path, tmp_path: Path) -> None:
        folder = copy(libero, tmp_path / "c")
        for name in ("a.model", "b.model"):
            (folder / name).write_bytes(b"")
        assert refusal(folder).code == "checkpoint.ambiguous_tokenizer"


class TestSources:
    def test_missing_path(self, tmp_path: Path) -> None:
        assert refusal(tmp_path / "nowhere").code == "checkpoint.not_found"

    def test_file_instead_of_folder(self, libero: Path) -> None:
        assert refusal(libero / "model.safetensors").code == "checkpoint.not_a_folder"

    def test_revision_of_a_local_folder(self, libero: Path) -> None:
        assert refusal(libero, revision="main").code == "checkpoint.revision_of_a_path"

    def test_copies_share_a_fingerprint_and_fine_tunes_do_not(self, libero: Path, tmp_path: Path) -> None:
        original = open_checkpoint(libero)
        assert open_checkpoint(copy(libero, tmp_path / "copy")).fingerprint == original.fingerprint
        tuned = libero_folder(tmp_path / "tuned", seed=1)
        sizes = [(path / "model.safetensors").stat().st_size for path in (libero, tuned)]
        assert sizes[0] == sizes[1]
        assert open_checkpoint(tuned).fingerprint != original.fingerprint
        other_statistics = copy(libero, tmp_path / "statistics")
        state_file = next(other_statistics.glob("policy_preprocessor_step*"))
        state_file.write_bytes(state_file.read_bytes()[:-1] + b"\x01")
        assert open_checkpoint(other_statistics).fingerprint != original.fingerprint

    def test_hub_id_from_the_offline_cache(self, libero: Path, tmp_path: Path) -> None:
        commit = "0123456789abcdef0123456789abcdef01234567"
        model = tmp_path / "hub" / "models--acme--pi05_tiny"
        copy(libero, model / "snapshots" / commit)
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text(commit)
        # A process of its own: the library reads its environment once, when it is imported.
        program = (
            "from pi05_ros.checkpoint.formats import open_checkpoint\n"
            "from pi05_ros.errors import CheckpointError\n"
            "for revision in (None, 'main', '" + commit + "'):\n"
            "    checkpoint = open_checkpoint('acme/pi05_tiny', revision)\n"
            "    print(checkpoint.id, checkpoint.revision, checkpoint.cameras[0])\n"
            "for source, revision in (('acme/other', None), ('acme/pi05_tiny', 'v9')):\n"
            "    try:\n"
            "        open_checkpoint(source, revision)\n"
            "    except CheckpointError as error:\n"
            "        print(error.code)\n"
        )
        environment = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
        result = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines() == [f"acme/pi05_tiny {commit} image"] * 3 + ["checkpoint.hub"] * 2
