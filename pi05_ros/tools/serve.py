"""``pi05-ros serve``: the policy on the network, without ROS."""

from __future__ import annotations

import argparse
import gc
import logging
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from pi05_ros.checkpoint.formats import open_checkpoint
from pi05_ros.contract import check_contract
from pi05_ros.engine.scheduler import Scheduler
from pi05_ros.model.precision import resolve_dtype
from pi05_ros.paths import builtin_checkpoint
from pi05_ros.policy import load_policy, resolve_device
from pi05_ros.profile import load_profile
from pi05_ros.serving.app import Server
from pi05_ros.serving.facts import PolicyFacts
from pi05_ros.serving.settings import API_KEY_VARIABLE, ServerSettings, read_api_key


def add_arguments(parser: argparse.ArgumentParser) -> None:
    policy = parser.add_argument_group("policy")
    policy.add_argument("--checkpoint", help="folder or hub id; the small built-in one if not given")
    policy.add_argument("--revision", help="of a hub id")
    policy.add_argument("--assets", help="which assets/<id> of an OpenPI folder holds the statistics")
    policy.add_argument(
        "--profile", default="raw", help="robot: a shipped profile or a YAML file (default: %(default)s)"
    )
    policy.add_argument("--statistics", help="statistics file instead of the checkpoint's")
    policy.add_argument("--normalization", choices=("quantile", "mean_std", "none"))
    policy.add_argument("--tokenizer", help="tokenizer.json or SentencePiece .model instead of the checkpoint's")
    policy.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default: %(default)s)")
    policy.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"))
    policy.add_argument("--engine", help="engine preset or YAML file")
    policy.add_argument(
        "--served-model-name", action="append", default=[], help="what a request may say as model; may be repeated"
    )
    sharing = parser.add_argument_group("sharing")
    sharing.add_argument("--max-group", type=int, default=4, help="requests in one pass (default: %(default)s)")
    sharing.add_argument(
        "--max-wait-ms", type=float, default=0.0, help="patience to fill a group (default: %(default)s)"
    )
    sharing.add_argument("--max-queue", type=int, default=64, help="requests that may wait (default: %(default)s)")
    sharing.add_argument(
        "--timeout", type=float, default=60.0, help="seconds a request may take (default: %(default)s)"
    )
    network = parser.add_argument_group("network")
    network.add_argument("--host", default="127.0.0.1", help="address to bind (default: %(default)s)")
    network.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    network.add_argument("--api-key-file", type=Path, help=f"file with the key; else {API_KEY_VARIABLE}, else no key")
    network.add_argument(
        "--allowed-host", action="append", default=[], help="name that clients may address this server by; repeatable"
    )
    network.add_argument("--tls-certificate", type=Path, help="PEM file")
    network.add_argument("--tls-key", type=Path, help="PEM file")
    network.add_argument("--max-connections", type=int, default=256)
    network.add_argument("--no-page", action="store_true", help="no page for browsers at /")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))


def run(options: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; the address is printed once requests are taken."""
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    settings = ServerSettings(
        host=options.host,
        port=options.port,
        api_key=read_api_key(options.api_key_file),
        allowed_hosts=tuple(options.allowed_host),
        tls_certificate=options.tls_certificate,
        tls_key=options.tls_key,
        timeout_s=options.timeout,
        max_connections=options.max_connections,
        page=not options.no_page,
    )
    source = builtin_checkpoint() if options.checkpoint is None else options.checkpoint
    robot = None if options.profile == "raw" else load_profile(options.profile)
    checkpoint = open_checkpoint(source, options.revision, assets=options.assets, statistics=options.statistics)
    contract = check_contract(robot, checkpoint, options.normalization)
    device = resolve_device(options.device)
    print(contract.table(), flush=True)
    scheduler = Scheduler(
        max_queue=options.max_queue,
        max_group=options.max_group,
        max_wait_ms=options.max_wait_ms,
    )
    facts = PolicyFacts.of(
        contract,
        checkpoint,
        dtype=str(resolve_dtype(options.dtype, device)).removeprefix("torch."),
        device=str(device),
        served_model_names=tuple(options.served_model_name),
    )
    server = Server(facts, scheduler, settings)
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    scheduler.start()
    try:
        server.start()
        print(f"listening on {server.url}, loading {checkpoint.id}", flush=True)
        loading = scheduler.call(lambda: _load_and_warm_up(options, source, scheduler, server, stop))
        while not stop.wait(0.1):
            if loading.done():
                loading.result()
                break
        stop.wait()
    finally:
        server.stop()
        scheduler.stop(2.0)
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def _load_and_warm_up(
    options: argparse.Namespace, source: str | Path, scheduler: Scheduler, server: Server, stop: threading.Event
) -> None:
    """On the inference thread: from here on it alone touches the model."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, transient=True, disable=not sys.stderr.isatty()) as bar:
        policy = load_policy(
            source,
            options.profile,
            options.device,
            options.dtype,
            revision=options.revision,
            assets=options.assets,
            statistics=options.statistics,
            normalization=options.normalization,
            tokenizer=options.tokenizer,
            progress=_progress(bar),
            engine=options.engine,
        )
    engine = policy.engine.settings
    server.describe_engine(
        prefix_cache=engine.prefix_cache_entries > 0,
        cuda_graph=policy.engine.device.type == "cuda" and engine.cuda_graph is not False,
    )
    if stop.is_set():
        return
    policy.warm_up()
    # What has been loaded stays; without this the collector walks over all of it now and then, in the middle of a pass.
    gc.collect()
    gc.freeze()
    scheduler.activate(policy, idle=policy.capture_pending)
    print(f"ready: {server.url}", flush=True)


def _progress(bar: Progress) -> Callable[[int, int], None]:
    task = bar.add_task("weights", total=None)
    return lambda done, total: bar.update(task, completed=done, total=total)
