"""From what the user wrote to a folder on this machine: a local path, or a model id on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from pi05_ros.errors import CheckpointError

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
# Configurations, weights, statistics, tokenizers; the markers let other formats be refused by name. No training state.
_WANTED = ["*.json", "*.safetensors", "*.model", "assets/**", "_METADATA", "params/_METADATA", "*.ocdbt"]
_UNWANTED = [
    "training_state/**",
    "checkpoints/**",
    "optimizer*",
    "*/optimizer*",
    "params/d/*",
    "params/ocdbt.process*/**",
]


def resolve_source(source: str | Path, revision: str | None = None) -> tuple[Path, str, str | None]:
    """The checkpoint's folder, its id, and its commit (None for a local path).

    An existing path always wins. Otherwise ``owner/name`` is asked of the hub, whose cache also serves without a
    network (HF_HUB_OFFLINE=1).

    Raises:
        CheckpointError: ``checkpoint.not_found``, ``checkpoint.not_a_folder``, ``checkpoint.revision_of_a_path``,
            ``checkpoint.hub`` (unknown id or revision, no access, no network and not in the cache).
    """
    path = Path(source).expanduser()
    if path.exists():
        if revision is not None:
            raise CheckpointError(
                "revision_of_a_path", f"{path} is a local folder and has no revision {revision!r}; leave it out"
            )
        if not path.is_dir():
            raise CheckpointError("not_a_folder", f"a checkpoint is a folder; {path} is a file, name its folder")
        return path.resolve(), path.resolve().name, None
    text = str(source)
    if not _HUB_ID.match(text):
        raise CheckpointError("not_found", f"{text} is neither an existing folder nor a hub id of the form owner/name")
    try:
        folder = Path(snapshot_download(text, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except GatedRepoError as error:
        raise CheckpointError("hub", f"{text}: access must be asked for on the hub, then `hf auth login`") from error
    except RevisionNotFoundError as error:
        raise CheckpointError("hub", f"{text} has no revision {revision!r} on the hub") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            "hub", f"{text} is no existing folder, and the hub has no such model (or it is private: `hf auth login`)"
        ) from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            "hub",
            f"{text} at revision {revision or 'main'} is neither an existing folder nor in the hub's cache, and the "
            "hub cannot be reached; download it where there is a network, or give a folder",
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        raise CheckpointError("hub", f"{text} cannot be had from the hub: {error}") from error
    return folder, text, folder.name
