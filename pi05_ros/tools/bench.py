"""``pi05-ros bench``: time and actions of the engine, beside a reference implementation or through a network door."""

from __future__ import annotations

import argparse
import json
import platform
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pi05_ros.checkpoint.loader import empty_model
from pi05_ros.checkpoint.make import SIZES, random_weight
from pi05_ros.engine.engine import Engine, InferenceOptions, ModelInputs
from pi05_ros.engine.settings import EngineSettings, load_preset
from pi05_ros.errors import ConfigurationError
from pi05_ros.model.config import GemmaConfig, Pi05Config, VisionConfig
from pi05_ros.model.pi05 import Pi05
from pi05_ros.model.precision import parameter_dtype, resolve_dtype
from pi05_ros.policy import resolve_device
from pi05_ros.tools.peers import PEERS, Sampler
from pi05_ros.tools.roofline import stages

# 18 layers of little width: what is saved by leaving one of two layers out saves little here.
NARROW = Pi05Config(
    vlm=GemmaConfig(width=256, depth=18, mlp_dim=1024, num_heads=8, num_kv_heads=1, head_dim=32),
    expert=GemmaConfig(width=128, depth=18, mlp_dim=512, num_heads=8, num_kv_heads=1, head_dim=32),
    vision=VisionConfig(144, 18, 4, 576, 14, 224),
    vocab=4096,
)
BENCH_SIZES = {**SIZES, "narrow": NARROW}
_PERCENTILES = (50, 90, 95, 99)


