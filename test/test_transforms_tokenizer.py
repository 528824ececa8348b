"""Prompts become exactly the ids the model was trained on, from either kind of tokenizer file."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers
import torch
from gemma_tokenizer import gemma_tokenizer_path
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from pi05_ros.checkpoint.statistics import read_statistics
from pi05_ros.errors import CheckpointError, ObservationError
from pi05_ros.transforms.normalization import Normalizer
from pi05_ros.transforms.prompt import discretize_state
from pi05_ros.transforms.tokenizer import Tokenizer, load_tokenizer

GOLDEN = Path(__file__).parent / "golden"
PROMPTS = json.loads((GOLDEN / "preproc_golden.json").read_text())["tokenizer_golden"]
TAIL = [235289, 108, 4022, 235292, 235248]  # ";\nAction: "


@pytest.fixture(scope="module")
def gemma() -> Tokenizer:
    return load_tokenizer(gemma_tokenizer_path())


def bins_of(item: dict) -> np.ndarray | None:
    return None if item["state"] is None else discretize_state(np.array(item["state"]))


@pytest.mark.parametrize("item", [p for p in PROMPTS if p["n"] < 200], ids=lambda p: p["task"][:20])
def test_gemma_ids(item: dict, gemma: Tokenizer) -> None:
    ids, mask, report = gemma.encode_prompt(item["task"], bins_of(item), 200)
    assert ids.dtype == torch.int64 and ids.shape == (200,)
    assert mask.dtype == torch.bool and mask.shape == (200,)
    assert ids[: item["n"]].tolist() == item["ids"]
    assert mask.tolist() == [True] * item["n"] + [False] * (200 - item["n"])
    assert not ids[item["n"] :].any()
    assert (report.tokens, report.tokens_cut) == (item["n"], 0)


def test_gemma_ids_of_the_written_example(gemma: Tokenizer) -> None:
    ids, _, report = gemma.encode_prompt("pick up the block", [128, 128, 0, 255], 200)
    assert ids[: report.tokens].tolist() == [
        2, 7071, 235292, 4788, 908, 573, 3963, 235269, 3040, 235292, 235248, 235274, 235284, 235321, 235248, 235274,
        235284, 235321, 235248, 235276, 235248, 235284, 235308, 235308, 235289, 108, 4022, 235292, 235248,
    ]  # fmt: skip
    assert (gemma.bos_id, gemma.vocab_size) == (2, 256000)


def test_an_overlong_prompt_keeps_its_state_where_the_references_cut_it(gemma: Tokenizer) -> None:
    (item,) = [p for p in PROMPTS if p["n"] == 200]
    assert item["ids"][-5:] != TAIL  # the references lose the state
    ids, mask, report = gemma.encode_prompt(item["task"], bins_of(item), 200)
    assert mask.all() and report.tokens == 200
    assert ids[-5:].tolist() == TAIL
    tail = gemma.encode_prompt("", bins_of(item), 200)[2].tokens
    kept = 200 - tail
    assert ids[: kept + 2].tolist() == item["ids"][: kept + 2]
    whole = gemma.encode_prompt(item["task"], bins_of(item), 1000)[2]
    assert report.tokens_cut == whole.tokens - 200
    assert report.text.endswith(", State: 128;\nAction: ")


def test_lerobot_pipeline_tokens(gemma: Tokenizer) -> None:
    golden = load_file(GOLDEN / "lerobot_e2e.safetensors")
    about = json.loads((GOLDEN / "lerobot_e2e.json").read_text())
    (file,) = (GOLDEN / "hub_style_tiny").glob("policy_preprocessor*normalizer*.safetensors")
    normalizer = Normalizer(read_statistics(file)["state"], "quantile", "lerobot", "state")
    bins = discretize_state(normalizer.normalize(golden["raw.state"].numpy()))
    ids, mask, report = gemma.encode_prompt(about["task"], bins, 200)
    assert report.text == about["prompt"][0]
    assert torch.equal(ids, golden["tokens.gemma_ids"][0])
    assert torch.equal(mask, golden["token_mask"][0])
    assert torch.equal(torch.where(mask, ids % 512, 0), golden["tokens.tiny_ids"][0])


def test_openpi_pipeline_tokens(gemma: Tokenizer) -> None:
    raw = load_file(GOLDEN / "lerobot_e2e.safetensors")["raw.state"].numpy()
    task = json.loads((GOLDEN / "lerobot_e2e.json").read_text())["task"]
    statistics = read_statistics(GOLDEN / "openpi_assets" / "trossen" / "norm_stats.json")["state"]
    bins = discretize_state(Normalizer(statistics, "quantile", "openpi", "state").normalize(raw))
    ids, mask, _ = gemma.encode_prompt(task, bins, 200)
    assert torch.equal(torch.where(mask, ids % 512, 0), load_file(GOLDEN / "openpi_e2e.safetensors")["tokens.tiny_ids"])


@pytest.mark.parametrize("text", ["<eos>", "<bos>", "<pad>", "<image>", "a<eos>b", "<unk>"])
def test_special_tokens_in_a_task_are_plain_text(text: str, gemma: Tokenizer) -> None:
    ids, _, report = gemma.encode_prompt(text, None, 200)
    used = ids[: report.tokens].tolist()
    assert not {0, 1, 2, 3}.intersection(used[1:])
    vocabulary = tokenizers.Tokenizer.from_file(str(gemma.path))
    assert "".join(vocabulary.id_to_token(i) for i in used[1:]) == text + "\n"


def test_an_unfittable_state_is_refused(gemma: Tokenizer) -> None:
    with pytest.raises(ObservationError, match="60 state dimensions are too many") as caught:
        gemma.encode_prompt("pick", [128] * 60, 200)
    assert caught.value.code == "observation.prompt_too_long"


def test_a_task_of_absurd_length_is_refused_before_it_is_encoded(gemma: Tokenizer) -> None:
    with pytest.raises(ObservationError, match="1000000 characters"):
        gemma.encode_prompt("x" * 1_000_000, [0], 200)


def test_five_thousand_characters_are_shortened(gemma: Tokenizer) -> None:
    task = "move the red cube onto the blue one, then " * 120
    _, mask, report = gemma.encode_prompt(task, [1, 2, 3], 200)
    assert report.tokens <= 200 and mask.sum() == report.tokens and report.tokens_cut > 800
    assert report.text.endswith(", State: 1 2 3;\nAction: ")
    without_state = gemma.encode_prompt(task, None, 200)
    assert without_state[0][without_state[2].tokens - 1] == 108


TEXT = [
    "Task: pick up the red block, State: 0 12 128 255;\nAction: ",
    "put the object into the container and close the drawer",
    "把杯子放下 öffne die Schublade, déplace le bloc",
    "open the top drawer! then move left_arm to (3, 4) <tag>",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small SentencePiece model of Gemma's kind: BPE with byte fallback, no dummy prefix, spaces kept."""
    buffer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT * 20),
        model_writer=buffer,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        split_digits=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        character_coverage=1.0,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        user_defined_symbols=["\n", "<loc0001>"],
        num_threads=1,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("sentencepiece") / "tokenizer.model"
    path.write_bytes(buffer.getvalue())
    return path


