"""`lockstep bench speculation --check`: waves of requests, counted differences and verdicts."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from services.commands.bench.measuring.report import Case
from services.commands.bench.speculation import text_check
from services.commands.bench.speculation.benchmark import SpeculationPlan
from services.commands.bench.speculation.request_generator import COPY, RequestGenerator
from services.commands.bench.speculation.text_check import OFF_AGAIN, compare, draw_wave
from tests.unit.commands.command_lines import run


def _answer(texts: list[str], tokens: int = 30, accepted: int = 10) -> dict[str, Any]:
    return {
        "texts": texts,
        "metrics": {"tokens": tokens},
        "drafts": {"accepted": accepted, "rejected": 10},
    }


@pytest.mark.parametrize("count", [1, 2, 7, 40, 100])
def test_text_check_sends_exactly_the_requested_number_of_requests(count: int) -> None:
    """Waves have 1 to 8 clients; lengths differ, and some requests have stop strings."""
    random, requests = Random(1), RequestGenerator(COPY, 1, is_demo=True)
    left, number, waves = count, 0, []
    while left > 0:
        waves.append(draw_wave(requests, random, number, left, 50))
        left -= sum(map(len, waves[-1]))
        number += 1
    made = [one for wave in waves for client in wave for one in client]
    assert len(made) == count
    assert all(wave and all(client for client in wave) for wave in waves)
    assert max(map(len, waves)) <= 8
    if count == 100:
        assert {len(wave) for wave in waves} >= set(range(1, 8))
        assert len({one["max_tokens"] for one in made}) > 20
        assert 20 < sum("stop" in one for one in made) < 60


def test_text_check_counts_differing_texts_and_differing_token_totals() -> None:
    """Token totals of a wave differ also where stop strings hide it in the texts."""
    plain = _answer(["a", "b", "c"], accepted=0)
    same = compare(_answer(["a", "b", "c"]), plain)
    assert (same["texts_differing"], same["counts_differing"]) == (0, 0)
    assert (same["acceptance"], same["tokens_per_step"]) == (0.5, 1.5)
    other = compare(_answer(["a", "x", "y"], tokens=31), plain)
    assert (other["texts_differing"], other["counts_differing"]) == (2, 1)


def test_text_check_report_counts_differing_texts_of_each_speculation_method() -> None:
    """A note per method has the number of differing texts, and says when no draft was accepted."""
    case = Case(conditions={})
    plain = _answer(["a", "b"], accepted=0)
    case.add(OFF_AGAIN, compare(plain, plain))
    case.add("ngram", compare(plain, plain))
    case.add("eagle", compare(_answer(["a", "x"]), plain))
    assert text_check.verdict_notes(case) == [
        "off again: no difference in 2 requests.",
        "ngram: no difference in 2 requests.",
        "ngram: no draft was accepted, so nothing was checked.",
        "eagle: 1 differences in 2 requests.",
    ]


def test_draft_model_flag_becomes_setting_of_benchmarked_server(tmp_path: Path) -> None:
    """The draft model is passed as a setting; n-grams need none."""
    fields: dict[str, Any] = {
        "model": tmp_path, "ranks": 1, "texts": [COPY], "clients": [1], "new_tokens": 5,
        "rounds": 1, "repeats": 1, "log_folder": tmp_path,
    }  # fmt: skip
    ngram = SpeculationPlan(**fields)
    assert ngram.contenders == ("off", "ngram")
    assert list(ngram.stack_settings) == ["LOCKSTEP_CACHE_ENABLED"]
    eagle = SpeculationPlan(method="eagle", draft_model=tmp_path, **fields)
    assert eagle.contenders == ("off", "eagle")
    assert eagle.stack_settings["LOCKSTEP_SPECULATION_METHOD"] == "eagle"
    assert eagle.stack_settings["LOCKSTEP_SPECULATION_DRAFT_MODEL"] == str(tmp_path)


@pytest.mark.parametrize(
    "argv",
    [
        ["--method", "eagle"],
        ["--draft-model", "."],
        ["--method", "draft_model", "--draft-model", "publisher/model"],
        ["--method", "magic"],
        ["--check", "0"],
    ],
)
def test_text_check_exits_with_usage_code_when_method_lacks_draft_model(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A method without its draft model, the reverse, a missing folder and an unknown method
    are refused."""
    code, _, err = run(capsys, "bench", "speculation", *argv)
    assert code == 64
    assert err.startswith("lockstep: ")
