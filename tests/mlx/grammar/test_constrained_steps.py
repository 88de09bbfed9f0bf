"""Steps with grammars: constrained rows match, others do not change, drafts change no text."""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from mlx import nn

from services.rank_worker.batch.step_outputs import StepResult
from services.rank_worker.device.execution_profile import ExecutionProfile
from services.rank_worker.sampling.grammar.compiler import GrammarCompiler
from shared.errors import InvariantBroken
from shared.messages import Grammar, Sampling
from tests.mlx.drafting.drafter_driver import DrafterDriver, draft_model_of, random_eagle_head
from tests.mlx.executor_driver import (
    ExecutorDriver,
    admission,
    generate_alone,
    make_executor,
    make_prompt,
    prefill_chunk,
)
from tests.mlx.grammar.tiny_tokenizer import (
    END,
    MARK,
    json_schema,
    make_compiler,
    regex,
    text_of,
    token_texts,
)
from tests.mlx.models import MakeModel
from tests.mlx.speculation.speculation_driver import NO_BLOCKS, SpeculationDriver, make_drafts

SAMPLING = Sampling(seed=8, temperature=1.3)
SETTINGS = {
    "greedy": Sampling(seed=0, temperature=0.0),
    "random": SAMPLING,
    "cut": Sampling(seed=4, temperature=1.1, top_p=0.9, top_k=40, min_p=0.01, top_logprobs=2),
    "penalized": Sampling(
        seed=5, temperature=0.7, frequency_penalty=0.7, logit_bias=[(7, 2.0)], top_logprobs=0
    ),
}
LIST = r"\[([a-z]{1,6}|[0-9]{1,4})(,([a-z]{1,6}|[0-9]{1,4})){5,8}\]"
SCHEMA = {
    "type": "object",
    "properties": {
        "abc": {"type": "integer", "minimum": 0, "maximum": 99_999},
        "de": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    },
    "required": ["abc", "de"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    """A compiler for the tiny tokenizer."""
    return make_compiler(tmp_path_factory.mktemp("tokenizer"))


def start(
    driver: ExecutorDriver,
    sequence_id: int,
    slot: int,
    prompt: list[int],
    grammar: Grammar | None,
    sampling: Sampling = SAMPLING,
    generated: list[int] | None = None,
) -> StepResult:
    """Admit a sequence with a grammar and prefill it in one chunk."""
    tokens = prompt + (generated or [])
    admitted = admission(sequence_id, slot, tokens, sampling, prompt_tokens=len(prompt))
    return driver.step(
        admitted=[msgspec.structs.replace(admitted, grammar=grammar)],
        prefill_chunks=[prefill_chunk(sequence_id, 0, len(tokens), len(tokens))],
    )


def make_driver(model: nn.Module, compiler: GrammarCompiler, **changes: Any) -> SpeculationDriver:
    """Return a driver whose executor compiles grammars."""
    return SpeculationDriver(model, block_tokens=NO_BLOCKS, grammars=compiler, **changes)


def generate(
    model: nn.Module, compiler: GrammarCompiler, grammar: Grammar, sampling: Sampling
) -> list[int]:
    """Generate one sequence with a grammar, alone and without drafts, up to its end."""
    driver = make_driver(model, compiler)
    start(driver, 1, 0, make_prompt(3, 9), grammar, sampling)
    while END not in driver.tokens[1] and len(driver.tokens[1]) < 80:
        assert not driver.step(decodes=[1]).grammar_failures
    return driver.tokens[1]


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "gemma3", "qwen3_next"])
@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
def test_constrained_sequence_ends_with_a_text_that_matches(
    make_model: MakeModel, compiler: GrammarCompiler, family: str, sampling: Sampling
) -> None:
    """A random model writes a matching list and ends only where the grammar accepts."""
    tokens = generate(make_model(family), compiler, regex(LIST), sampling)
    assert tokens[-1] == END
    assert re.fullmatch(LIST, text_of(tokens)), text_of(tokens)


def test_constrained_sequence_of_a_json_schema_is_valid_json(
    make_model: MakeModel, compiler: GrammarCompiler
) -> None:
    """The text parses, with the types and bounds of the schema."""
    for seed in range(6):
        sampling = Sampling(seed=seed, temperature=1.0)
        tokens = generate(make_model("qwen3"), compiler, json_schema(SCHEMA), sampling)
        value = json.loads(text_of(tokens))
        assert 0 <= value["abc"] <= 99_999
        assert 2 <= len(value["de"]) <= 4


