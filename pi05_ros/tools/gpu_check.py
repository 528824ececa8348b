"""``pi05-ros gpu-check``: what can only be seen on a GPU: graphs, bfloat16, speed, memory, offload, streaming.

Runs from a plain source tree without ROS: ``python -m pi05_ros.tools.gpu_check --golden test/golden``. Sections are
independent; one that fails is reported and the others still run.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from pi05_ros.checkpoint.formats import open_checkpoint
from pi05_ros.checkpoint.loader import empty_model, load_model
from pi05_ros.checkpoint.make import SIZES, write_lerobot
from pi05_ros.engine.chunking import RealTimeChunking
from pi05_ros.engine.engine import Engine, InferenceOptions, ModelInputs
from pi05_ros.engine.placement import Placement
from pi05_ros.engine.settings import EngineSettings
from pi05_ros.model.config import Pi05Config
from pi05_ros.model.pi05 import Pi05
from pi05_ros.model.precision import parameter_dtype
from pi05_ros.tools.peers import PEERS
from pi05_ros.tools.roofline import stages

GIB = 2**30
PEAK_LIMIT_GIB = 12.8
GOALS_MS = {1: (20.0, 13.5), 4: (42.0, 34.0)}  # batch: (committed, wanted), full prompt, 10 steps, H200
# An H200's measured rates, bfloat16 products and memory.
FLOPS_PER_S, BYTES_PER_S = 790e12, 4.3e12
OFFLOAD = {
    "vision stage": Placement(vision="stage"),
    "token embedding host": Placement(token_embedding="host"),
    "language last 2 stage": Placement(language="stage", language_layers=2),
    "expert stage": Placement(expert="stage"),
    "moderate": Placement("stage", "stage", "stage", 2, "host", True),
    "layerwise": Placement("layer", "layer", "resident", None, "host", True),
    "expert layer": Placement(expert="layer"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to the sub-command's parser."""
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=sorted(SIZES), default="full")
    parser.add_argument("--golden", type=Path, default=Path("test/golden"), help="folder of the golden data")
    parser.add_argument("--sections", default="equality,golden,speed,memory,offload,cache,load")
    parser.add_argument("--batches", default="1,2,4,8")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--compile", choices=("off", "default"), default="off")
    parser.add_argument("--peer", choices=sorted(PEERS), help="its eager time in the same run, where it is installed")
    parser.add_argument("--budget-s", type=float, default=480.0, help="sections that would begin later are left out")
    parser.add_argument("--output", type=Path, help="JSON")


def run(args: argparse.Namespace) -> int:
    """Run the sections; status 1 where one failed."""
    torch.backends.cuda.matmul.allow_tf32 = False
    check = _Check(args)
    began = time.monotonic()
    for name in args.sections.split(","):
        if time.monotonic() - began > args.budget_s:
            check.report(name, "left out: no time")
            continue
        section: Callable[[], Any] = getattr(check, f"check_{name}")
        started = time.monotonic()
        try:
            outcome = section()
        except Exception as error:
            traceback.print_exc()
            check.failures.append(name)
            outcome = f"FAILED: {type(error).__name__}: {error}"
        check.report(name, outcome)
        print(f"-- {name}: {time.monotonic() - started:.1f} s", flush=True)
        _free()
    if args.output is not None:
        args.output.write_text(json.dumps(check.results, indent=1, default=str) + "\n", encoding="utf-8")
    print("failed: " + ", ".join(check.failures) if check.failures else "all sections passed")
    return int(bool(check.failures))


