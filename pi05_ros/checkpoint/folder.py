"""Files that both formats keep in the same way: weights and tokenizers."""

from __future__ import annotations

from pathlib import Path

from pi05_ros.checkpoint.description import read_json
from pi05_ros.checkpoint.headers import StoredTensor, read_headers
from pi05_ros.errors import CheckpointError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "paligemma_tokenizer.model")


def find_weights(path: Path) -> list[StoredTensor]:
    """Headers of the folder's weights: ``model.safetensors``, or the shards that the index names. Nothing is globbed.

    Raises:
        CheckpointError: ``checkpoint.ambiguous_weights`` where both lie there, ``checkpoint.bad_index`` for an index
            that does not fit its shards, ``checkpoint.missing_file`` for an absent shard,
            ``checkpoint.broken_weights``.
    """
    single, index = path / _SINGLE, path / _INDEX
    if single.exists() and index.exists():
        raise CheckpointError("ambiguous_weights", f"{path} holds both {_SINGLE} and {_INDEX}; remove the stale one")
    if single.exists():
        return read_headers([single])
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        raise CheckpointError("bad_index", f"{index}: `weight_map` with weight -> file was expected")
    names = sorted(set(table.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError("bad_index", f"{index} names {name!r}; shards are .safetensors files of this folder")
        if not (path / name).is_file():
            raise CheckpointError(
                "missing_file", f"{index} names {name}, which is not in the folder; it has {_here(path)}"
            )
    tensors = read_headers(path / name for name in names)
    stored = {(tensor.key, tensor.file.name) for tensor in tensors}
    astray = [f"{key} in {name}" for key, name in table.items() if (key, name) not in stored]
    if astray:
        raise CheckpointError("bad_index", f"{index} names weights that are not where it says: {astray[:5]}")
    return tensors


def find_tokenizer(path: Path) -> Path | None:
    """The folder's tokenizer file, if there is one.

    Raises:
        CheckpointError: ``checkpoint.ambiguous_tokenizer`` for several SentencePiece models of unknown names.
    """
    for name in _TOKENIZERS:
        for file in (path / name, path / "tokenizer" / name, path / "assets" / name):
            if file.is_file():
                return file
    models = sorted(path.glob("*.model"))
    if len(models) > 1:
        raise CheckpointError(
            "ambiguous_tokenizer",
            f"{path} holds {[file.name for file in models]}; keep one, or name the tokenizer's path",
        )
    return models[0] if models else None


def _here(path: Path) -> list[str]:
    return sorted(file.name for file in path.glob("*.safetensors"))[:10]
