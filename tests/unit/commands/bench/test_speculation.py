"""`lockstep bench speculation`: requests, metrics, notes and command line."""

from pathlib import Path
from typing import Any

import pytest

from services.commands.bench.load.load_processes import require_success
from services.commands.bench.measuring.report import Case
from services.commands.bench.speculation import benchmark
from services.commands.bench.speculation.benchmark import (
    NGRAM,
    OFF,
    DraftTotals,
    SpeculationPlan,
    contender_metrics,
    send_work,
)
from services.commands.bench.speculation.request_generator import (
    CODE,
    COPY,
    KINDS,
    PROSE,
    RequestGenerator,
)
from shared.errors import UnavailableError
from tests.unit.commands.bench.bench_arguments import parse
from tests.unit.commands.command_lines import run


class _Stack:
    port = 1
    model = "m"


class _Client:
    """Load client that records the clients of each order."""

    def __init__(self) -> None:
        self.orders: list[Any] = []

    def load(self, _server: Any, _path: str, clients: Any) -> dict[str, Any]:
        self.orders.append(clients)
        return _answer()


def _answer(**changes: Any) -> dict[str, Any]:
    return {
        "metrics": {
            "tokens": 100, "tokens_per_s": 50.0, "ttft_p50_ms": 9.0, "cached_tokens": 0
        },
        "problems": [],
        "drafts": {"accepted": 60, "rejected": 20},
        "texts": ["a", "b"],
        **changes,
    }  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_demo", [True, False])
def test_two_request_generators_make_equal_requests_when_their_seeds_are_equal(
    kind: str, is_demo: bool
) -> None:
    """Another seed gives other requests; the path fits the kind of request."""
    one, same, other = (RequestGenerator(kind, seed, is_demo=is_demo) for seed in (1, 1, 2))
    asked = [one.next() for _ in range(8)]
    assert asked == [same.next() for _ in range(8)]
    assert asked != [other.next() for _ in range(8)]
    is_chat = one.path == "/v1/chat/completions"
    assert is_chat != (is_demo and kind == PROSE)
    assert all(("messages" in fields) == is_chat for fields in asked)


def test_texts_to_copy_are_distinct_and_short_enough_for_demo_model() -> None:
    """The prompt contains the whole text, and no two texts are alike."""
    requests = RequestGenerator(COPY, 1, is_demo=True)
    asked = [requests.next()["messages"][0]["content"] for _ in range(20)]
    texts = [text.partition("\n")[2] for text in asked]
    assert all(480 <= len(text) <= 560 for text in texts)
    assert len({text[:20] for text in texts}) == 20


def test_repetitive_requests_alternate_between_numbered_and_json_lists() -> None:
    """The demo model has learned both kinds of list."""
    requests = RequestGenerator(CODE, 1, is_demo=True)
    asked = [requests.next()["messages"][0]["content"] for _ in range(4)]
    assert [text.startswith("Write a numbered list") for text in asked] == [True, False] * 2
    assert [text.startswith("Write a JSON list") for text in asked] == [False, True] * 2


def test_compared_servers_receive_requests_that_differ_only_in_speculation_field(
    tmp_path: Path,
) -> None:
    """Requests are greedy, in the same order and from the same clients."""
    plan = SpeculationPlan(
        model=tmp_path, ranks=1, texts=[COPY], clients=[2], new_tokens=7, rounds=1, repeats=1,
        log_folder=tmp_path,
    )  # fmt: skip
    work = [[{"prompt": "x"}], [{"prompt": "y"}]]
    stack: Any = _Stack()
    client: Any = _Client()
    for name in (OFF, NGRAM):
        send_work(plan, stack, client, "/p", work, name)
    plain, drafted = client.orders
    bodies = [body for each in drafted for body in each]
    assert [body.pop("speculation") for body in bodies] == [{"method": "ngram"}] * 2
    for each in plain:
        assert each[0].pop("speculation") == {"method": "off"}
    assert plain == drafted
    assert [(body["prompt"], body["max_tokens"], body["temperature"]) for body in bodies] == [
        ("x", 7, 0),
        ("y", 7, 0),
    ]


