"""From safetensors files to a network in its final dtype on its final device, strictly and without a second copy."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from safetensors import SafetensorError
from torch.overrides import TorchFunctionMode

from pi05_ros.checkpoint.description import Checkpoint
from pi05_ros.checkpoint.headers import StoredTensor, read_headers
from pi05_ros.checkpoint.keys import EMBEDDING, LM_HEAD, canonical_key
from pi05_ros.checkpoint.sources import mapped, streamed, use_streamer
from pi05_ros.errors import CheckpointError
from pi05_ros.model.config import Pi05Config
from pi05_ros.model.pi05 import Pi05
from pi05_ros.model.precision import parameter_dtype

LoadProgress = Callable[[int, int], None]

_LOG = logging.getLogger(__name__)
_FLOATS = ("F32", "BF16", "F16")
_SHOWN = 5


def load_model(
    checkpoint: Checkpoint,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    progress: LoadProgress | None = None,
    streamer: bool | None = None,
) -> Pi05:
    """Build the network and fill it; every weight is accounted for before the first byte is read.

    Tensors are mapped one at a time and converted straight into their place, so that memory peaks at the loaded model
    plus nothing on a CPU. The result owns its memory: files may be replaced afterwards.

    Args:
        dtype: torch.float32 or torch.bfloat16; the float32 set stays float32 (`model.precision`).
        progress: called with (bytes done, bytes in all) of the files, from this thread.
        streamer: read with Run:ai Model Streamer; ``None``: see `sources.use_streamer`.

    Returns:
        The network in evaluation mode, without gradients.

    Raises:
        CheckpointError: ``checkpoint.weights_mismatch``, ``checkpoint.duplicate_weight``,
            ``checkpoint.unsupported_dtype``, ``checkpoint.broken_weights``.
    """
    began = time.monotonic()
    model = empty_model(checkpoint.config)
    expected = {name: tuple(parameter.shape) for name, parameter in model.state_dict().items()}
    plan = match_weights(read_headers(checkpoint.weight_files), expected, checkpoint)
    total = sum(tensor.size for tensor in plan.values())
    done = 0
    weights: dict[str, torch.Tensor] = {}
    target = torch.device(device)
    stream = use_streamer(target, streamer)
    try:
        for name, tensor in streamed(plan, target) if stream else mapped(plan):
            # copy=True: without it a tensor whose dtype is already right would stay in memory that is not its own.
            weights[name] = tensor.to(device=target, dtype=parameter_dtype(name, dtype), copy=True)
            del tensor
            done += plan[name].size
            if progress is not None:
                progress(done, total)
    except (SafetensorError, OSError) as error:
        raise CheckpointError("broken_weights", f"{checkpoint.path}: its weights cannot be read: {error}") from error
    model.load_state_dict(weights, strict=True, assign=True)
    model.eval().requires_grad_(False)
    seconds = time.monotonic() - began
    examples: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        examples.setdefault(str(parameter.dtype).removeprefix("torch."), name)
    counts = ", ".join(f"{count:,} {name} (as {examples[name]})" for name, count in count_dtypes(model).items())
    how = "streamed" if stream else "mapped"
    rate = total / seconds / 1e9
    _LOG.info("loaded %s on %s: %s; %s, %.1f s, %.2f GB/s", checkpoint.id, device, counts, how, seconds, rate)
    return model


def empty_model(config: Pi05Config) -> Pi05:
    """The network on the meta device: names and shapes, no memory."""
    with torch.device("meta"), _WithoutInitialisers():
        return Pi05(config)


class _WithoutInitialisers(TorchFunctionMode):
    """Leaves new parameters empty.

    Drawing random values on the meta device makes torch import its compiler: two seconds and 70 MB for values that are
    never used.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def match_weights(
    stored: list[StoredTensor], expected: Mapping[str, tuple[int, ...]], checkpoint: Checkpoint
) -> dict[str, StoredTensor]:
    """Which stored tensor fills which parameter, in the files' order. All or nothing.

    Raises:
        CheckpointError: as `load_model`.
    """
    plan: dict[str, StoredTensor] = {}
    for tensor in stored:
        name = canonical_key(tensor.key)
        if name is None:
            continue
        if name in plan:
            raise CheckpointError(
                "duplicate_weight",
                f"{checkpoint.path}: {plan[name].key} ({plan[name].file.name}) and {tensor.key} ({tensor.file.name}) "
                f"are both {name}; one is expected",
            )
        plan[name] = tensor
    # Tied: one tensor under one or both names. Loaded once; the head itself has no use here.
    head = plan.pop(LM_HEAD, None)
    if head is not None and EMBEDDING not in plan:
        plan[EMBEDDING] = head
        plan = dict(sorted(plan.items(), key=lambda item: stored.index(item[1])))
    _refuse_mismatch(plan, expected, checkpoint)
    wrong = [f"{tensor.key}: {tensor.dtype}" for tensor in plan.values() if tensor.dtype not in _FLOATS]
    if wrong:
        raise CheckpointError(
            "unsupported_dtype",
            f"{checkpoint.path}: weights in {', '.join(_FLOATS)} are expected, got {wrong[:_SHOWN]}",
        )
    return plan


def _refuse_mismatch(
    plan: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]], checkpoint: Checkpoint
) -> None:
    missing = [f"{name} {list(shape)}" for name, shape in expected.items() if name not in plan]
    unexpected = [f"{tensor.key} {list(tensor.shape)}" for name, tensor in plan.items() if name not in expected]
    misshaped = [
        f"{tensor.key}: {list(expected[name])} by config.json, {list(tensor.shape)} in {tensor.file.name}"
        for name, tensor in plan.items()
        if name in expected and expected[name] != tensor.shape
    ]
    problems = {"missing": missing, "unexpected": unexpected, "misshaped": misshaped}
    if not any(problems.values()):
        return
    parts = [
        f"{len(names)} {kind}: {'; '.join(names[:_SHOWN])}{' ...' if len(names) > _SHOWN else ''}"
        for kind, names in problems.items()
        if names
    ]
    hint = (
        " The folder states no sizes (no `architecture` block in config.json), so the published full size is expected."
        if checkpoint.full_size_assumed and (misshaped or missing)
        else ""
    )
    raise CheckpointError(
        "weights_mismatch",
        f"{checkpoint.path}: weights and configuration do not fit. {'. '.join(parts)}.{hint}",
        {kind: names[:_SHOWN] for kind, names in problems.items() if names},
    )


def count_dtypes(model: torch.nn.Module) -> dict[str, int]:
    """Number of parameters by dtype, e.g. {"bfloat16": 3233713264, "float32": 119720608}; shared ones once."""
    counts: dict[str, int] = {}
    for parameter in model.parameters():
        name = str(parameter.dtype).removeprefix("torch.")
        counts[name] = counts.get(name, 0) + parameter.numel()
    return dict(sorted(counts.items()))


@contextmanager
def terminal_progress(label: str, enabled: bool | None = None) -> Iterator[LoadProgress | None]:
    """A progress bar of bytes on stderr for `load_model`; None where stderr is no terminal, unless asked for."""
    console = Console(stderr=True)
    if not (console.is_terminal if enabled is None else enabled):
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
