"""Trials of grammars: no request can hurt the process that asks for one."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from services.gateway.conversation.constraint import Constraint
from services.gateway.http.errors import ApiError
from services.gateway.structured import trials as trials_module
from services.gateway.structured.grammar_validator import GrammarValidator
from services.gateway.structured.trials import FAILED, Trials
from tests.support.process_table import wait_until_ended
from tests.support.waiting import wait_until
from tests.unit.gateway.structured.matching import TRIALS

_HUGE = 10**9
_REFUSAL_S_MAX = 10.0
"""Time for a refusal: two seconds of computing, beside other tests."""


def _grammar(**schema: Any) -> str:
    return json.dumps({"grammars": [{"json_schema": schema}]})


_PLAIN = _grammar(type="integer")
_ENDLESS = _grammar(type="integer", multipleOf=9_999_991)
"""Occupies the library for minutes, and takes gigabytes."""


@pytest.fixture
def trials() -> Iterator[Trials]:
    """Trials with processes of their own."""
    found = Trials()
    yield found
    found.close()


@pytest.fixture
def memory_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time alone ends a trial."""
    monkeypatch.setattr(trials_module, "BYTES_MAX", 8 * 1024**3)


def _processes(before: Collection[int] = ()) -> list[int]:
    """Return the ids of this process's trial processes, but for those known before."""
    pids = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if child.pid not in before and any("trial_process" in one for one in child.cmdline()):
                pids.append(child.pid)
    return pids


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


REQUESTS: dict[str, tuple[str, Any]] = {
    "divisor": ("json_schema", {"type": "integer", "multipleOf": 9_999_991}),
    "divisor in Lark": ("lark", 'start: %json {"type":"integer","multipleOf":9999991}'),
    "divisors": ("json_schema", {"allOf": [{"multipleOf": n} for n in (1_009, 1_013, 1_019)]}),
    "fraction": ("json_schema", {"type": "number", "multipleOf": 0.300_007}),
    "joined patterns": (
        "json_schema",
        {"allOf": [{"type": "string", "pattern": f"a{n}"} for n in range(60)]},
    ),
    "patterns joined by references": (
        "json_schema",
        {
            "$ref": "#/$defs/a0",
            "$defs": {
                f"a{n}": {"type": "string", "pattern": f"a{n}", "$ref": f"#/$defs/a{n + 1}"}
                for n in range(60)
            }
            | {"a60": {"type": "string", "pattern": "b"}},
        },
    ),
    "patterns joined in Lark": (
        "lark",
        "start: A\nA: " + " & ".join(f"/(.|\\n)*a{n}(.|\\n)*/" for n in range(60)),
    ),
    "repeated repetition": ("regex", "(a{1,1000}){1,1000}"),
    "threefold repetition": ("regex", "(((ab?){1,1000}){1,1000}){1,1000}"),
    "repetition of rules": ("lark", f"start: a{{1,{_HUGE}}}\na: b{{1,{_HUGE}}}\nb: /x/"),
    "repetition in a terminal": ("lark", 'start: A\nA: (("x" | "y"){1,1000} "z"){1,1000}'),
    "long text": ("json_schema", {"type": "string", "minLength": _HUGE, "maxLength": _HUGE}),
    "long list": ("json_schema", {"type": "array", "minItems": _HUGE, "maxItems": _HUGE}),
    "many properties": ("json_schema", {"type": "object", "minProperties": _HUGE}),
    "bounds of 300 digits": (
        "json_schema",
        {"type": "integer", "exclusiveMinimum": -(10**300), "exclusiveMaximum": 10**300},
    ),
    "fractions of 300 digits": (
        "json_schema",
        {"type": "number", "exclusiveMinimum": 1e-300, "exclusiveMaximum": 1e300},
    ),
    "substrings": ("lark", f'start: %regex {{"substring_chars": "{"abcdefghij" * 10_000}"}}'),
    "words": ("lark", f'start: %regex {{"substring_words": "{"ab cd " * 20_000}"}}'),
    "large enum": ("json_schema", {"enum": [f"{n:x}" for n in range(20_000)]}),
    "long constant": ("json_schema", {"const": "y" * 250_000}),
    "negations": ("json_schema", _nested(100)),
    "classes": ("regex", r"\p{L}{1000}(\p{L}|\p{N}){1,100000}"),
    "choices of choices": (
        "json_schema",
        {"allOf": [{"anyOf": [{"required": [f"{m}{n}"]} for m in "ab"]} for n in range(30)]},
    ),
    "many ways": ("regex", "(a|b)*a(a|b){40}"),
    "negated ways": ("lark", "start: A\nA: ~/(.|\\n)*a(.|\\n){40}/"),
    "open classes": ("regex", "[" * 100_000),
}
ACCEPTED = {
    *("fraction", "repeated repetition", "threefold repetition", "repetition of rules"),
    *("repetition in a terminal", "long text", "long list", "many properties", "substrings"),
    *("words", "large enum", "classes", "many ways", "negated ways"),
}
"""Those that are served, because they are cheap to compile."""


