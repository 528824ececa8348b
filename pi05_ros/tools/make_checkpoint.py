"""``pi05-ros make-checkpoint``: write a random checkpoint in a real format."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from pi05_ros.checkpoint.formats import open_checkpoint
from pi05_ros.checkpoint.make import SIZES, RobotSide, random_statistics, write_builtin, write_lerobot, write_openpi
from pi05_ros.checkpoint.statistics import Statistics
from pi05_ros.errors import ConfigurationError
from pi05_ros.model.config import Pi05Config

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to the sub-command's parser."""
    parser.add_argument("folder", type=Path, help="where to write; must not exist or be empty")
    parser.add_argument(
        "--builtin", action="store_true", help="write the package's built-in checkpoint; no other options"
    )
    parser.add_argument("--format", choices=("lerobot", "openpi"), default="lerobot")
    parser.add_argument(
        "--size", choices=sorted(SIZES), default="tiny", help="full has the published 3.6 billion weights"
    )
    parser.add_argument("--architecture", type=Path, help="JSON with vlm, expert, vision and vocab instead of --size")
    parser.add_argument("--seed", type=int, default=0, help="same size and seed: same weights, bit for bit")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="float32")
    parser.add_argument("--cameras", default=",".join(RobotSide.cameras), help="LeRobot camera names, comma-separated")
    parser.add_argument("--empty-cameras", type=int, default=0)
    parser.add_argument("--state-dim", type=int, default=32)
    parser.add_argument("--action-dim", type=int, default=32)
    parser.add_argument("--action-names", help="comma-separated names of the action dimensions")
    parser.add_argument("--horizon", type=int, default=50)
    parser.add_argument("--executed-steps", type=int)
    parser.add_argument("--num-steps", type=int, default=10, help="denoise steps")
    parser.add_argument("--normalization", choices=("quantile", "mean_std", "identity"), default="quantile")
    parser.add_argument("--relative", action="store_true", help="actions relative to the state, grippers absolute")
    parser.add_argument("--no-statistics", action="store_true", help="as the public base checkpoint")
    parser.add_argument("--no-tokenizer", action="store_true")
    parser.add_argument("--spelling", choices=("hub", "saved"), default="hub", help="how LeRobot weights are named")
    parser.add_argument("--max-shard-mb", type=float, help="split the weights into shards of at most this many MB")
    parser.add_argument("--assets", default="robot", help="OpenPI asset ids, comma-separated")


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint and print what it says about itself."""
    if args.builtin:
        write_builtin(args.folder)
    else:
        _write(args)
    checkpoint = open_checkpoint(args.folder, assets=args.assets.split(",")[0] if _has_assets(args) else None)
    size = sum(file.stat().st_size for file in checkpoint.weight_files)
    print(
        f"{args.folder}: {checkpoint.format}, {size / 1e6:.1f} MB of weights, fingerprint {checkpoint.fingerprint[:16]}"
    )
    print(f"cameras {', '.join(checkpoint.cameras)}; state {checkpoint.state_dim}, action {checkpoint.action_dim}")
    return 0


def _has_assets(args: argparse.Namespace) -> bool:
    return args.format == "openpi" and not args.no_statistics and not args.builtin


def _write(args: argparse.Namespace) -> None:
    if args.architecture is None:
        sizes = SIZES[args.size]
    else:
        try:
            sizes = Pi05Config.from_architecture(json.loads(args.architecture.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigurationError("architecture", f"{args.architecture} cannot be used: {error}") from error
    config = replace(sizes, horizon=args.horizon)

    def statistics(width: int) -> Statistics | None:
        return None if args.no_statistics else random_statistics(width, args.seed, args.normalization)

    robot = RobotSide(
        cameras=tuple(args.cameras.split(",")),
        empty_cameras=args.empty_cameras,
        state_dim=args.state_dim,
        action_dim=args.action_dim,
        executed_steps=args.executed_steps,
        num_steps=args.num_steps,
        normalization=args.normalization,
        action_names=None if args.action_names is None else tuple(args.action_names.split(",")),
        relative_actions=args.relative,
        state_statistics=statistics(args.state_dim),
        action_statistics=statistics(args.action_dim),
    )
    shard = None if args.max_shard_mb is None else int(args.max_shard_mb * 1e6)
    tokenizer = not args.no_tokenizer
    if args.format == "lerobot":
        write_lerobot(
            args.folder,
            config,
            robot,
            seed=args.seed,
            dtype=_DTYPES[args.dtype],
            spelling=args.spelling,
            max_shard_bytes=shard,
            tokenizer=tokenizer,
        )
    else:
        write_openpi(
            args.folder,
            config,
            robot,
            seed=args.seed,
            dtype=_DTYPES[args.dtype],
            assets=args.assets.split(","),
            max_shard_bytes=shard,
            tokenizer=tokenizer,
        )
