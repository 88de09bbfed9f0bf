"""Drafters that cannot work, and plans that contradict the draft rows."""

import json
import shutil
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
from tests.mlx.drafting.drafter_driver import draft_model_of, random_eagle_head
from tests.mlx.executor_driver import ExecutorDriver, make_executor, make_prompt
from tests.mlx.models import STATEFUL_FAMILIES, MakeModel

PROMPT = make_prompt(1, 10)


def _driver(model: nn.Module, draft: LoadedDrafter) -> ExecutorDriver:
    """Return a driver with two sequences of ten tokens.

    The draft row of sequence 1 has all ten tokens, that of sequence 2 has four.
    """
    driver = ExecutorDriver(model, row_count=3, row_tokens=16)
    driver.executor = make_executor(model, drafter=draft)
    driver.start(1, 0, PROMPT)
    driver.start(2, 1, PROMPT)
    if driver.executor.proposer.needs_chunks:
        driver.step(draft_chunks=[_chunk(1, 0, 10), _chunk(2, 0, 4)])
    return driver


def _chunk(sequence_id: int, start: int, stop: int) -> DraftChunk:
    return DraftChunk(sequence_id=sequence_id, start=start, tokens=PROMPT[start:stop])


INVALID_PLANS: dict[str, tuple[dict[str, Any], str]] = {
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


@pytest.mark.parametrize(("fields", "message"), INVALID_PLANS.values(), ids=INVALID_PLANS)
def test_plan_contradicting_draft_rows_raises_invariant_broken(
    make_model: MakeModel, fields: dict[str, Any], message: str
) -> None:
    """A plan whose draft chunks or counts contradict the draft rows raises InvariantBroken."""
    driver = _driver(make_model("qwen3"), draft_model_of(make_model("llama")))

    with pytest.raises(InvariantBroken, match=message):
        driver.launch(**fields)


def test_valid_variants_of_refused_draft_plans_are_executed(make_model: MakeModel) -> None:
    """The same state accepts the valid variants of the refused plans."""
    model, draft = make_model("qwen3"), draft_model_of(make_model("llama"))
    _driver(model, draft).step(decodes=[1], draft_counts=[5])
    _driver(model, draft).step(decodes=[1, 2], draft_counts=[2, -1])
    driver = _driver(model, draft)
    driver.step(draft_chunks=[_chunk(2, 4, 10)], decodes=[1, 2], draft_counts=[0, 3])
    _driver(model, draft).step(decodes=[1, 2], drafts=[[1], []])


def test_draft_chunk_for_sequence_with_unverified_drafts_is_refused(make_model: MakeModel) -> None:
    """A sequence with unverified drafts gets no draft chunk, because its draft row may be cut."""
    driver = _driver(make_model("qwen3"), draft_model_of(make_model("llama")))
    driver.step(decodes=[1], draft_counts=[2])
    late = DraftChunk(sequence_id=1, start=13, tokens=[1])

    with pytest.raises(InvariantBroken, match="before a plan says how many"):
        driver.launch(draft_chunks=[late])


@pytest.mark.parametrize("head", [False, True])
def test_rank_refuses_draft_chunks_without_draft_model_and_draft_counts_without_drafter(
    make_model: MakeModel, *, head: bool
) -> None:
    """A rank without a draft model refuses draft chunks; one without a drafter also refuses draft
    counts.
    """
    driver = ExecutorDriver(make_model("qwen3"))
    if head:
        driver.executor = make_executor(make_model("qwen3"), drafter=random_eagle_head())
    driver.start(1, 0, PROMPT)

    with pytest.raises(InvariantBroken, match="this rank has no draft model"):
        driver.launch(draft_chunks=[_chunk(1, 0, 4)])
    if not head:
        with pytest.raises(InvariantBroken, match="this rank has no drafter"):
            driver.launch(decodes=[1], draft_counts=[2])
    else:
        driver.step(decodes=[1], draft_counts=[2])


@pytest.mark.parametrize("family", [*STATEFUL_FAMILIES, "deepseek_v32"])
def test_models_without_roll_back_are_refused_as_draft_and_target_models(
    make_model: MakeModel, family: str
) -> None:
    """Models that cannot be rolled back are refused as draft models and as target models."""
    odd, plain = make_model(family), make_model("qwen3")

    with pytest.raises(ConfigError, match="choose another draft model"):
        make_executor(plain, drafter=draft_model_of(odd))
    for draft in (draft_model_of(plain), random_eagle_head()):
        with pytest.raises(ConfigError, match='set it to "off"'):
            make_executor(odd, drafter=draft)


def _folder(path: Path, *, tokenizer: dict[str, Any] | None = None) -> Path:
    """Return a copy of the demo model, with another tokenizer.json if one is given."""
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


def test_draft_model_with_equal_tokenizer_in_other_form_is_loaded(tmp_path: Path) -> None:
    """A draft model with an equal tokenizer in another file form is loaded with a fingerprint of
    its own.
    """
    content = _tokenizer()
    content["truncation"] = None
    folder = _folder(tmp_path / "draft", tokenizer=content)

    opened = open_drafter(_config(folder), 8_192, mx.float32, lambda _: None)
    assert opened is not None
    draft = opened.read()
    assert draft.method == "draft_model"
    assert len(draft.fingerprint) == 32
    assert make_executor(draft.model, drafter=draft).proposer.bytes_per_token == 5 * 2 * 4 * 32 * 4


@pytest.mark.parametrize("method", ["off", "ngram"])
def test_no_draft_model_is_loaded_when_method_needs_none(method: str) -> None:
    """No draft model is loaded when the method needs none, even if one is configured."""
    check_drafter(_config("/nowhere", method))

    assert open_drafter(_config("/nowhere", method), 8_192, mx.float32, lambda _: None) is None


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_empty_draft_model_setting_or_missing_folder_is_refused(method: str) -> None:
    """An empty draft_model setting and a missing folder are refused before anything is loaded."""
    with pytest.raises(ConfigError, match="draft_model is empty"):
        check_drafter(_config("", method))
    with pytest.raises(ConfigError, match="There is no model folder"):
        check_drafter(_config("/nowhere", method))


def test_draft_model_with_one_differing_token_id_is_refused(tmp_path: Path) -> None:
    """A single token id that differs is refused with the id and both tokens."""
    content = _tokenizer()
    vocabulary = content["model"]["vocab"]
    text = next(one for one, number in vocabulary.items() if number == 700)
    vocabulary["other"] = vocabulary.pop(text)
    folder = _folder(tmp_path / "draft", tokenizer=content)

    with pytest.raises(ConfigError, match=r'1 token ids differ, the first is 700: .*"other"'):
        check_drafter(_config(folder))


def test_draft_model_with_different_added_tokens_is_refused(tmp_path: Path) -> None:
    """Added tokens such as chat markers must agree too."""
    content = _tokenizer()
    content["added_tokens"][-1]["content"] = "<other>"
    folder = _folder(tmp_path / "draft", tokenizer=content)

    with pytest.raises(ConfigError, match="token ids differ"):
        check_drafter(_config(folder))


def test_draft_model_with_vocabulary_below_its_tokenizer_is_refused(tmp_path: Path) -> None:
    """A draft model whose vocabulary is smaller than its tokenizer is refused."""
    folder = _folder(tmp_path / "draft")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 2_000}))

    with pytest.raises(
        ConfigError, match="its vocabulary has 2000 tokens, but its tokenizer has ids up to"
    ):
        check_drafter(_config(folder))


def test_draft_model_without_tokenizer_json_is_accepted_only_with_equal_tokenizer_files(
    tmp_path: Path,
) -> None:
    """Without a tokenizer.json a draft model is accepted only if both folders have equal tokenizer
    files.
    """
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
def test_draft_model_with_damaged_tokenizer_json_is_refused(tmp_path: Path, content: str) -> None:
    """A tokenizer.json that does not describe a tokenizer is refused."""
    folder = _folder(tmp_path / "draft")
    (folder / "tokenizer.json").write_text(content)

    with pytest.raises(ConfigError, match="does not describe a tokenizer"):
        check_drafter(_config(folder))


def test_draft_model_with_different_unigram_token_is_refused(tmp_path: Path) -> None:
    """Unigram vocabularies, lists with scores in the order of ids, are compared."""
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