@pytest.fixture(scope="module")
def converted(trained: Path) -> Path:
    """The same vocabulary as a tokenizer.json, with a truncation, a padding and an image token as public files have."""
    model = sentencepiece.SentencePieceProcessor(model_file=str(trained))
    pieces = [model.id_to_piece(i) for i in range(model.get_piece_size())]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    splits = [
        (vocabulary[piece], piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary and not piece.startswith("<")
    ]
    bpe = tokenizers.models.BPE(
        vocab=vocabulary,
        merges=[(left, right) for _, left, right in sorted(splits)],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    tokenizer.add_special_tokens(["<pad>", "<eos>", "<bos>", "<unk>", "<image>"])
    tokenizer.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in ("\n", "<loc0001>")])
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=16)
    path = trained.parent / "converted" / "tokenizer.json"
    path.parent.mkdir()
    tokenizer.save(str(path))
    return path


def test_sentencepiece_ids(trained: Path) -> None:
    model = sentencepiece.SentencePieceProcessor(model_file=str(trained))
    tokenizer = load_tokenizer(trained)
    assert (tokenizer.bos_id, tokenizer.vocab_size) == (2, 420)
    ids, _, report = tokenizer.encode_prompt(" open_the drawer", [0, 255], 200)
    text = "Task: open the drawer, State: 0 255;\nAction: "
    assert ids[: report.tokens].tolist() == [2, *model.encode(text)]
    assert model.decode(ids[1 : report.tokens].tolist()) == text
    ids, _, report = tokenizer.encode_prompt("open the drawer", None, 200)
    assert ids[: report.tokens].tolist() == [2, *model.encode("open the drawer"), *model.encode("\n")]


