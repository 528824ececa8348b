"""A small tokenizer of the same build as PaliGemma's, trained here on a text of our own.

Like Gemma's: byte-fallback BPE, spaces as ``▁``, every digit a token of its own, ids pad 0, eos 1, bos 2, unk 3. It
stands in where the gated vocabulary of 256,000 is not at hand: tests, the demo and the built-in checkpoint.
"""

from __future__ import annotations

import json

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

VOCABULARY = 512
SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")

_VERBS = "pick up|put down|grasp|lift|move|push|pull|open|close|stack|turn|wipe|fold|insert|pour|place|hand over|sort"
_THINGS = "block|cube|cup|bowl|plate|drawer|door|towel|bottle|lid|peg|spoon|basket|tray|box|screw|handle|button"
_COLOURS = "red|green|blue|yellow|black|white|orange|grey"
_PLACES = (
    "on the table|into the bowl|next to the plate|from the shelf|to the left|to the right|in front of the robot|"
    "behind the box|under the lamp|with both arms|and let go|slowly"
)


def small_tokenizer() -> Tokenizer:
    """Train it; the result is the same on every machine."""
    tokenizer = Tokenizer(models.BPE())
    _add_gemma_shape(tokenizer)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - 256, special_tokens=[], show_progress=False, initial_alphabet=_alphabet()
    )
    tokenizer.train_from_iterator(_text(), trainer)
    return _with_byte_fallback(tokenizer)


def _text() -> list[str]:
    lists = [words.split("|") for words in (_VERBS, _THINGS, _COLOURS, _PLACES)]
    verbs, things, colours, places = lists
    lines = []
    for index in range(len(verbs) * len(things)):
        verb, thing = verbs[index % len(verbs)], things[index // len(verbs)]
        colour, place = colours[index * 5 % len(colours)], places[index * 7 % len(places)]
        lines.append(f"Task: {verb} the {colour} {thing} {place}, State: 0 128 255;\nAction: ")
    return lines


def _alphabet() -> list[str]:
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    return ["▁", "\n", *letters]


def _add_gemma_shape(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("▁"), "merged_with_next"),
            pre_tokenizers.Split(Regex("\n"), "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
        ]
    )


def _with_byte_fallback(trained: Tokenizer) -> Tokenizer:
    """Specials first, then the 256 bytes, then what was learnt: the order of Gemma's own vocabulary."""
    learnt = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *(piece for piece, _ in learnt)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = _merges(trained)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    _add_gemma_shape(tokenizer)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in SPECIAL])
    return tokenizer


def _merges(trained: Tokenizer) -> list[tuple[str, str]]:
    # The library has no getter for merges; they stand in its own serialisation.
    merges = json.loads(trained.to_str())["model"]["merges"]
    return [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in merges]
