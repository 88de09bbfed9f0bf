"""Generated prompts have an exact length; models with random weights have their named size."""

import json
from pathlib import Path

import pytest

from services.commands.bench import random_model
from services.commands.bench.load.prompts import PromptGenerator
from shared.errors import UsageError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    silent = random_model._write_tokenizer(folder, random_model.PRESETS["tiny"])
    (folder / "silent.json").write_text(json.dumps(silent))
    return folder


def test_generated_token_prompts_have_requested_length_and_different_first_tokens(
    folder: Path,
) -> None:
    """No two prompts share their first token, so that a prefix cache finds nothing."""
    maker = PromptGenerator(folder)
    prompts = [maker.token_prompt(64) for _ in range(500)]
    assert {len(prompt) for prompt in prompts} == {64}
    assert len({prompt[0] for prompt in prompts}) == 500


def test_generated_text_prompts_encode_to_requested_number_of_tokens(folder: Path) -> None:
    """The model's own tokenizer counts the requested number of tokens in each text prompt."""
    maker = PromptGenerator(folder)
    for length in (1, 2, 64, 1_024):
        assert maker.count(maker.text_prompt(length)) == length


def test_two_prompt_generators_make_equal_prompts_when_their_seeds_are_equal(folder: Path) -> None:
    """A second run measures the same prompts; another seed gives others."""
    one, other, third = (
        PromptGenerator(folder),
        PromptGenerator(folder),
        PromptGenerator(folder, seed=2),
    )
    assert one.token_prompt(32) == other.token_prompt(32) != third.token_prompt(32)


def test_generated_prompts_contain_no_token_whose_embedding_is_zero(folder: Path) -> None:
    """Tokens with zero embeddings are end of text and bytes outside ASCII."""
    silent = set(json.loads((folder / "silent.json").read_text()))
    assert {0, 1, 2} <= silent
    assert 100 < len(silent) < 600
    maker = PromptGenerator(folder)
    assert not silent.intersection(maker.token_prompt(2_000))


def test_prompt_generator_finds_32_tokens_whose_texts_contain_one_letter_exactly_once(
    folder: Path,
) -> None:
    """The number of these letters in a stream is therefore the number of its tokens."""
    maker = PromptGenerator(folder)
    letter, tokens = maker.marked_words()
    texts = dict(maker._words)
    assert len(tokens) >= 32
    assert all(texts[token].count(letter) == 1 for token in tokens)


def test_prompt_generator_refuses_model_folder_without_tokenizer(tmp_path: Path) -> None:
    """The error for a folder without a tokenizer says which folder to give."""
    with pytest.raises(UsageError, match="holds no tokenizer"):
        PromptGenerator(tmp_path)


def test_random_model_is_refused_when_preset_is_unknown_or_folder_exists(tmp_path: Path) -> None:
    """An unknown preset gives the known ones; an existing folder is not overwritten."""
    with pytest.raises(UsageError, match="choose one of tiny"):
        random_model.make_random_model(tmp_path / "new", "7b")
    with pytest.raises(UsageError, match="already exists"):
        random_model.make_random_model(tmp_path, "tiny")


def test_random_model_presets_have_documented_numbers_of_weights() -> None:
    """The presets have 7.3 and 22 million, and 0.6, 4.0 and 7.6 billion weights."""
    sizes = {}
    for name, preset in random_model.PRESETS.items():
        layer = random_model._layer_shapes(preset, 0).values()
        outer = random_model._outer_shapes(preset).values()
        sizes[name] = sum(map(_count, outer)) + preset.layers * sum(map(_count, layer))
    assert sizes["tiny"] == pytest.approx(7.3e6, rel=0.02)
    assert sizes["long"] == pytest.approx(22e6, rel=0.02)
    assert sizes["0.6b"] == pytest.approx(0.6e9, rel=0.02)
    assert sizes["4b"] == pytest.approx(4.0e9, rel=0.02)
    assert sizes["8b"] == pytest.approx(7.6e9, rel=0.02)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
