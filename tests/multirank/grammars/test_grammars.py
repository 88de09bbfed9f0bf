"""Grammars on real ranks: the same constrained text on any number of ranks, with any drafts."""

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from transformers import AutoTokenizer

from shared.messages import Grammar, RequestFailed, RequestFinished, Sampling
from shared.model.location import demo_folder
from tests.multirank.worlds.cluster import Client, cluster

END = 2041
LIST = r"\[[a-z]{2,9}(, [a-z]{2,9}){6,9}\]"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 2},
        "count": {"type": "integer", "minimum": 1, "maximum": 500},
    },
    "required": ["name", "tags", "count"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
_RULES = "".join(f"a{number}: a{number + 1}\n" for number in range(15_000))
"""More levels than a stack has room for."""
BEGIN_IDS = [15]
"""The digit 0, which stands for the end of the reasoning: the model counts up to 10 first."""
BARRED_IDS = [18]
"""The digit 3, which stands for the opening of a call: the model would count it too."""
GRAMMARS: dict[str, Grammar | None] = {
    "list": Grammar(text=f"start: /{LIST}/", end_ids=[END]),
    "json": Grammar(text=json.dumps({"grammars": [{"json_schema": SCHEMA}]}), end_ids=[END]),
    "reasoned": Grammar(
        text=f"start: /{LIST}/", end_ids=[END], begin_ids=BEGIN_IDS, barred_ids=BARRED_IDS
    ),
    "free": None,
    "broken": Grammar(text="start: [", end_ids=[END]),
    "broken by depth": Grammar(text=f'start: a0\n{_RULES}a15000: "x"', end_ids=[END]),
}
SAMPLINGS = [Sampling(seed=5, temperature=0.0), Sampling(seed=7, temperature=0.9, top_p=0.95)]
NAMES = [f"{kind} {seed}" for kind in GRAMMARS for seed in range(len(SAMPLINGS))]
SPECULATION: dict[str, Mapping[str, str]] = {
    "off": {"SPECULATION_METHOD": "off"},
    "ngram": {"SPECULATION_METHOD": "ngram"},
    "draft model": {
        "SPECULATION_METHOD": "draft_model",
        "SPECULATION_DRAFT_MODEL": str(demo_folder().parent / "demo-draft"),
    },
    "eagle": {
        "SPECULATION_METHOD": "eagle",
        "SPECULATION_DRAFT_MODEL": str(demo_folder().parent / "demo-eagle"),
    },
}
_PROMPT = "Write a list of words, a list of words, and a list of words as JSON: "
_COUNT = "<|im_start|>user\nCount from 1 to 30.<|im_end|>\n<|im_start|>assistant\n"


def slow_schema(properties: int) -> dict[str, Any]:
    """Return a schema with optional properties; 1,500 of them take about a second to compile."""
    return {
        "type": "object",
        "properties": {f"property_{number}": {"type": "string"} for number in range(properties)},
        "required": ["property_0"],
        "additionalProperties": False,
    }


def _generate(client: Client) -> dict[str, list[int]]:
    """Send all requests at once and return the tokens of each; the broken ones must fail."""
    tokenizer = AutoTokenizer.from_pretrained(str(demo_folder()))
    for kind, grammar in GRAMMARS.items():
        for number, sampling in enumerate(SAMPLINGS):
            client.submit(
                f"{kind} {number}",
                tokenizer.encode(_COUNT if kind == "reasoned" else _PROMPT),
                max_tokens=160 if kind == "reasoned" else 120,
                stop_ids=[END],
                sampling=sampling,
                grammar=grammar,
            )
    client.wait_for_ends(NAMES, 120.0)
    for name in NAMES:
        end = client.ends[name]
        if name.startswith("broken"):
            assert isinstance(end, RequestFailed)
            assert end.cause == "grammar"
            assert not client.tokens[name]
        else:
            assert isinstance(end, RequestFinished), end
    for number in range(len(SAMPLINGS)):
        words = client.tokens[f"list {number}"]
        assert words[-1] == END
        assert re.fullmatch(LIST, tokenizer.decode(words[:-1])), tokenizer.decode(words)
        tokens = client.tokens[f"reasoned {number}"]
        begin = next(place for place, one in enumerate(tokens) if one in BEGIN_IDS)
        assert begin > 10
        assert not {*BARRED_IDS, END} & {*tokens[:begin]}
        assert tokens[-1] == END
        assert re.fullmatch(LIST, tokenizer.decode(tokens[begin + 1 : -1]))
        text = tokenizer.decode(client.tokens[f"json {number}"][:-1])
        if client.tokens[f"json {number}"][-1] == END:
            assert set(json.loads(text)) == {"name", "tags", "count"}, text
    status = client.query_status()
    assert status.counters.get("receipts_mismatched_total", 0.0) == 0.0
    assert status.counters["epochs_total"] == 1.0
    return {name: client.tokens[name] for name in NAMES}


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """The tokens of one rank without drafts."""
    with cluster(1, **SPECULATION["off"]) as client:
        return _generate(client)


@pytest.mark.parametrize(
    ("ranks", "method"),
    [
        (ranks, method)
        for ranks, methods in ((1, ["draft model"]), (2, SPECULATION))
        for method in methods
    ],
)
@pytest.mark.proof
def test_constrained_text_is_the_same_on_1_and_2_ranks_with_any_drafts(
    expected: dict[str, list[int]], ranks: int, method: str
) -> None:
    """Tokens equal those of one rank without drafts, for rows with and without grammars."""
    with cluster(ranks, **SPECULATION[method]) as client:
        found = _generate(client)
        assert found == expected
        if method not in ("off", "ngram"):
            assert sum(one.accepted for one in client.query_status().drafts) > 0


def test_slow_grammar_delays_its_own_request_and_not_the_stream_beside_it() -> None:
    """Ranks compile in threads, and the plan that samples waits until all of them have."""
    grammar = Grammar(
        text=json.dumps({"grammars": [{"json_schema": slow_schema(6_000)}]}), end_ids=[END]
    )
    with cluster(2) as client:
        client.submit("plain", [5, 6, 7], max_tokens=6_000)
        client.poll_until(lambda: len(client.tokens["plain"]) > 20, 20.0, "no tokens")
        client.submit("slow", [5, 6, 7, 8], max_tokens=20, grammar=grammar)
        before = len(client.tokens["plain"])
        client.poll_until(
            lambda: bool(client.tokens["slow"]), 60.0, "the slow request has no token"
        )
        assert "plain" not in client.ends
        # Steps that wait for a grammar would bring none but those of plans already on their way,
        # which are two or three.
        assert len(client.tokens["plain"]) - before > 8
