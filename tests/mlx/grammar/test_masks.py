"""Masks of one step: the tokens that each row allows, as the device sees them."""

import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.rank_worker.sampling.grammar.compiler import GrammarCompiler
from services.rank_worker.sampling.grammar.masks import (
    MaskedSequence,
    MaskFiller,
    StepMasks,
    exclusion_bits_of_host,
    exclusions_of_device,
)
from services.rank_worker.sampling.grammar.matcher import Matcher
from shared.errors import InvariantBroken
from shared.messages import Grammar
from tests.mlx.grammar.tiny_tokenizer import (
    END,
    MARK,
    make_compiler,
    regex,
    text_of,
    token_texts,
)
from tests.mlx.models import VOCAB

TEXTS = token_texts()
DIGITS = "[0-9]{2,4}"


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    """A compiler for the tiny tokenizer."""
    return make_compiler(tmp_path_factory.mktemp("tokenizer"))


def fill(*sequences: tuple[Matcher | None, list[int]], vocab_size: int = VOCAB) -> StepMasks:
    """Fill the masks of sequences 1, 2, ... with their drafts."""
    filler = MaskFiller(vocab_size)
    return filler.fill(
        [MaskedSequence(n, matcher, drafts) for n, (matcher, drafts) in enumerate(sequences, 1)]
    )


def allowed_sets(masks: StepMasks) -> list[set[int]]:
    """Return the allowed tokens of each row, as the device sees them."""
    rows = np.array(masks.exclusions == 0)
    return [set(np.flatnonzero(row).tolist()) for row in rows]


def ids(text: str) -> list[int]:
    """Return one token per character."""
    return [TEXTS.index(character) for character in text]


def test_mask_of_every_state_allows_exactly_the_tokens_that_can_go_on(
    compiler: GrammarCompiler,
) -> None:
    """A token is allowed if some text of the grammar goes on with it; the end, if it may end."""
    for text in ["", "1", "12", "123", "1234"]:
        matcher = compiler.matcher(regex(DIGITS), ids(text))
        [found] = allowed_sets(fill((matcher, [])))
        expected = {
            token
            for token, piece in enumerate(TEXTS)
            if re.fullmatch(r"[0-9]{1,4}", text + piece) and piece
        }
        assert found == expected | ({END} if len(text) >= 2 else set()), text


def test_rows_without_a_grammar_beside_rows_with_one_allow_every_token(
    compiler: GrammarCompiler,
) -> None:
    """Rows without a grammar have a mask of ones, with and without drafts."""
    matcher = compiler.matcher(regex(DIGITS), [])
    masks = fill((None, []), (matcher, []), (None, [1, 2]))
    everything = set(range(VOCAB))
    sets = allowed_sets(masks)
    assert sets[0] == everything
    assert sets[2:] == [everything] * 3
    assert sets[1] < everything


def test_ids_that_only_the_model_has_are_never_allowed_by_a_grammar(
    compiler: GrammarCompiler,
) -> None:
    """A model with a padded vocabulary cannot draw the padding."""
    matcher = compiler.matcher(regex(".*"), [])
    sets = allowed_sets(fill((matcher, []), (None, []), vocab_size=300))
    assert max(sets[0]) < VOCAB
    assert sets[1] == set(range(300))


def test_drafts_are_masked_position_by_position_as_far_as_the_grammar_allows_them(
    compiler: GrammarCompiler,
) -> None:
    """Row n has the mask after n drafts; rows after the first refused draft do not matter."""
    drafts = ids("123x5")
    sets = allowed_sets(fill((compiler.matcher(regex(DIGITS), []), drafts)))
    for n in range(4):
        alone = compiler.matcher(regex(DIGITS), drafts[:n])
        assert sets[n] == allowed_sets(fill((alone, [])))[0], n
    assert sets[4:] == [set(range(VOCAB))] * 2


def test_matcher_whose_drafts_were_masked_goes_on_from_the_tokens_that_were_drawn(
    compiler: GrammarCompiler,
) -> None:
    """Masking drafts does not move the matcher, not even past the end of the grammar."""
    matcher = compiler.matcher(regex(DIGITS), [])
    fill((matcher, [*ids("1234"), END, 3]))
    matcher.take(ids("1"))
    assert (
        allowed_sets(fill((matcher, [])))[0]
        == allowed_sets(fill((compiler.matcher(regex(DIGITS), ids("1")), [])))[0]
    )


def test_grammar_with_a_mark_holds_from_the_token_after_it_also_within_drafts(
    compiler: GrammarCompiler,
) -> None:
    """Before the mark, such as the end of the reasoning, only ends and barred ids are excluded."""
    grammar = regex(DIGITS, begin_ids=[MARK], barred_ids=[7])
    before = set(range(VOCAB)) - {END, 7}
    for drafts in ([], [5, 6], [5, END, MARK, *ids("1")]):
        sets = allowed_sets(fill((compiler.matcher(grammar, []), drafts)))
        assert sets == [before] * (len(drafts) + 1)
    sets = allowed_sets(fill((compiler.matcher(grammar, []), [5, MARK, *ids("1")])))
    plain = allowed_sets(fill((compiler.matcher(regex(DIGITS), []), ids("1"))))
    assert sets == [before, before, *plain]
    resumed = compiler.matcher(grammar, [5, MARK, *ids("1")])
    assert allowed_sets(fill((resumed, []))) == plain[1:]


def test_completion_that_has_ended_allows_every_token(compiler: GrammarCompiler) -> None:
    """A step that was launched before the end was known has no mask and no failure."""
    matcher = compiler.matcher(regex(DIGITS), [*ids("12"), END])
    masks = fill((matcher, []))
    assert allowed_sets(masks) == [set(range(VOCAB))]
    assert not masks.failures