@pytest.mark.parametrize("name", REQUESTS)
def test_hostile_grammar_is_accepted_cheaply_or_refused_in_seconds(name: str) -> None:
    """A few characters would occupy a thread for minutes, or take gigabytes, otherwise."""
    kind, value = REQUESTS[name]
    began_s = time.monotonic()
    constraint = Constraint(kind, value, "response_format")  # type: ignore[arg-type]
    refusal: ApiError | None = None
    try:
        GrammarValidator([1], TRIALS).check_constraint(constraint)
    except ApiError as error:
        refusal = error
    assert time.monotonic() - began_s < _REFUSAL_S_MAX
    assert (refusal is None) == (name in ACCEPTED)
    if refusal is not None:
        assert refusal.status == 400
        assert (refusal.param or "").startswith("response_format")
        assert len(refusal.message) > 20


def test_trial_that_only_takes_long_ends_by_its_computing_time(
    trials: Trials, memory_without_bound: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread could not be stopped; the next grammar gets another process."""
    monkeypatch.setattr(trials_module, "CPU_S_MAX", 0.3)
    assert trials.find_problem(_ENDLESS, []) == FAILED
    assert trials.find_problem(_PLAIN, []) == ""


def test_trials_of_several_threads_run_beside_each_other_in_processes_that_are_kept(
    trials: Trials, memory_without_bound: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process for each thread, and none more for the grammars after the first."""
    monkeypatch.setattr(trials_module, "CPU_S_MAX", 1.0)
    before = _processes()
    assert trials.find_problem(_PLAIN, []) == ""
    first = _processes(before)
    assert len(first) == 1
    process = psutil.Process(first[0])
    idle_s = process.cpu_times().user
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(trials.find_problem, _ENDLESS, [])
        wait_until(lambda: process.cpu_times().user > idle_s + 0.1)
        assert trials.find_problem(_PLAIN, []) == ""
        assert slow.result() == FAILED
    [second] = _processes(before)
    assert second != first[0]
    for number in range(5):
        assert trials.find_problem(_grammar(const=number), [number]) == ""
    assert _processes(before) == [second]


def test_library_that_ends_its_process_is_a_refusal_and_the_next_grammar_is_compiled(
    trials: Trials, memory_without_bound: None
) -> None:
    """A full stack ends a process by a signal, which nothing inside can catch."""
    before = _processes()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(trials.find_problem, _ENDLESS, [])
        [pid] = wait_until(lambda: _processes(before))
        wait_until(lambda: psutil.Process(pid).cpu_times().user > 0.5)
        os.kill(pid, signal.SIGSEGV)
        assert asked.result() == FAILED
    assert trials.find_problem(_PLAIN, []) == ""


def test_process_that_has_ended_meanwhile_is_replaced(trials: Trials) -> None:
    """Another program may have killed it."""
    before = _processes()
    assert trials.find_problem(_PLAIN, []) == ""
    [first] = _processes(before)
    os.kill(first, signal.SIGKILL)
    wait_until_ended([first], 10.0)
    assert trials.find_problem(_grammar(const=1), []) == ""
    assert first not in _processes(before)


def test_process_without_work_ends_and_the_next_grammar_starts_another(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway whose clients want no more grammars keeps no memory for them."""
    monkeypatch.setattr(trials_module, "_IDLE_S_MAX", 0.05)
    before = _processes()
    assert trials.find_problem(_PLAIN, []) == ""
    wait_until(lambda: not _processes(before))
    assert trials.find_problem(_grammar(const=1), []) == ""


def test_trial_on_a_machine_that_is_too_busy_is_no_refusal_of_the_grammar(
    trials: Trials, memory_without_bound: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same request may succeed later, so its outcome must not be remembered."""
    monkeypatch.setattr(trials_module, "_WAIT_S_MAX", 0.1)
    validator = GrammarValidator([], trials)
    with pytest.raises(ApiError) as found:
        validator.check(_ENDLESS, "guided_json")
    assert (found.value.status, found.value.code) == (503, "unavailable")
    monkeypatch.undo()
    with pytest.raises(ApiError) as found:
        validator.check(_ENDLESS, "guided_json")
    assert found.value.status == 400


def test_shutdown_ends_a_trial_in_the_middle(trials: Trials, memory_without_bound: None) -> None:
    """A gateway that stops waits for no grammar."""
    before = _processes()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(trials.find_problem, _ENDLESS, [])
        wait_until(lambda: _processes(before))
        trials.close()
        with pytest.raises(ApiError, match="shutting down"):
            asked.result()
    assert not _processes(before)
    with pytest.raises(ApiError, match="shutting down"):
        trials.find_problem(_PLAIN, [])


def test_trial_processes_end_with_a_parent_that_is_killed() -> None:
    """One that waits ends at once, one that computes when its computing time is over."""
    program = (
        "import json, sys, threading, psutil\n"
        "from services.gateway.structured.trials import Trials\n"
        "trials = Trials()\n"
        "threading.Thread(target=trials.find_problem, args=(sys.argv[1], [])).start()\n"
        "trials.find_problem(sys.argv[2], [])\n"
        "print(json.dumps([one.pid for one in psutil.Process().children()]), flush=True)\n"
        "threading.Event().wait()\n"
    )
    command = [sys.executable, "-c", program, _ENDLESS, _PLAIN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = json.loads(parent.stdout.readline())
        parent.kill()
    assert pids
    wait_until_ended(pids, 15.0)


def test_machine_on_which_no_process_starts_is_a_503(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no fault of the request."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ApiError, match="no process could start") as found:
        trials.find_problem(_PLAIN, [])
    assert found.value.status == 503