@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
def test_rows_without_a_grammar_keep_their_tokens_beside_rows_with_one(
    make_model: MakeModel, compiler: GrammarCompiler, sampling: Sampling
) -> None:
    """A neighbour's grammar changes neither tokens nor log probabilities."""
    model = make_model("qwen3")
    driver = make_driver(model, compiler)
    start(driver, 1, 0, make_prompt(1, 7), None, sampling)
    start(driver, 2, 1, make_prompt(3, 9), regex(LIST), sampling)
    start(driver, 3, 2, make_prompt(2, 12), None, sampling)
    for _ in range(20):
        driver.step(decodes=[1, 2, 3])
    for one, prompt in [(1, make_prompt(1, 7)), (3, make_prompt(2, 12))]:
        assert driver.tokens[one] == generate_alone(model, prompt, 21, sampling)
    alone = generate(model, compiler, regex(LIST), sampling)
    both = driver.tokens[2]
    assert both[: len(alone)] == alone[: len(both)]


@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
def test_drafts_of_plans_change_no_token_of_a_constrained_sequence(
    make_model: MakeModel, compiler: GrammarCompiler, sampling: Sampling
) -> None:
    """Right, wrong and forbidden drafts give the text that is drawn without drafts."""
    model = make_model("qwen3")
    truth = generate(model, compiler, regex(LIST), sampling)
    driver = make_driver(model, compiler, row_count=2)
    start(driver, 1, 0, make_prompt(3, 9), regex(LIST), sampling)
    start(driver, 2, 1, make_prompt(1, 7), None, sampling)
    accepted = 0
    for count, right in [(3, 3), (1, 0), (5, 2), (4, 4), (0, 0), (7, 6), (2, 1)] * 3:
        done = len(driver.tokens[1])
        if END in driver.tokens[1]:
            break
        drafts = make_drafts(truth, done, count, right)
        result = driver.step(decodes=[1, 2], drafts={1: drafts, 2: [5] if count else []})
        accepted += len(result.tokens[0]) - 1
    got = driver.tokens[1]
    assert got[: len(truth)] == truth[: len(got)]
    assert accepted > 4
    assert driver.tokens[2] == generate_alone(
        model, make_prompt(1, 7), len(driver.tokens[2]), sampling
    )


@pytest.mark.parametrize(
    "make_draft",
    [draft_model_of, lambda _: random_eagle_head()],
    ids=["draft model", "eagle"],
)
@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
def test_drafts_of_ranks_change_no_token_of_a_constrained_sequence(
    make_model: MakeModel,
    compiler: GrammarCompiler,
    make_draft: Callable[[nn.Module], Any],
    sampling: Sampling,
) -> None:
    """A draft model and an EAGLE head under a grammar give the text without drafts."""
    model = make_model("llama")
    truth = generate(model, compiler, regex(LIST), sampling)
    driver = DrafterDriver(model, make_draft(model), row_count=1, grammars=compiler)
    start(driver, 1, 0, make_prompt(3, 9), regex(LIST), sampling)
    for count in [1, 3, 0, 5, 2, 7, 4] * 6:
        if END in driver.tokens[1]:
            break
        driver.step(decodes=[1], counts={1: count})
        driver.check_rows()
    got = driver.tokens[1]
    assert got[: len(truth)] == truth[: len(got)]


def test_sequence_that_starts_again_with_its_tokens_goes_on_as_before(
    make_model: MakeModel, compiler: GrammarCompiler
) -> None:
    """After a preemption or restart the matcher takes `generated` first, at any length of it."""
    model = make_model("qwen3")
    grammar = json_schema(SCHEMA)
    truth = generate(model, compiler, grammar, SAMPLING)
    for done in range(1, len(truth)):
        driver = make_driver(model, compiler)
        start(driver, 1, 0, make_prompt(3, 9), grammar, SAMPLING, truth[:done])
        assert driver.tokens[1] == [truth[done]], done


def test_grammar_after_a_mark_constrains_only_the_text_behind_it(
    make_model: MakeModel, compiler: GrammarCompiler
) -> None:
    """Tokens up to the mark are those without a grammar, but no end; what follows matches."""
    model = make_model("qwen3")
    sampling = Sampling(seed=2, temperature=0.9, logit_bias=[(MARK, 3.0)])
    tokens = generate(model, compiler, regex("[0-9]{3,5}", begin_ids=[MARK]), sampling)
    place = tokens.index(MARK)
    free = generate_alone(model, make_prompt(3, 9), place + 1, sampling)
    assert tokens[: place + 1] == free
    assert re.fullmatch("[0-9]{3,5}", text_of(tokens[place + 1 :]))
    assert tokens[-1] == END


