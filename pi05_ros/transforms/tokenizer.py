"""PaliGemma's tokenizer from a SentencePiece ``.model`` or a ``tokenizer.json``, and the prompt's token ids.

Both loaders give the same ids. Special tokens written in a task (``<eos>``, ``<image>``) are plain text: OpenPI's
SentencePiece never parses control pieces out of text. (LeRobot's Hugging Face tokenizer does; a task could then end its
own prompt.) Pieces that a vocabulary defines for use in text, such as ``<loc0001>``, are recognised by both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from pi05_ros.errors import CheckpointError, ConfigurationError, ObservationError
from pi05_ros.transforms.prompt import TASK_END, clean_task, join_prompt

PADDING_ID = 0
# Far beyond any prompt that fits; bounds the time that shortening takes.
MAX_TASK_CHARACTERS = 20_000
FILE_NAMES = ("tokenizer.json", "tokenizer.model", "paligemma_tokenizer.model")


@dataclass(frozen=True)
class PromptReport:
    """What became of one prompt.

    Attributes:
        text: the prompt that was encoded, after shortening.
        tokens: valid tokens, beginning-of-text included.
        tokens_cut: tokens by which the task was shortened; 0 where the prompt fitted.
    """

    text: str
    tokens: int
    tokens_cut: int


class _Vocabulary(Protocol):
    bos_id: int
    size: int
    control_ids: frozenset[int]

    def encode(self, text: str) -> list[int]: ...


class _SentencePieceVocabulary:
    def __init__(self, path: Path) -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise _missing_library(path, "sentencepiece") from error
        self._processor = SentencePieceProcessor(model_file=str(path))
        self.bos_id = self._processor.bos_id()
        ids = range(self._processor.get_piece_size())
        control = {i for i in ids if self._processor.is_control(i)}
        self.control_ids = frozenset(control)
        self.size = _producible_size(set(ids) - control, self.bos_id)

    def encode(self, text: str) -> list[int]:
        return list(self._processor.encode(text))


class _JsonVocabulary:
    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as JsonTokenizer
        except ImportError as error:
            raise _missing_library(path, "tokenizers") from error
        self._tokenizer: Any = JsonTokenizer.from_file(str(path))
        # Files saved after training may carry both; padding and length are ours to decide.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True  # "encode them as text", despite the name
        bos_id = self._tokenizer.token_to_id("<bos>")
        self.bos_id = -1 if bos_id is None else bos_id
        unknown = self._tokenizer.token_to_id("<unk>")
        added = self._tokenizer.get_added_tokens_decoder()
        self.control_ids = frozenset(i for i, token in added.items() if token.special and i != unknown)
        self.size = _producible_size(
            set(self._tokenizer.get_vocab(with_added_tokens=True).values()) - self.control_ids, self.bos_id
        )

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _producible_size(text_ids: set[int], bos_id: int) -> int:
    return max(text_ids | {bos_id}) + 1


def _missing_library(path: Path, library: str) -> ConfigurationError:
    return ConfigurationError(
        "missing_library", f"{path.name} needs the Python library {library}; install it with `pip install {library}`"
    )


class Tokenizer:
    """Encodes prompts; made by `load_tokenizer`.

    Attributes:
        vocab_size: one more than the highest id that a prompt can hold. Control tokens no prompt holds (PaliGemma's
            ``<image>`` in ``tokenizer.json`` lies beyond the model's embedding) do not count.
        bos_id: the id that begins every prompt (Gemma: 2).
    """

    def __init__(self, vocabulary: _Vocabulary, path: Path) -> None:
        if vocabulary.bos_id < 0:
            raise CheckpointError(
                "tokenizer", f"{path} has no beginning-of-text token <bos>; every prompt starts with it"
            )
        self._vocabulary = vocabulary
        self.path = path
        self.vocab_size = vocabulary.size
        self.bos_id = vocabulary.bos_id

    def encode_prompt(
        self, task: str, bins: Sequence[int] | None, max_length: int
    ) -> tuple[torch.Tensor, torch.Tensor, PromptReport]:
        """Encode a task with the state's bins (``None``: a model without state in its prompt).

        A prompt that is too long loses the end of its task, never ``, State: ...;\\nAction: ``; the references cut
        the right end instead, and with it the state.

        Returns:
            ids: int64 [max_length], padded with 0 on the right; begins with bos, has no eos.
            mask: bool [max_length], true where ``ids`` is valid.
            report: what was encoded.

        Raises:
            ObservationError: ``observation.prompt_too_long`` where the state alone does not fit or the task has more
                than `MAX_TASK_CHARACTERS`, and ``observation.prompt`` for text that cannot be encoded.
        """
        task = clean_task(task)
        if len(task) > MAX_TASK_CHARACTERS:
            raise ObservationError(
                "prompt_too_long", f"the task has {len(task)} characters; at most {MAX_TASK_CHARACTERS} are read"
            )
        full = self._encode(task, bins)
        used, cut = full, 0
        if len(full) > max_length:
            task, used = self._shorten(task, bins, max_length)
            cut = len(full) - len(used)
        ids = torch.full((max_length,), PADDING_ID, dtype=torch.int64)
        ids[: len(used)] = torch.tensor(used, dtype=torch.int64)
        mask = torch.zeros(max_length, dtype=torch.bool)
        mask[: len(used)] = True
        return ids, mask, PromptReport(join_prompt(task, bins), len(used), cut)

    def _encode(self, task: str, bins: Sequence[int] | None) -> list[int]:
        if bins is None:
            # OpenPI encodes the newline on its own, so that it never merges with the task.
            ids = self._vocabulary.encode(task) + self._vocabulary.encode(TASK_END)
        else:
            ids = self._vocabulary.encode(join_prompt(task, bins))
        smuggled = self._vocabulary.control_ids.intersection(ids)
        if smuggled:
            raise ObservationError(
                "prompt", f"the task {task[:80]!r} encodes to the control tokens {sorted(smuggled)}; reword it"
            )
        return [self.bos_id, *ids]

    def _shorten(self, task: str, bins: Sequence[int] | None, max_length: int) -> tuple[str, list[int]]:
        """The longest beginning of the task that fits, found by bisection over its characters."""
        fitting, kept = "", self._encode("", bins)
        if len(kept) > max_length:
            raise ObservationError(
                "prompt_too_long",
                f"the prompt without its task already takes {len(kept)} tokens and the model reads {max_length}; "
                f"{0 if bins is None else len(bins)} state dimensions are too many",
                {"tokens": len(kept), "max_length": max_length},
            )
        low, high = 0, len(task)
        while high - low > 1:
            middle = (low + high) // 2
            candidate = task[:middle].rstrip()
            ids = self._encode(candidate, bins)
            if len(ids) <= max_length:
                low, fitting, kept = middle, candidate, ids
            else:
                high = middle
        return fitting, kept


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer from a file, or from a folder that holds ``tokenizer.json`` or a SentencePiece ``.model``.

    Raises:
        CheckpointError: ``checkpoint.tokenizer`` where there is none or it cannot be read.
        ConfigurationError: ``config.missing_library`` where the library for the file's format is not installed.
    """
    path = Path(path)
    file = _find_file(path)
    readers: dict[str, type[_SentencePieceVocabulary | _JsonVocabulary]] = {
        ".model": _SentencePieceVocabulary,
        ".json": _JsonVocabulary,
    }
    if file.suffix not in readers:
        raise CheckpointError("tokenizer", f"expected a SentencePiece .model or a tokenizer.json, got {file}")
    try:
        vocabulary = readers[file.suffix](file)
    except ConfigurationError:
        raise
    except Exception as error:  # `tokenizers` raises bare Exception
        raise CheckpointError("tokenizer", f"{file} cannot be read as a tokenizer: {error}") from error
    return Tokenizer(vocabulary, file)


def _find_file(path: Path) -> Path:
    if path.is_dir():
        for name in FILE_NAMES:
            if (path / name).is_file():
                return path / name
        raise CheckpointError("tokenizer", f"{path} holds no tokenizer; expected one of {', '.join(FILE_NAMES)}")
    if not path.is_file():
        raise CheckpointError("tokenizer", f"there is no tokenizer at {path}")
    return path
