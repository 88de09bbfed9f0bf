"""What one stream has received, and how that differs from the text without faults."""

import dataclasses
import difflib
from collections.abc import Sequence
from typing import Literal

from tests.chaos.tasks import Task

Outcome = Literal["open", "ok", "lost", "refused"]


@dataclasses.dataclass(slots=True)
class Record:
    """One request and its answer so far. Times are monotonic seconds."""

    task: Task
    sent_s: float
    outcome: Outcome = "open"
    """lost: it had begun, and did not end as it should. refused: an error instead of a stream."""
    problem: str = ""
    text: str = ""
    tokens: list[str] = dataclasses.field(default_factory=list)
    """Each token's bytes in hexadecimal, where logprobs were asked for."""
    completion_tokens: int = -1
    finish_reason: str = ""
    last_s: float = 0.0
    """When the last text came; 0 before the first."""


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    """The answer to a task when nothing disturbs it."""

    text: str
    tokens: tuple[str, ...]
    completion_tokens: int
    finish_reason: str


@dataclasses.dataclass(slots=True)
class Tally:
    """Counts over many records."""

    complete: int = 0
    lost: int = 0
    refused: int = 0
    differing: int = 0
    wrong_tokens: int = 0
    """Tokens that a stream has twice, not at all, or otherwise."""
    examples: list[str] = dataclasses.field(default_factory=list)
    """The first few problems, in words."""

    def add(self, record: Record, expected: Expected) -> None:
        """Count one record that has ended."""
        if record.outcome == "refused":
            self.refused += 1
            self._example(f"{record.task.name} refused: {record.problem}")
            return
        if record.outcome != "ok":
            self.lost += 1
            self._example(
                f"{record.task.name} lost after {len(record.text)} characters: {record.problem}"
            )
            return
        self.complete += 1
        wrong = wrong_tokens(record, expected)
        is_same = record.text == expected.text and record.finish_reason == expected.finish_reason
        if is_same and not wrong:
            return
        self.differing += 1
        self.wrong_tokens += wrong
        self._example(f"{record.task.name} differs: {_difference(record.text, expected.text)}")

    def _example(self, text: str) -> None:
        if len(self.examples) < 8:
            self.examples.append(text)


def wrong_tokens(record: Record, expected: Expected) -> int:
    """Return how many tokens are too many, too few or others than expected.

    With logprobs tokens are compared one by one, else their number as the usage says it.
    """
    by_number = abs(record.completion_tokens - expected.completion_tokens)
    if not record.task.has_logprobs:
        return by_number
    return max(by_number, _edits(record.tokens, expected.tokens))


def _edits(have: Sequence[str], want: Sequence[str]) -> int:
    if list(have) == list(want):
        return 0
    codes = difflib.SequenceMatcher(None, have, want, autojunk=False).get_opcodes()
    return sum(max(b - a, d - c) for kind, a, b, c, d in codes if kind != "equal")


def _difference(have: str, want: str) -> str:
    """Say where two texts part, with a few characters around it."""
    pairs = enumerate(zip(have, want, strict=False))
    at = next((at for at, (a, b) in pairs if a != b), min(len(have), len(want)))
    begin = max(0, at - 20)
    return f"at character {at}: {have[begin : at + 20]!r} instead of {want[begin : at + 20]!r}"
