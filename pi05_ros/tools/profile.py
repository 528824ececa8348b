"""``pi05-ros profile``: robot profiles, held against checkpoints and live graphs; first drafts of new ones."""

from __future__ import annotations

import argparse
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pi05_ros.checkpoint.description import Checkpoint
from pi05_ros.checkpoint.formats import open_checkpoint
from pi05_ros.contract import check_contract
from pi05_ros.errors import ConfigurationError, ContractError
from pi05_ros.paths import builtin_checkpoint
from pi05_ros.profile import available_profiles, load_profile, open_questions
from pi05_ros.synchronizer import SyncSettings
from pi05_ros.tools.live_check import compare, inputs_seen
from pi05_ros.tools.profile_draft import draft_profile, write_draft

RAW_LINE = "the checkpoint's own names and widths, without a robot"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the sub-command."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("list", help="the profiles that ship with the package")
    show = actions.add_parser("show", help="one profile as it is understood, defaults included")
    show.add_argument("profile", help="name of a shipped profile, or a YAML file")
    check = actions.add_parser(
        "check", help="hold a profile against a checkpoint or a live graph; exit status 2 where they do not fit"
    )
    check.add_argument("profile", help="name of a shipped profile, a YAML file, or raw")
    check.add_argument("--normalization", choices=("quantile", "mean_std", "none"), help="overrides both sides")
    check.add_argument("--live", action="store_true", help="against the live graph, and a checkpoint only if given")
    check.add_argument(
        "--stamp-source", choices=("header", "receive"), default="header", help="the node's sync.stamp_source"
    )
    check.add_argument(
        "--qos", action="append", default=[], metavar="TOPIC:POLICIES", help="an entry of the node's parameter qos"
    )
    new = actions.add_parser(
        "new", help="draft a profile from the live graph and a checkpoint; what nobody can know stays a question"
    )
    new.add_argument("file", type=Path, help="YAML file to write; one that exists is left alone")
    new.add_argument("--name", help="name of the robot (default: the file's)")
    for command in (check, new):
        command.add_argument("--checkpoint", help="folder or hub id (default: the built-in checkpoint)")
        command.add_argument("--revision", help="branch, tag or commit of a hub id")
        command.add_argument("--assets", help="asset id of an OpenPI folder that has several")
        command.add_argument("--statistics", help="statistics file that replaces the checkpoint's")
        command.add_argument("--seconds", type=float, default=3.0, help="how long to listen (default: %(default)g)")
        command.add_argument("--namespace", default="", help="namespace of the policy node")
        command.add_argument(
            "--ros-args", nargs=argparse.REMAINDER, default=[], metavar="...", help="passed to ROS: -r, -p, ..."
        )


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
    if not 0.0 < args.seconds <= 600.0:
        raise ConfigurationError("seconds", f"--seconds: more than 0 and at most 600 expected, got {args.seconds:g}")
    if args.action == "new":
        return _new(args)
    if not args.live or args.checkpoint is not None:
        profile = None if args.profile == "raw" else load_profile(args.profile)
        print(check_contract(profile, _checkpoint(args), args.normalization).table())
    if args.live:
        _check_live(args)
    return 0


def _checkpoint(args: argparse.Namespace) -> Checkpoint:
    source = builtin_checkpoint() if args.checkpoint is None else args.checkpoint
    return open_checkpoint(source, args.revision, assets=args.assets, statistics=args.statistics)


def _new(args: argparse.Namespace) -> int:
    # Imported here, as below: everything else works without ROS.
    from pi05_ros.node.graph import listening_node, survey

    if args.file.suffix not in (".yaml", ".yml"):
        raise ConfigurationError("file", f"a .yaml file is expected, got {args.file}")
    if args.file.exists():
        raise ConfigurationError("file", f"{args.file} exists and is left alone; give another name")
    checkpoint = _checkpoint(args)
    with listening_node(args.namespace, args.ros_args) as node:
        seen = survey(node, args.seconds)
    content = draft_profile(args.name or args.file.stem, seen, checkpoint)
    args.file.write_text(write_draft(content, seen, checkpoint), encoding="utf-8")
    questions = sum(1 for _ in open_questions(content))
    print(f"{args.file}: a draft with {questions} open questions; it loads once each of them is answered")
    return 0


def _check_live(args: argparse.Namespace) -> None:
    from pi05_ros.node.graph import listening_node, resolved, survey

    if args.profile == "raw":
        raise ConfigurationError("no_topics", "a profile with topics is expected, and `raw` has none")
    profile = load_profile(args.profile)
    settings = SyncSettings(stamp_source=args.stamp_source)
    with listening_node(args.namespace, args.ros_args) as node:
        seen = survey(node, args.seconds, profile, settings, args.qos)
        names = resolved(node, profile)
    table = Table("input", "topic", "what came", "rate", box=None, padding=(0, 2, 0, 0))
    for row in inputs_seen(profile, seen, names):
        table.add_row(*(Text(text) for text in row))
    Console(width=160, highlight=False).print(table)
    findings = compare(profile, seen, names, settings)
    notes = [finding for finding in findings if finding.level == "note"]
    errors = [finding for finding in findings if finding.level == "error"]
    for note in notes:
        print(f"note: {note.subject}: {note.sentence}")
    if errors:
        raise ContractError(
            "graph",
            f"profile {profile.name} and the live graph do not fit:\n"
            + "\n".join(f"  {error.subject}: {error.sentence}" for error in errors),
            {"problems": [f"{error.subject}: {error.sentence}" for error in errors]},
        )
    print(f"profile {profile.name} fits the live graph: {seen.observations} observations in {seen.seconds:g} s")