def test_draft_acceptance_and_tokens_per_step_are_computed_from_usage() -> None:
    """Every step gives one token that was not a draft; differing texts are counted."""
    found = contender_metrics(_answer(), ["a", "x"], DraftTotals(rows=20, accepted=60))
    assert found["tokens_per_step"] == 2.5
    assert found["acceptance"] == 0.75
    assert found["accepted_per_draft_run"] == 3.0
    assert (found["texts"], found["texts_differing"]) == (2, 1)
    none = contender_metrics(
        _answer(drafts={"accepted": 0, "rejected": 0}), ["a", "b"], DraftTotals(0, 0)
    )
    assert (none["tokens_per_step"], none["texts_differing"]) == (1.0, 0)
    assert (none["acceptance"], none["accepted_per_draft_run"]) == (None, None)


def test_bench_speculation_refuses_result_with_failed_request_or_cache_hit() -> None:
    """With a failure or a cache hit, the contenders did not do the same work."""
    with pytest.raises(UnavailableError, match="HTTP 500"):
        require_success({"metrics": {}, "problems": ["HTTP 500"]})
    with pytest.raises(UnavailableError, match="prefix cache"):
        benchmark.require_equal_work(_answer(metrics={"cached_tokens": 4}))
    assert benchmark.require_equal_work(_answer()) == _answer()


@pytest.mark.parametrize(
    ("plain", "drafted", "said"),
    [
        ({}, {"acceptance": 0.5}, []),
        ({}, {}, ["no draft verified"]),
        ({}, {"acceptance": 0.5, "texts_differing": 2.0}, ["2 of 8 texts differ"]),
        ({"acceptance": 0.5}, {"acceptance": 0.5}, ["requests with speculation off"]),
    ],
)
def test_bench_speculation_report_warns_of_differing_texts_and_missing_or_unexpected_drafts(
    plain: dict[str, float], drafted: dict[str, float], said: list[str]
) -> None:
    """A note warns of differing texts, of missing drafts, and of drafts although speculation was
    off."""
    case = Case(conditions={"text": COPY, "clients": 8})
    for name, metrics in ((OFF, plain), (NGRAM, drafted)):
        case.add(name, {"texts": 8.0, "texts_differing": 0.0, **metrics})
    notes = benchmark.reliability_notes(case)
    assert len(notes) == len(said)
    for note, words in zip(notes, said, strict=True):
        assert note.startswith("text copy, clients 8: ")
        assert words in note


def test_bench_speculation_without_flags_uses_documented_defaults() -> None:
    """The demo model writes every kind of text for one client and for eight."""
    plain = parse(["speculation"])
    assert (plain.model, plain.texts, plain.clients) == ("demo", [COPY, CODE, PROSE], [1, 8])
    assert (plain.rounds, plain.repeats, plain.new_tokens) == (4, 5, 256)
    quick = parse(["speculation", "--quick", "--texts", "prose,copy", "--clients", "2"])
    assert (quick.texts, quick.clients) == ([PROSE, COPY], [2])
    assert (quick.rounds, quick.repeats) == (2, 2)


@pytest.mark.parametrize(
    "argv",
    [
        ["speculation", "--texts", "copy,poem"],
        ["speculation", "--clients", "0"],
        ["speculation", "--preset", "tiny"],
        ["speculation", "--set", "speculation=1"],
    ],
)
def test_bench_speculation_exits_with_usage_code_when_command_line_is_wrong(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong flags are a usage error; so are presets, whose random weights do not write such
    texts."""
    code, _, err = run(capsys, "bench", *argv)
    assert code == 64
    assert err.startswith("lockstep: ")