@pytest.mark.parametrize("text", ["<eos>", "a <bos> b", "<pad>", "<image>"])
def test_sentencepiece_reads_special_tokens_as_text(text: str, trained: Path) -> None:
    model = sentencepiece.SentencePieceProcessor(model_file=str(trained))
    ids, _, report = load_tokenizer(trained).encode_prompt(text, None, 200)
    used = ids[1 : report.tokens].tolist()
    assert not {0, 1, 2}.intersection(used) and model.decode(used) == text + "\n"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    task=st.lists(
        st.sampled_from(
            [*" ▁_.,!<>", "<eos>", "<bos>", "<unk>", "<image>", "<loc0001>", "the drawer", "12", "把杯", "é"]
        )
        | st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
        max_size=12,
    ).map("".join),
    bins=st.none() | st.lists(st.integers(-1, 255), min_size=1, max_size=8),
    max_length=st.integers(60, 120),
)
def test_both_loaders_agree(task: str, bins: list[int] | None, max_length: int, trained: Path, converted: Path) -> None:
    ids, mask, report = _loaded(trained).encode_prompt(task, bins, max_length)
    other_ids, other_mask, other_report = _loaded(converted).encode_prompt(task, bins, max_length)
    assert torch.equal(ids, other_ids) and torch.equal(mask, other_mask) and report == other_report
    assert int(ids.max()) < _loaded(trained).vocab_size == _loaded(converted).vocab_size


_tokenizers: dict[Path, Tokenizer] = {}


def _loaded(path: Path) -> Tokenizer:
    return _tokenizers.setdefault(path, load_tokenizer(path))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(task=st.text(st.characters(exclude_categories=["Cs"]), max_size=80), max_length=st.integers(45, 90))
def test_a_shortened_prompt_is_the_encoding_of_a_beginning_of_the_task(
    task: str, max_length: int, trained: Path
) -> None:
    model = sentencepiece.SentencePieceProcessor(model_file=str(trained))
    try:
        ids, mask, report = _loaded(trained).encode_prompt(task, [0, 255, 7], max_length)
    except ObservationError as error:
        assert error.code == "observation.prompt_too_long"
        assert len(model.encode("Task: , State: 0 255 7;\nAction: ")) + 1 > max_length
        return
    assert ids[: report.tokens].tolist() == [2, *model.encode(report.text)]
    assert mask.sum() == report.tokens <= max_length
    assert report.text.endswith(", State: 0 255 7;\nAction: ") and report.text.startswith("Task: ")
    kept = report.text[len("Task: ") : -len(", State: 0 255 7;\nAction: ")]
    assert task.strip().replace("_", " ").replace("\n", " ").startswith(kept)


def test_a_folder_is_searched_and_what_is_no_tokenizer_is_refused(
    trained: Path, converted: Path, tmp_path: Path
) -> None:
    assert load_tokenizer(trained.parent).path == trained
    assert load_tokenizer(str(converted.parent)).path == converted
    (tmp_path / "broken.model").write_bytes(b"not a model")
    (tmp_path / "broken.json").write_text("{}")
    (tmp_path / "vocab.txt").write_text("a")
    for path, words in (
        (tmp_path, "holds no tokenizer"),
        (tmp_path / "absent.model", "there is no tokenizer"),
        (tmp_path / "broken.model", "cannot be read"),
        (tmp_path / "broken.json", "cannot be read"),
        (tmp_path / "vocab.txt", "expected a SentencePiece"),
    ):
        with pytest.raises(CheckpointError, match=words) as caught:
            load_tokenizer(path)
        assert caught.value.code == "checkpoint.tokenizer"


def test_a_vocabulary_without_bos_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[])).save(str(path))
    with pytest.raises(CheckpointError, match="<bos>"):
        load_tokenizer(path)