@pytest.mark.parametrize(
    ("grammar", "generated", "named"),
    [
        (Grammar(text="start: [", end_ids=[END]), "", "Expected token"),
        (Grammar(text='{"grammars": [{"json_schema": {"type": 5}}]}', end_ids=[END]), "", "string"),
        (regex(DIGITS), "1x", "byte 'x'"),
        (regex("\\x01"), "", "allows no token"),
    ],
)
def test_grammar_that_fails_leaves_its_row_without_a_mask_and_says_why(
    compiler: GrammarCompiler, grammar: Grammar, generated: str, named: str
) -> None:
    """Failures name the sequence and the cause, and other rows keep their masks."""
    bad = compiler.matcher(grammar, ids(generated))
    good = compiler.matcher(regex(DIGITS), [])
    masks = fill((bad, [4]), (good, []))
    assert [one.sequence_id for one in masks.failures] == [1]
    assert named in masks.failures[0].detail
    sets = allowed_sets(masks)
    assert sets[:2] == [set(range(VOCAB))] * 2
    assert sets[2] == allowed_sets(fill((compiler.matcher(regex(DIGITS), []), [])))[0]
    # It stays failed, and takes tokens without an error.
    bad.take([1])
    assert fill((bad, [])).failures


def test_model_without_a_tokenizer_fails_every_grammar_with_the_file_s_name(tmp_path: Path) -> None:
    """A request gets a sentence instead of ending the rank."""
    matcher = GrammarCompiler(tmp_path).matcher(regex(DIGITS), [])
    [failure] = fill((matcher, [])).failures
    assert "tokenizer.json" in failure.detail


def test_mask_before_the_tokens_of_the_last_step_are_known_is_an_error(
    compiler: GrammarCompiler,
) -> None:
    """A draw with the mask of an older state is impossible."""
    matcher = compiler.matcher(regex(DIGITS), [])
    fill((matcher, []))
    with pytest.raises(InvariantBroken, match="before the tokens"):
        fill((matcher, []))


def test_digest_of_masks_differs_where_a_mask_or_a_failure_differs(
    compiler: GrammarCompiler,
) -> None:
    """Receipts show ranks whose grammars stand at different places."""
    first = fill((compiler.matcher(regex(DIGITS), []), [])).digest()
    again = fill((compiler.matcher(regex(DIGITS), []), [])).digest()
    later = fill((compiler.matcher(regex(DIGITS), ids("12")), [])).digest()
    without = fill((None, [])).digest()
    failed = fill((compiler.matcher(regex(DIGITS), ids("x")), [])).digest()
    assert first == again
    assert len({first, later, without, failed}) == 4


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_walk_through_masks_matches_the_grammar_however_drafts_cut_it(
    compiler: GrammarCompiler, data: st.DataObject
) -> None:
    """Tokens drawn under masks, one by one or several at once as drafts, spell a matching text."""
    pattern = r"(abc|[0-9]+)(,(abc|[0-9]+)){0,3}"
    matcher = compiler.matcher(regex(pattern), [])
    tokens: list[int] = []
    for _ in range(30):
        drafts = data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=3))
        sets = allowed_sets(fill((matcher, drafts)))
        drawn: list[int] = []
        for row, draft in zip(sets, [*drafts, None], strict=True):
            choices = sorted(row)
            token = draft if draft in row else data.draw(st.sampled_from(choices))
            drawn.append(int(token or 0))
            if token != draft:
                break
        matcher.take(drawn)
        tokens += drawn
        if END in drawn:
            break
    tokens = tokens[: tokens.index(END)] if END in tokens else tokens
    text = text_of(tokens)
    if len(tokens) < 30 and matcher.constrained_drafts([]) is None:
        assert re.fullmatch(pattern, text), text
    assert not matcher.error


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_exclusions_are_zero_or_minus_infinity_in_the_dtype_of_logits(
    compiler: GrammarCompiler, dtype: mx.Dtype
) -> None:
    """So that masked logits are unchanged or minus infinity, the greatest ones too."""
    sequence = MaskedSequence(1, compiler.matcher(regex(DIGITS), []), [])
    masks = MaskFiller(VOCAB).fill([sequence, MaskedSequence(2, None, [])], dtype)
    assert masks.exclusions.dtype == dtype
    assert masks.exclusions.shape == (2, VOCAB)
    logits = mx.full((2, VOCAB), mx.finfo(dtype).max, dtype=dtype)
    masked = np.array((logits + masks.exclusions).astype(mx.float32))
    allowed = masked > 0
    assert np.isneginf(masked[~allowed]).all()
    assert (masked[allowed] == mx.finfo(dtype).max).all()
    assert allowed[1].all()
    assert set(np.flatnonzero(allowed[0]).tolist()) == allowed_sets(masks)[0]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("vocab_size", [1, 31, 64, 1_000])
def test_exclusions_of_device_equal_those_of_host(dtype: mx.Dtype, vocab_size: int) -> None:
    """GPUs spread the masks themselves; CPUs get them spread. The addends are equal bit by bit."""
    random = np.random.default_rng(vocab_size)
    shape = (3, -(-vocab_size // 32))
    bits = random.integers(-(2**31), 2**31, shape).astype(np.int32)
    forbidden = ~bits.view(np.uint8)
    host = exclusion_bits_of_host(forbidden, vocab_size, dtype)
    device = exclusions_of_device(mx.array(forbidden), vocab_size, dtype)
    assert device.dtype == dtype
    assert host.shape == device.shape == (3, vocab_size)
    assert mx.array_equal(host, device.view(host.dtype))