class _Check:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        self.cuda = self.device.type == "cuda"
        self.config: Pi05Config = SIZES[args.size]
        self.failures: list[str] = []
        name = torch.cuda.get_device_name(self.device) if self.cuda else "CPU"
        self.results: dict[str, Any] = {
            "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "device": name,
            "torch": torch.__version__,
            "size": args.size,
            "compile": args.compile,
        }
        print(f"{name}, torch {torch.__version__}, size {args.size}", flush=True)

    def report(self, name: str, outcome: Any) -> None:
        self.results[name] = outcome
        print(f"{name}: {json.dumps(outcome, default=str, indent=1)}", flush=True)

    def require(self, holds: bool, what: str) -> None:
        """Note a failure and go on, so that one run tells everything."""
        if not holds:
            print(f"NOT MET: {what}", flush=True)
            self.failures.append(what)

    def engine(self, **settings: Any) -> Engine:
        dtype = torch.bfloat16 if self.cuda else torch.float32
        chosen = EngineSettings(**({"cuda_graph": True, "max_plans": 16, "compile": self.args.compile} | settings))
        host = chosen.placement is not None and not chosen.placement.all_resident
        model = quick_model(self.config, torch.device("cpu") if host else self.device, dtype)
        return Engine(model, 10, chosen, device=self.device)

    def check_equality(self) -> dict[str, Any]:
        """Graph against eager of the same plan: two observations, 5 and 10 steps, hit and miss, groups, RTC."""
        one = self.engine(prefix_cache_entries=16)
        members = observations(self.config, 4)
        compared = 0
        for group in (members[:1], members[:2], [members[0]] * 3):
            for steps in (5, 10):
                for mode in ("off", "guided", "hard_prefix"):
                    for turn in range(2):
                        shift = 0 if len(group) > 1 and group[0] is group[1] else turn * len(group)
                        asked = [members[shift + index] if shift else group[index] for index in range(len(group))]
                        how = [
                            InferenceOptions(seed=5 + i, num_steps=steps, rtc=_chunking(mode))
                            for i in range(len(asked))
                        ]
                        eager = one.run(asked, [replace(x, cuda_graph=False, prefix_cache=False) for x in how])
                        for again in range(2):  # a miss, then a hit
                            graph = one.run(asked, how)
                            same = all(torch.equal(a.actions, b.actions) for a, b in zip(eager, graph, strict=True))
                            label = f"{len(asked)} members, {steps} steps, rtc {mode}, observation {turn}, run {again}"
                            self.require(same, f"graph equals eager: {label}")
                            self.require(graph[0].graph or not self.cuda, f"a graph was replayed: {label}")
                            compared += 1
        return {"compared": compared, "hits": one.cache_counters.hits}

    def check_golden(self) -> dict[str, Any]:
        """The golden network: float32 within 2e-5 of LeRobot's actions, bfloat16 as near as the references' own."""
        folder = self.args.golden
        cases = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
        inputs = load_file(folder / "inputs.safetensors")
        checkpoint = open_checkpoint(folder / "hub_style_tiny")
        exact = load_file(folder / "case_b1_3cam.safetensors")["actions"][0]
        found: dict[str, Any] = {}
        for dtype in (torch.float32, torch.bfloat16):
            one = Engine(load_model(checkpoint, self.device, dtype), 10, EngineSettings(cuda_graph=True))
            for name in [name for name in cases if "bf16" not in name and name != "b4"]:
                described = cases[name]
                blank = torch.full_like(inputs["b1.image.cam0"][0], -1.0)
                member = ModelInputs(
                    tuple(inputs[image][0] if image in inputs else blank for image in described["images"]),
                    tuple(bool(mask) for mask in described["image_masks"]),
                    inputs[described["tokens"]][0],
                    inputs[described["token_mask"]][0],
                )
                noise = inputs[described["noise"]][0].numpy()
                how = InferenceOptions(noise=noise, num_steps=described["num_steps"], horizon=described["horizon"])
                got = one.run([member], [how])[0].actions
                wanted = load_file(folder / f"case_{name}.safetensors")["actions"][0]
                difference = (got - wanted).abs()
                found[f"{name}, {dtype}"] = {"max": float(difference.max()), "mean": float(difference.mean())}
                if dtype == torch.float32:
                    limit = 2e-5 if described["peer"] == "lerobot" else 2e-4
                    self.require(float(difference.max()) <= limit, f"golden {name} within {limit}")
        for peer in ("lerobot", "openpi"):
            theirs = load_file(folder / f"case_b1_3cam_bf16_fp32rope_{peer}.safetensors")["actions"][0]
            bound = 1.25 * float((theirs - exact).abs().mean())
            self.require(found["b1_3cam, torch.bfloat16"]["mean"] <= bound, f"bfloat16 as near to float32 as {peer}")
        return found

    def check_speed(self) -> dict[str, Any]:
        """Three cameras, full prompt and the bucket of 37 tokens, horizon 50, 10 steps; graph and wall time."""
        found: dict[str, Any] = {}
        one = self.engine()
        for batch in [int(word) for word in self.args.batches.split(",")]:
            for tokens in (self.config.max_token_len, 37):
                members = observations(self.config, batch, tokens)
                found[f"B{batch}, {tokens} tokens"] = self._speed(one, members)
            wall = found[f"B{batch}, {self.config.max_token_len} tokens"]["wall_ms_min"]
            if batch in GOALS_MS and "H200" in self.results["device"] and self.args.size == "full":
                committed, wanted = GOALS_MS[batch]
                self.require(wall <= committed, f"B{batch} within {committed} ms: {wall:.2f}")
                found[f"B{batch} goal"] = f"{wanted} ms {'reached' if wall <= wanted else 'not reached'}"
        _print_speed(found)
        if self.args.peer is not None:
            del one
            _free()
            found[f"{self.args.peer} eager"] = self._peer_speed()
        return found

    def _speed(self, one: Engine, members: Sequence[ModelInputs]) -> dict[str, Any]:
        how = [InferenceOptions(seed=index) for index in range(len(members))]
        eager_how = [replace(each, cuda_graph=False) for each in how]
        eager = min(self._wall(one.run, members, eager_how) for _ in range(3))
        for _ in range(4):  # captured, self-checked, warm
            one.run(members, how)
        walls, prefixes, denoises = [], [], []
        for _ in range(self.args.repeats):
            started = time.perf_counter()
            result = one.run(members, how)[0]
            walls.append((time.perf_counter() - started) * 1e3)
            prefixes.append(result.timings_ms["prefix"])
            denoises.append(result.timings_ms["action_denoise"])
        key = next(reversed(one.plans))
        floors = {part.name: part.floor_ms(FLOPS_PER_S, BYTES_PER_S) for part in stages(self.config, key)}
        walls.sort()
        return {
            "wall_ms_min": walls[0],
            "wall_ms_p50": walls[len(walls) // 2],
            "graph_prefix_ms": min(prefixes),
            "graph_denoise_ms": min(denoises),
            "eager_wall_ms_min": eager,
            "replayed": result.graph,
            "attention": one.attention(key),
            "prefix_tokens": key.cameras * self.config.tokens_per_image + key.prompt,
            "floor_ms_h200": floors | {"total": sum(floors.values())},
        }

    def _peer_speed(self) -> dict[str, Any]:
        dtype = torch.bfloat16 if self.cuda else torch.float32
        sample = PEERS[self.args.peer](self.config, None, self.device, dtype)
        found = {}
        for batch in [int(word) for word in self.args.batches.split(",")]:
            members = observations(self.config, batch)
            noise = torch.randn(batch, self.config.horizon, self.config.action_dim)
            sample(members, noise, 10)
            found[f"B{batch}"] = min(self._wall(sample, members, noise, 10) for _ in range(3))
        return found

    def check_memory(self) -> dict[str, Any]:
        """A request in a process held to 16 GB: peak allocated, with graphs."""
        if not self.cuda:
            return {"left out": "no GPU"}
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, 16e9 / total), self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        try:
            one = self.engine(max_plans=4)
            for batch in (1, 4):
                for seed in range(2):
                    members = observations(self.config, batch)
                    one.run(members, [InferenceOptions(seed=seed)] * batch)
            peak = torch.cuda.max_memory_allocated(self.device) / GIB
            reserved = torch.cuda.max_memory_reserved(self.device) / GIB
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)
        self.require(peak <= PEAK_LIMIT_GIB, f"peak allocated within {PEAK_LIMIT_GIB} GiB: {peak:.2f}")
        return {"peak_allocated_gib": peak, "peak_reserved_gib": reserved}

    def check_offload(self) -> dict[str, Any]:
        """Every placement: the resident engine's actions, bit for bit, its time and its peak."""
        members = observations(self.config, 1)
        how = [InferenceOptions(seed=1)]
        wanted = self.engine(cuda_graph=False, compile="off").run(members, how)[0].actions
        found = {}
        for name, placement in OFFLOAD.items():
            _free()
            if self.cuda:
                torch.cuda.reset_peak_memory_stats(self.device)
            one = self.engine(placement=placement, cuda_graph=False, compile="off")
            self.require(torch.equal(one.run(members, how)[0].actions, wanted), f"same actions with {name}")
            elapsed = min(self._wall(one.run, members, how) for _ in range(3))
            peak = torch.cuda.max_memory_allocated(self.device) / GIB if self.cuda else None
            found[name] = {
                "ms": elapsed,
                "peak_allocated_gib": peak,
                "peak_weights_gib": one.placement.peak_bytes / GIB,
            }
            del one
        return found

    def check_cache(self) -> dict[str, Any]:
        """A hit against a miss."""
        one = self.engine(prefix_cache_entries=4)
        members, how = observations(self.config, 1), [InferenceOptions(seed=1)]
        for _ in range(4):
            one.run(members, how)
        hit = min(self._wall(one.run, members, how) for _ in range(5))
        off = [replace(how[0], prefix_cache=False)]
        for _ in range(3):
            one.run(members, off)
        miss = min(self._wall(one.run, members, off) for _ in range(5))
        return {"hit_ms": hit, "uncached_ms": miss, "entry_mb": one.cache_counters.bytes / 1e6}

    def check_load(self) -> dict[str, Any]:
        """Reading a checkpoint of the chosen size, mapped and streamed."""
        found: dict[str, Any] = {}
        with tempfile.TemporaryDirectory() as scratch:
            size = "mid" if self.args.size == "full" else self.args.size
            folder = write_lerobot(Path(scratch) / "checkpoint", SIZES[size], dtype=torch.bfloat16, tokenizer=False)
            checkpoint = open_checkpoint(folder)
            gigabytes = sum(file.stat().st_size for file in checkpoint.weight_files) / 1e9
            for streamer in (False, True):
                try:
                    elapsed = self._wall(load_model, checkpoint, self.device, torch.bfloat16, streamer=streamer)
                except Exception as error:
                    found["streamed" if streamer else "mapped"] = str(error)
                    continue
                found["streamed" if streamer else "mapped"] = {
                    "s": elapsed / 1e3,
                    "gb_per_s": gigabytes / elapsed * 1e3,
                }
        return found

    def _wall(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> float:
        if self.cuda:
            torch.cuda.synchronize(self.device)
        started = time.perf_counter()
        function(*arguments, **named)
        if self.cuda:
            torch.cuda.synchronize(self.device)
        return (time.perf_counter() - started) * 1e3


def quick_model(config: Pi05Config, device: torch.device, dtype: torch.dtype) -> Pi05:
    """Random weights of sane size, drawn on the device: a full-size network in seconds; equal for equal devices."""
    model = empty_model(config)
    draw_on = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    generator = torch.Generator(draw_on).manual_seed(0)
    weights: dict[str, Tensor] = {}
    for name, one in model.state_dict().items():
        drawn = torch.randn(one.shape, generator=generator, device=draw_on)
        fan_in = one.shape[1:].numel() if one.dim() > 1 else 1
        drawn = drawn * (0.1 if one.dim() == 1 else fan_in**-0.5)
        weights[name] = drawn.to(device, parameter_dtype(name, dtype))
        del drawn
    model.load_state_dict(weights, assign=True)
    return model.eval().requires_grad_(False)


def observations(config: Pi05Config, count: int, tokens: int | None = None) -> list[ModelInputs]:
    """Different observations of three cameras; ``tokens`` valid prompt tokens, all where not given."""
    generator = torch.Generator().manual_seed(3)
    size, width = config.vision.image_size, config.max_token_len
    found = []
    for _ in range(count):
        images = tuple(torch.rand(3, 3, size, size, generator=generator) * 2 - 1)
        mask = torch.arange(width) < (width if tokens is None else tokens)
        words = torch.randint(1, config.vocab, (width,), generator=generator) * mask
        found.append(ModelInputs(images, (True, True, True), words, mask))
    return found


def _chunking(mode: str) -> RealTimeChunking | None:
    if mode == "off":
        return None
    left = torch.randn(30, 32, generator=torch.Generator().manual_seed(9)).numpy()
    return RealTimeChunking(left, 4, mode)  # type: ignore[arg-type]


def _print_speed(found: dict[str, Any]) -> None:
    print("| Workload | wall min | wall p50 | prefix | denoise | eager | floor (H200) |\n|---|---|---|---|---|---|---|")
    for name, one in found.items():
        if isinstance(one, dict):
            cells = [one[key] for key in ("wall_ms_min", "wall_ms_p50", "graph_prefix_ms", "graph_denoise_ms")]
            cells += [one["eager_wall_ms_min"], one["floor_ms_h200"]["total"]]
            print(f"| {name} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> int:
    """The script without the package's command."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