@dataclass
class Side:
    """One of the two that are compared: ``run`` gives actions [B, H, D] of what was prepared last."""

    name: str
    run: Callable[[], Tensor]
    times_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    actions: list[Tensor] = field(default_factory=list)

    def summary(self, rate_hz: float | None, members: int) -> dict[str, Any]:
        times = np.array(self.times_ms)
        found: dict[str, Any] = {"min_ms": float(times.min()), "mean_ms": float(times.mean()), "repeats": len(times)}
        found["min_cpu_ms"] = min(self.cpu_ms)
        found |= {f"p{one}_ms": float(np.percentile(times, one)) for one in _PERCENTILES}
        found["min_per_member_ms"] = found["min_ms"] / members
        if rate_hz is not None:
            found["deadline_misses"] = int((times > 1e3 / rate_hz).sum())
        return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to the sub-command's parser."""
    parser.add_argument("--size", choices=sorted(BENCH_SIZES), default="small", help="random weights of this size")
    parser.add_argument("--weights-seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, help="CPU threads of both sides")
    parser.add_argument("--cameras", type=int, default=3, help="camera slots of the network's input")
    parser.add_argument("--absent", type=int, default=0, help="how many of them, the last ones, are absent")
    parser.add_argument("--prompt-tokens", type=int, default=37, help="valid ones; the others are padding")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument(
        "--batch-mode",
        choices=("grouped", "loop", "candidates"),
        default="grouped",
        help="one pass for all, one pass for each, or all from one prefix",
    )
    parser.add_argument("--num-inference-steps", type=int, default=10)
    parser.add_argument("--horizon", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--deterministic-noise", action="store_true", help="the same noise at every repetition")
    parser.add_argument("--same-observation", action="store_true", help="what a prefix cache can hit")
    parser.add_argument("--prefix-cache", type=int, default=0, metavar="ENTRIES")
    parser.add_argument("--cuda-graph", choices=("auto", "true", "false"), default="true")
    parser.add_argument("--compile", choices=("off", "default"), default="off")
    parser.add_argument("--preset", help="engine preset or YAML file; the options above override it")
    parser.add_argument("--peer", choices=sorted(PEERS), help="reference implementation to run alternately")
    parser.add_argument("--skip-ours", action="store_true")
    parser.add_argument("--rate-hz", type=float, help="control rate whose missed deadlines are counted")
    parser.add_argument("--limit", type=float, help="status 1 where ours takes more than this share of the peer's time")
    parser.add_argument("--tolerance", type=float, default=2e-5, help="largest difference of actions, with --limit")
    parser.add_argument("--peak-tflops", type=float, help="of the machine, in the run's dtype: prints the roofline")
    parser.add_argument("--peak-gb-per-s", type=float, help="of the machine's memory: prints the roofline")
    parser.add_argument("--output", type=Path, help="JSON with every single time")
    parser.add_argument("--plot", type=Path, help="PNG with the times of both sides")


def run(args: argparse.Namespace) -> int:
    """Measure alternately and print; status 1 where a limit is exceeded."""
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.skip_ours and args.peer is None:
        raise ConfigurationError("bench", "--skip-ours leaves nothing to measure without --peer")
    device = resolve_device(args.device)
    dtype = resolve_dtype(args.dtype, device)
    config = replace(BENCH_SIZES[args.size], horizon=args.horizon)
    work = Workload(config, args)
    sides = []
    engine = None
    if not args.skip_ours:
        engine = make_engine(config, args, device, dtype)
        sides.append(Side("pi05_ros", partial(work.ours, engine)))
    if args.peer is not None:
        sample = PEERS[args.peer](config, args.weights_seed, device, dtype)
        sides.append(Side(args.peer, partial(work.theirs, sample)))
    measure(sides, work.prepare, args.warmup, args.repeats)
    report = make_report(sides, args, device, dtype)
    if engine is not None:
        report |= _engine_report(engine, config, args)
    print_report(report)
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.plot is not None:
        plot(sides, args.plot)
    if args.limit is None or len(sides) < 2:
        return 0
    return int(report["ratio_of_minima"] > args.limit or report["largest_difference"] > args.tolerance)


class Workload:
    """Inputs and noise of every repetition, the same for both sides."""

    def __init__(self, config: Pi05Config, args: argparse.Namespace) -> None:
        self._config = config
        self._args = args

    def prepare(self, index: int) -> None:
        """Make what repetition ``index`` works on; not part of the measured time."""
        self._members, self._noise = self._make_members(index), self._make_noise(index)

    def _make_members(self, index: int) -> list[ModelInputs]:
        args, config = self._args, self._config
        generator = torch.Generator().manual_seed(0 if args.same_observation else 1000 + index)
        size = config.vision.image_size
        found = []
        for _ in range(1 if args.batch_mode == "candidates" else args.batch_size):
            images = torch.rand(args.cameras, 3, size, size, generator=generator) * 2 - 1
            present = args.cameras - args.absent
            images[present:] = -1.0
            mask = torch.arange(config.max_token_len) < args.prompt_tokens
            tokens = torch.randint(1, config.vocab - 1, (config.max_token_len,), generator=generator) * mask
            masks = tuple(camera < present for camera in range(args.cameras))
            found.append(ModelInputs(tuple(images), masks, tokens, mask))
        return found * (args.batch_size if args.batch_mode == "candidates" else 1)

    def _make_noise(self, index: int) -> Tensor:
        seed = 7 if self._args.deterministic_noise else 7 + index
        shape = (self._args.batch_size, self._config.horizon, self._config.action_dim)
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    def ours(self, engine: Engine) -> Tensor:
        steps = self._args.num_inference_steps
        members = self._members
        options = [InferenceOptions(noise=noise.numpy(), num_steps=steps) for noise in self._noise]
        if self._args.batch_mode == "loop":
            results = [engine.run([one], [how])[0] for one, how in zip(members, options, strict=True)]
        else:
            results = engine.run(members, options)
        return torch.stack([result.actions for result in results])

    def theirs(self, sample: Sampler) -> Tensor:
        members, noise, steps = self._members, self._noise, self._args.num_inference_steps
        if self._args.batch_mode == "loop":
            return torch.cat([sample([one], noise[row : row + 1], steps) for row, one in enumerate(members)])
        return sample(members, noise, steps)


def make_engine(config: Pi05Config, args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Engine:
    """The engine on random weights."""
    settings = load_preset(args.preset) if args.preset else EngineSettings()
    graph: Any = {"auto": "auto", "true": True, "false": False}[args.cuda_graph]
    settings = replace(
        settings, cuda_graph=graph, compile=args.compile, prefix_cache_entries=args.prefix_cache, max_plans=4
    )
    return Engine(
        random_model(config, args.weights_seed, device, dtype), args.num_inference_steps, settings, device=device
    )


def random_model(config: Pi05Config, seed: int, device: torch.device, dtype: torch.dtype) -> Pi05:
    """The network with `random_weight`'s weights, in their dtypes, on a device."""
    model = empty_model(config)
    weights = {
        name: random_weight(name, tuple(one.shape), seed).to(device, parameter_dtype(name, dtype))
        for name, one in model.state_dict().items()
    }
    model.load_state_dict(weights, assign=True)
    return model.eval().requires_grad_(False)


def measure(sides: Sequence[Side], prepare: Callable[[int], None], warmup: int, repeats: int) -> None:
    """Run the sides in turn, so that both see the same machine; actions are kept of the first repetition only."""
    for index in range(-warmup, repeats):
        prepare(index)
        for side in sides:
            started, cpu = time.perf_counter(), time.process_time()
            actions = side.run()
            elapsed, computed = time.perf_counter() - started, time.process_time() - cpu
            if index >= 0:
                side.times_ms.append(elapsed * 1e3)
                side.cpu_ms.append(computed * 1e3)
            if index <= 0:
                side.actions.append(actions)


def make_report(
    sides: Sequence[Side], args: argparse.Namespace, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Everything that was measured, and under which conditions."""
    on_gpu = device.type == "cuda"
    report: dict[str, Any] = {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": torch.cuda.get_device_name(device)
        if on_gpu
        else f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dtype": str(dtype).removeprefix("torch."),
        "options": {name: str(value) for name, value in vars(args).items() if not callable(value)},
        "sides": {side.name: side.summary(args.rate_hz, args.batch_size) for side in sides},
        "times_ms": {side.name: side.times_ms for side in sides},
        "peak_memory_bytes": (
            torch.cuda.max_memory_allocated(device)
            if on_gpu
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        ),
    }
    if len(sides) == 2:
        ours, theirs = sides
        rows = min(ours.actions[0].shape[1], theirs.actions[0].shape[1])
        differences = [
            (one[:, :rows] - other[:, :rows]).abs() for one, other in zip(ours.actions, theirs.actions, strict=True)
        ]
        report["largest_difference"] = max(float(one.max()) for one in differences)
        report["mean_difference"] = float(torch.stack([one.mean() for one in differences]).mean())
        report["ratio_of_minima"] = min(ours.times_ms) / min(theirs.times_ms)
        # Time of all the process's threads: what a busy machine takes away does not count, waiting for a GPU does.
        report["ratio_of_cpu_minima"] = min(ours.cpu_ms) / min(theirs.cpu_ms)
    return report


def _engine_report(engine: Engine, config: Pi05Config, args: argparse.Namespace) -> dict[str, Any]:
    counters = engine.cache_counters
    found: dict[str, Any] = {
        "plans": {str(key): "graph" if captured else "eager" for key, captured in engine.plans.items()},
        "prefix_cache": {"hits": counters.hits, "misses": counters.misses, "bytes": counters.bytes},
    }
    if args.peak_tflops and args.peak_gb_per_s:
        key = next(reversed(engine.plans))
        parts = stages(config, key)
        floors = {one.name: one.floor_ms(args.peak_tflops * 1e12, args.peak_gb_per_s * 1e9) for one in parts}
        found["roofline"] = {
            "gflop": {one.name: one.flops / 1e9 for one in parts},
            "gbyte": {one.name: one.bytes / 1e9 for one in parts},
            "floor_ms": floors,
            "floor_total_ms": sum(floors.values()),
        }
    return found


def print_report(report: dict[str, Any]) -> None:
    """A table for people."""
    print(f"{report['machine']}, torch {report['torch']}, {report['dtype']}, {report['when']}")
    for name, one in report["sides"].items():
        spread = "  ".join(f"p{at} {one[f'p{at}_ms']:.1f}" for at in _PERCENTILES)
        missed = f"  missed {one['deadline_misses']} of {one['repeats']}" if "deadline_misses" in one else ""
        print(f"{name:>10}: min {one['min_ms']:.1f} ms  {spread}  ({one['repeats']} runs){missed}")
    if "ratio_of_minima" in report:
        wall, cpu = report["ratio_of_minima"], report["ratio_of_cpu_minima"]
        largest, mean = report["largest_difference"], report["mean_difference"]
        print(f"ratio of minima {wall:.3f}, of processor time {cpu:.3f}")
        print(f"actions differ by at most {largest:.2e}, {mean:.2e} on average")
    for key, how in report.get("plans", {}).items():
        print(f"      plan: {key}: {how}")
    if "roofline" in report:
        floor, best = report["roofline"]["floor_total_ms"], report["sides"]["pi05_ros"]["min_ms"]
        parts = ", ".join(f"{name} {value:.2f}" for name, value in report["roofline"]["floor_ms"].items())
        print(f"  roofline: {floor:.2f} ms ({parts}); measured {best / floor:.2f} times that")
    print(f"    memory: {report['peak_memory_bytes'] / 2**30:.2f} GiB at the peak")


def plot(sides: Sequence[Side], path: Path) -> None:
    """Times of every repetition, one line per side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    for side in sides:
        axes.plot(side.times_ms, marker=".", label=f"{side.name}, min {min(side.times_ms):.1f} ms")
    axes.set(xlabel="repetition", ylabel="ms", ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=120)
