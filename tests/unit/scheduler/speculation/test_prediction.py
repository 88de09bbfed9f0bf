"""Predicted completions as a source of n-gram drafts."""

import random

import pytest

from services.scheduler.speculation.sequence_drafts import NgramDraftState
from services.scheduler.speculation.speculator import Speculator
from shared.configuration.settings import SpeculationConfig
from shared.messages import Speculation

PROMPT = list(range(1_000, 1_100))
PREDICTION = random.Random(7).choices(range(500), k=400)
BUDGET = 10_000
NGRAM = SpeculationConfig(method="ngram")


def drafting(tokens: list[int], prediction: list[int]) -> NgramDraftState:
    """Return the draft state of a sequence with these tokens, whose prompt is PROMPT."""
    found = Speculator(NGRAM).new_draft_state(tokens, Speculation(), len(PROMPT), prediction)
    assert isinstance(found, NgramDraftState)
    found.extend(BUDGET)
    return found


def steps_to_write(completion: list[int], prediction: list[int]) -> int:
    """Return the steps in which a completion is generated with up to 5 drafts each."""
    tokens = list(PROMPT)
    state = drafting(tokens, prediction)
    steps = 0
    while len(tokens) < len(PROMPT) + len(completion):
        rest = completion[len(tokens) - len(PROMPT) :]
        accepted = 0
        for draft, token in zip(state.proposer.propose(5), rest, strict=False):
            if draft != token:
                break
            accepted += 1
        tokens.extend(rest[: accepted + 1])
        state.extend(BUDGET)
        steps += 1
    return steps


def test_first_drafts_are_beginning_of_prediction() -> None:
    """Before the completion has any token, the drafts are the first tokens of the prediction."""
    assert drafting(list(PROMPT), PREDICTION).proposer.propose(8) == PREDICTION[:8]


def test_prompt_shorter_than_match_has_drafts_from_prediction() -> None:
    """Two tokens of prompt are enough."""
    speculator = Speculator(NGRAM)
    state = speculator.new_draft_state([1, 2], Speculation(), 2, PREDICTION)
    assert isinstance(state, NgramDraftState)
    state.extend(BUDGET)

    assert state.proposer.propose(3) == PREDICTION[:3]


@pytest.mark.parametrize("edit", [[], [900], [901, 902, 903, 904, 905, 906, 907]])
def test_drafts_go_on_in_prediction_after_an_edit(edit: list[int]) -> None:
    """Where the completion leaves out, changes or adds tokens, drafts follow the prediction again
    after two tokens that are alike."""
    written = [*PREDICTION[:100], *edit, *PREDICTION[120:124]]
    state = drafting([*PROMPT, *written], PREDICTION)

    assert state.proposer.propose(5) == PREDICTION[124:129]


def test_edit_of_predicted_text_takes_a_third_of_steps() -> None:
    """A text with one change in fifty tokens needs at most a third of the steps that it needs
    without the prediction, and a fully predicted text a fifth."""
    edited = [900 + place if place % 50 == 25 else token for place, token in enumerate(PREDICTION)]

    alone = steps_to_write(edited, [])
    assert alone > 0.9 * len(edited)
    assert steps_to_write(edited, PREDICTION) <= alone / 3
    assert steps_to_write(PREDICTION, PREDICTION) <= len(PREDICTION) / 5


def test_wrong_prediction_never_hides_matches_of_the_text_itself() -> None:
    """Drafts still come from the sequence's own tokens where the prediction has nothing alike."""
    period = [31, 32, 33, 34, 35, 36]
    state = drafting([*PROMPT, *period * 4], [7] * 200)

    assert state.proposer.propose(6) == period


def test_resumed_sequence_takes_drafts_from_prediction() -> None:
    """After a restart the completion so far is known, and drafts go on after it."""
    state = drafting([*PROMPT, *PREDICTION[:200]], PREDICTION)

    assert state.proposer.propose(5) == PREDICTION[200:205]


@pytest.mark.parametrize(
    ("config", "wish", "expected"),
    [
        (NGRAM, Speculation(), "ngram"),
        (NGRAM, Speculation(method="off"), None),
        (SpeculationConfig(), Speculation(), None),
        (SpeculationConfig(), Speculation(method="ngram"), "ngram"),
        (SpeculationConfig(method="eagle", draft_model="head"), Speculation(), "ngram"),
        (
            SpeculationConfig(method="eagle", draft_model="head"),
            Speculation(method="eagle"),
            "eagle",
        ),
    ],
)
def test_prediction_makes_ngrams_the_default_method_unless_it_is_off(
    config: SpeculationConfig, wish: Speculation, expected: str | None
) -> None:
    """A method that the client names counts more than its prediction, and so does "off"."""
    state = Speculator(config).new_draft_state(PROMPT, wish, len(PROMPT), PREDICTION)

    assert (state.method if state is not None else None) == expected
