"""Drafts that cannot work are refused at start; plans that contradict the draft rows end the
world."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from services.rank_worker.speculation.load import check_drafter, open_drafter
from services.rank_worker.speculation.loaded_drafter import LoadedDrafter
from services.rank_worker.speculation.same_tokenizer import check_same_tokenizer
from shared.configuration.settings import Config, ModelConfig, SpeculationConfig
from shared.errors import ConfigError, InvariantBroken
from shared.messages import DraftChunk
from shared.model.location import demo_folder
from tests.mlx.drafting.drafter_driver import draft_model, eagle
from tests.mlx.executor_driver import Driver, executor_of, make_prompt
from tests.mlx.models import OTHERS

Make = Callable[[str], nn.Module]
PROMPT = make_prompt(1, 10)


def _driver(model: nn.Module, draft: LoadedDrafter) -> Driver:
    """Return a driver of two sequences of ten tokens; the draft row of 1 holds all, of 2 four."""
    driver = Driver(model, row_count=3, row_tokens=16)
    driver.executor = executor_of(model, drafter=draft)
    driver.start(1, 0, PROMPT)
    driver.start(2, 1, PROMPT)
    if driver.executor.needs_draft_chunks:
        driver.step(draft_chunks=[_chunk(1, 0, 10), _chunk(2, 0, 4)])
    return driver


def _chunk(sequence_id: int, start: int, stop: int) -> DraftChunk:
    return DraftChunk(sequence_id=sequence_id, start=start, tokens=PROMPT[start:stop])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "fewer counts": ({"decodes": [1, 2], "draft_counts": [1]}, "1 draft counts for 2 decodes"),
    "counts without decodes": ({"draft_counts": [1]}, "1 draft counts for 0 decodes"),
    "both": (
        {"decodes": [1], "draft_counts": [1], "drafts": [[1]]},
        "has the ranks propose drafts",
    ),
    "a row behind": ({"decodes": [2], "draft_counts": [1]}, "its draft row holds 4 tokens"),
    "a row behind that follows": (
        {"decodes": [2], "draft_counts": [0]},
        "10 tokens is to get 0 drafts",
    ),
    "no room": ({"decodes": [1], "draft_counts": [6]}, "have room for them in 16"),
    "a gap": (
        {"draft_chunks": [_chunk(2, 5, 6)]},
        "draft chunk of 1 tokens at 5 does not continue",
    ),
    "read twice": ({"draft_chunks": [_chunk(1, 0, 2)]}, "which holds 10 tokens"),
    "too long": ({"draft_chunks": [_chunk(2, 4, 10), _chunk(1, 3, 10)]}, "at 3 does not continue"),
    "nobody": ({"draft_chunks": [_chunk(9, 0, 1)]}, "not in the batch"),
}


@pytest.mark.parametrize(("fields", "words"), WRONG.values(), ids=WRONG)
def test_a_plan_that_contradicts_the_draft_rows_is_refused(
    make_model: Make, fields: dict[str, Any], words: str
) -> None:
    """LoadedDrafter rows go on where they end, and propose where they have followed."""
    driver = _driver(make_model("qwen3"), draft_model(make_model("llama")))

    with pytest.raises(InvariantBroken, match=words):
        driver.launch(**fields)


def test_what_is_not_wrong_is_done(make_model: Make) -> None:
    """The same state takes the plans that the refused ones differ from."""
    model, draft = make_model("qwen3"), draft_model(make_model("llama"))
    _driver(model, draft).step(decodes=[1], draft_counts=[5])
    _driver(model, draft).step(decodes=[1, 2], draft_counts=[2, -1])
    driver = _driver(model, draft)
    driver.step(draft_chunks=[_chunk(2, 4, 10)], decodes=[1, 2], draft_counts=[0, 3])
    _driver(model, draft).step(decodes=[1, 2], drafts=[[1], []])


def test_a_sequence_that_waits_reads_nothing(make_model: Make) -> None:
    """Its draft row may still be cut."""
    driver = _driver(make_model("qwen3"), draft_model(make_model("llama")))
    driver.step(decodes=[1], draft_counts=[2])
    late = DraftChunk(sequence_id=1, start=13, tokens=[1])

    with pytest.raises(InvariantBroken, match="before a plan says how many"):
        driver.launch(draft_chunks=[late])


@pytest.mark.parametrize("head", [False, True])
def test_what_does_not_propose_says_so(make_model: Make, *, head: bool) -> None:
    """A rank without a draft is not asked for any; a head reads no chunks."""
    driver = Driver(make_model("qwen3"))
    if head:
        driver.executor = executor_of(make_model("qwen3"), drafter=eagle())
    driver.start(1, 0, PROMPT)

    with pytest.raises(InvariantBroken, match="this rank has no draft model"):
        driver.launch(draft_chunks=[_chunk(1, 0, 4)])
    if not head:
        with pytest.raises(InvariantBroken, match="this rank has no drafter"):
            driver.launch(decodes=[1], draft_counts=[2])
    else:
        driver.step(decodes=[1], draft_counts=[2])


@pytest.mark.parametrize("family", [*OTHERS, "deepseek_v32"])
def test_families_that_cannot_be_cut_back_are_refused(make_model: Make, family: str) -> None:
    """As a draft model and as the model that drafts are for, with a sentence, before any step."""
    odd, plain = make_model(family), make_model("qwen3")

    with pytest.raises(ConfigError, match="choose another draft model"):
        executor_of(plain, drafter=draft_model(odd))
    for draft in (draft_model(plain), eagle()):
        with pytest.raises(ConfigError, match='set it to "off"'):
            executor_of(odd, drafter=draft)


def _folder(path: Path, *, tokenizer: dict[str, Any] | None = None) -> Path:
    """Return a copy of the demo model with another tokenizer.json."""
    shutil.copytree(demo_folder(), path)
    if tokenizer is not None:
        (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


def _tokenizer() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((demo_folder() / "tokenizer.json").read_text())
    return content


def _config(draft: Path | str, method: Any = "draft_model") -> Config:
    speculation = SpeculationConfig(method=method, draft_model=str(draft))
    return Config(model=ModelConfig(path="demo"), speculation=speculation)


def test_a_draft_model_of_the_same_tokenizer_is_loaded(tmp_path: Path) -> None:
    """Another folder, another way to write the same tokenizer; whole, with its own fingerprint."""
    content = _tokenizer()
    content["truncation"] = None
    folder = _folder(tmp_path / "draft", tokenizer=content)

    opened = open_drafter(_config(folder), 8_192, mx.float32, lambda _: None)
    assert opened is not None
    draft = opened.read()
    assert draft.method == "draft_model"
    assert len(draft.fingerprint) == 32
    assert executor_of(draft.model, drafter=draft).draft_bytes_per_token == 5 * 2 * 4 * 32 * 4


@pytest.mark.parametrize("method", ["off", "ngram"])
def test_nothing_is_loaded_where_ranks_do_not_propose(method: str) -> None:
    """Whatever draft model is configured."""
    check_drafter(_config("/nowhere", method))

    assert open_drafter(_config("/nowhere", method), 8_192, mx.float32, lambda _: None) is None


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_a_draft_that_is_not_named_or_not_there_is_refused(method: str) -> None:
    """Before anything is loaded."""
    with pytest.raises(ConfigError, match="draft_model is empty"):
        check_drafter(_config("", method))
    with pytest.raises(ConfigError, match="There is no model folder"):
        check_drafter(_config("/nowhere", method))


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """One text that differs is enough; the sentence says which, and all is checked at start."""
    content = _tokenizer()
    vocabulary = content["model"]["vocab"]
    text = next(one for one, number in vocabulary.items() if number == 700)
    vocabulary["other"] = vocabulary.pop(text)
    folder = _folder(tmp_path / "draft", tokenizer=content)

    with pytest.raises(ConfigError, match=r'1 token ids differ, the first is 700: .*"other"'):
        check_drafter(_config(folder))


def test_added_tokens_count(tmp_path: Path) -> None:
    """Chat markers are tokens too."""
    content = _tokenizer()
    content["added_tokens"][-1]["content"] = "<other>"
    folder = _folder(tmp_path / "draft", tokenizer=content)

    with pytest.raises(ConfigError, match="token ids differ"):
        check_drafter(_config(folder))


def test_a_draft_model_that_lacks_tokens_is_refused(tmp_path: Path) -> None:
    """The same tokenizer, but a smaller vocabulary than it has."""
    folder = _folder(tmp_path / "draft")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 2_000}))

    with pytest.raises(
        ConfigError, match="its vocabulary has 2000 tokens, but its tokenizer has ids up to"
    ):
        check_drafter(_config(folder))


def test_older_files_are_compared_byte_by_byte(tmp_path: Path) -> None:
    """Tokenizers without a tokenizer.json; where there is nothing to compare, nobody guesses."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
    with pytest.raises(ConfigError, match=r"not both folders hold a tokenizer\.json"):
        check_same_tokenizer(ours, theirs, None)
    for folder in (ours, theirs):
        (folder / "tokenizer.model").write_bytes(b"\x00same")
    check_same_tokenizer(ours, theirs, None)
    (theirs / "merges.txt").write_text("a b")
    with pytest.raises(ConfigError, match=r"merges\.txt differs"):
        check_same_tokenizer(ours, theirs, None)


@pytest.mark.parametrize("content", ["", "[]", '{"model": {}}', '{"model": {"vocab": {"a": "b"}}}'])
def test_a_damaged_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    """With its path."""
    folder = _folder(tmp_path / "draft")
    (folder / "tokenizer.json").write_text(content)

    with pytest.raises(ConfigError, match="does not describe a tokenizer"):
        check_drafter(_config(folder))


def test_a_vocabulary_with_scores_is_understood(tmp_path: Path) -> None:
    """Unigram models list their pieces in the order of ids."""
    pieces = [["<unk>", 0.0], ["a", -1.0], ["b", -2.5]]
    for name, last in (("one", "b"), ("two", "b"), ("three", "c")):
        (tmp_path / name).mkdir()
        content = {"model": {"vocab": [*pieces[:2], [last, -2.5]]}, "added_tokens": None}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(content))

    check_same_tokenizer(tmp_path / "one", tmp_path / "two", 3)
    with pytest.raises(ConfigError, match="first is 2"):
        check_same_tokenizer(tmp_path / "one", tmp_path / "three", 3)
    with pytest.raises(ConfigError, match="has 2 tokens, but its tokenizer"):
        check_same_tokenizer(tmp_path / "one", tmp_path / "two", 2)
