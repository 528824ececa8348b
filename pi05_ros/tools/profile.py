"""``pi05-ros profile``: look at robot profiles, and hold one against a checkpoint before any robot is near."""

from __future__ import annotations

import argparse

import yaml

from pi05_ros.checkpoint.formats import open_checkpoint
from pi05_ros.contract import check_contract
from pi05_ros.paths import builtin_checkpoint
from pi05_ros.profile import available_profiles, load_profile

RAW_LINE = "the checkpoint's own names and widths, without a robot"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the sub-command."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("list", help="the profiles that ship with the package")
    show = actions.add_parser("show", help="one profile as it is understood, defaults included")
    show.add_argument("profile", help="name of a shipped profile, or a YAML file")
    check = actions.add_parser("check", help="fit a profile and a checkpoint together; exit status 2 where they do not")
    check.add_argument("profile", help="name of a shipped profile, a YAML file, or raw")
    check.add_argument("--checkpoint", help="folder or hub id (default: the built-in checkpoint)")
    check.add_argument("--revision", help="branch, tag or commit of a hub id")
    check.add_argument("--assets", help="asset id of an OpenPI folder that has several")
    check.add_argument("--statistics", help="statistics file that replaces the checkpoint's")
    check.add_argument("--normalization", choices=("quantile", "mean_std", "none"), help="overrides both sides")


def run(args: argparse.Namespace) -> int:
    """Print what was asked for; a mismatch is raised as ContractError."""
    if args.action == "list":
        for name in available_profiles():
            print(f"{name:16} {RAW_LINE if name == 'raw' else load_profile(name).description}")
        return 0
    if args.action == "show":
        content = load_profile(args.profile).model_dump(mode="json", exclude_none=True)
        print(yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=120).rstrip())
        return 0
    source = builtin_checkpoint() if args.checkpoint is None else args.checkpoint
    checkpoint = open_checkpoint(source, args.revision, assets=args.assets, statistics=args.statistics)
    profile = None if args.profile == "raw" else load_profile(args.profile)
    print(check_contract(profile, checkpoint, args.normalization).table())
    return 0