def test_completion_before_the_mark_has_no_end_and_no_barred_token_with_any_drafts(
    make_model: MakeModel, compiler: GrammarCompiler
) -> None:
    """Ends and openings of calls that the model wants most are neither drawn nor accepted."""
    model = make_model("qwen3")
    barred = 40
    biased = [(END, 6.0), (barred, 6.0), (MARK, 3.0)]
    sampling = Sampling(seed=2, temperature=0.9, logit_bias=biased)
    grammar = regex("[0-9]{3,5}", begin_ids=[MARK], barred_ids=[barred])
    truth = generate(model, compiler, grammar, sampling)
    place = truth.index(MARK)
    assert place > 2
    assert not {END, barred} & set(truth[:place])
    assert re.fullmatch("[0-9]{3,5}", text_of(truth[place + 1 :]))
    driver = make_driver(model, compiler)
    start(driver, 1, 0, make_prompt(3, 9), grammar, sampling)
    for count, right in [(3, 3), (2, 0), (5, 1), (4, 4), (0, 0)] * 20:
        if END in driver.tokens[1]:
            break
        drafts = make_drafts(truth, len(driver.tokens[1]), count, right)
        wrong = [END, barred][count % 2]
        drafts = drafts[:right] + [wrong] * (len(drafts) - right)
        driver.step(decodes=[1], drafts={1: drafts})
    assert driver.tokens[1][: len(truth)] == truth


def test_run_ahead_on_a_device_with_a_queue_gives_the_same_tokens_and_receipts(
    make_model: MakeModel, compiler: GrammarCompiler
) -> None:
    """Plans launched before the last result is read draw under the right masks."""
    model = make_model("llama")
    truth = generate(model, compiler, regex(LIST), SAMPLING)
    digests = []
    for has_queue in (False, True):
        driver = ExecutorDriver(model)
        profile = ExecutionProfile(has_queue=has_queue)
        driver.executor = make_executor(model, grammars=compiler, profile=profile)
        start(driver, 1, 0, make_prompt(3, 9), regex(LIST))
        start(driver, 2, 1, make_prompt(1, 7), None)
        launched = driver.launch(decodes=[1, 2])
        for _ in range(len(truth)):
            if not has_queue:
                driver.finish(launched)
                launched = driver.launch(decodes=[1, 2])
                continue
            finished = len(driver.digests)
            finish_before = functools.partial(driver.finish, launched)
            launched = driver.executor.launch(driver.plan(decodes=[1, 2]), finish_before)
            assert len(driver.digests) == finished + 1
        driver.finish(launched)
        tokens = driver.tokens[1]
        assert tokens[: len(truth)] == truth
        digests.append(driver.digests)
    assert digests[0] == digests[1]


def test_launch_before_the_last_tokens_are_known_is_refused(
    make_model: MakeModel, compiler: GrammarCompiler
) -> None:
    """A launch ahead without a way to finish the last step would draw under an old mask."""
    driver = make_driver(make_model("qwen3"), compiler)
    start(driver, 1, 0, make_prompt(3, 9), regex(LIST))
    driver.launch(decodes=[1])
    with pytest.raises(InvariantBroken, match="before the tokens"):
        driver.launch(decodes=[1])


def test_grammar_that_cannot_be_compiled_is_reported_in_its_first_step_alone(
    make_model: MakeModel, compiler: GrammarCompiler
) -> None:
    """The step names the sequence and the cause, and its neighbours go on."""
    model = make_model("qwen3")
    driver = make_driver(model, compiler)
    start(driver, 1, 0, make_prompt(1, 7), None)
    result = start(driver, 2, 1, make_prompt(3, 9), Grammar(text="start: [", end_ids=[END]))
    assert [one.sequence_id for one in result.grammar_failures] == [2]
    assert "Expected token" in result.grammar_failures[0].detail
    for _ in range(4):
        driver.step(decodes=[1, 2])
    assert not driver.step(decodes=[1], dropped=[2]).grammar_failures
    assert driver.tokens[1] == generate_alone(model, make_prompt(1, 7), 6, SAMPLING)


def test_receipts_differ_between_ranks_whose_grammars_differ_although_tokens_agree(
    make_model: MakeModel, compiler: GrammarCompiler, tmp_path: Path
) -> None:
    """Ids may be broadcast, so only masks in the receipts show a matcher that has gone astray."""
    model = make_model("qwen3")
    digests = []
    for texts in (None, token_texts()):
        driver = make_driver(model, compiler if texts is None else _other_compiler(tmp_path))
        start(driver, 1, 0, make_prompt(3, 9), regex("[0-9]{1,3}"))
        digests.append((driver.tokens[1], driver.digests[-1]))
    assert digests[0][0] == digests[1][0]
    assert digests[0][1] != digests[1][1]


def _other_compiler(folder: Path) -> GrammarCompiler:
    """Return a compiler whose tokenizer has another text for one token that is never drawn."""
    make_compiler(folder).wait_until_ready()
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"true"', '"99"'))
    return GrammarCompiler(folder)
