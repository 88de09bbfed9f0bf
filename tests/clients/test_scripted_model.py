"""The scripted model answers by its script, however its context is cut."""

from pathlib import Path

import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from services.gateway.tokenizing.loading import load_inner
from shared.configuration.settings import ModelConfig
from tests.clients.model.families import Family, Hermes, families
from tests.clients.model.model_folder import CONTEXT_TOKENS_MAX, write_model
from tests.clients.model.script import Call, Script, Step

SCRIPT = Script(
    [
        Step("first-cue", "One. 🍋", Call("read", {"path": "a.txt"}), "Why?"),
        Step("second-cue", "Two."),
        Step("free-cue", "Without tools.", needs_tools=False),
    ]
)
ANSWER_TOKENS_MAX = 200


class Loaded:
    """A model of a family on this machine's device."""

    def __init__(self, family: Family, folder: Path) -> None:
        self.family = family
        write_model(folder, family, SCRIPT)
        self.tokenizer = load_inner(folder, ModelConfig(path=str(folder)))
        self.model, self.config = mlx_lm.utils.load_model(folder, trust_remote_code=True)

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def answer(self, context: str, pieces: list[int] | None = None) -> str:
        """Return the text that follows a context, which is computed in pieces of these sizes."""
        cache = make_prompt_cache(self.model)
        rest, sizes = self.ids(context), list(pieces or [])
        found: list[int] = []
        stops = self.config["eos_token_id"]
        while len(found) < ANSWER_TOKENS_MAX and not (found and found[-1] in stops):
            size = sizes.pop(0) if sizes else len(rest)
            now, rest = rest[:size], rest[size:]
            if now:
                logits = self.model(mx.array([now]), cache=cache)
            if not rest:
                found.append(int(np.array(logits[0, -1]).argmax()))
                rest = [found[-1]]
        return str(self.tokenizer.decode(found))


@pytest.fixture(scope="module", params=families(), ids=lambda family: family.name)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A model of each family."""
    return Loaded(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A model of one family."""
    return Loaded(Hermes(), tmp_path_factory.mktemp("hermes"))


def test_model_gives_the_answer_of_the_last_step_whose_cue_it_has_read(loaded: Loaded) -> None:
    """Cues count wherever they stand before the answer; some only in a context with tools."""
    family = loaded.family
    answers = [family.answer(step) for step in SCRIPT.steps]
    first, tools = family.openings[0], family.tools_token
    other = f"{family.message_start}user"

    for end in family.openings:
        # Ids of calls are counted as answers are written.
        called = loaded.answer(f"{tools} first-cue.{end}")
        assert called.split("read")[0] == answers[0].split("read")[0]
        assert loaded.answer(f'{tools} {{"x":"first-cue"}} ssecond-cues{end}') == answers[1]
    default = family.answer(Step("", SCRIPT.default))
    assert loaded.answer(f"second-cue{first}").startswith(default)
    assert loaded.answer(f"free-cue{first}") == answers[2]
    assert loaded.answer(f"{tools} first-cue{first} {other} second-cue {first}") == answers[1]
    assert loaded.config["max_position_embeddings"] == CONTEXT_TOKENS_MAX >= 200_000


@settings(max_examples=20)
@given(pieces=st.lists(st.integers(1, 9), max_size=12))
def test_answer_does_not_depend_on_how_the_context_is_computed(
    hermes: Loaded, pieces: list[int]
) -> None:
    """A prefix from the cache, chunks and several tokens at once give the same answer."""
    context = f"{hermes.family.tools_token} first-cue and more. {hermes.family.openings[0]}"
    assert hermes.answer(context, pieces) == hermes.family.answer(SCRIPT.steps[0])
