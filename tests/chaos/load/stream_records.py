"""Records of streams, and their differences from the text without faults."""

import dataclasses
import difflib
from collections.abc import Sequence
from typing import Literal

from tests.chaos.load.tasks import Task

Outcome = Literal["open", "ok", "lost", "refused"]


@dataclasses.dataclass(slots=True)
class StreamRecord:
    """One request and its answer so far. Times are monotonic seconds."""

    task: Task
    sent_s: float
    outcome: Outcome = "open"
    """lost: the stream began and did not end properly. refused: an error instead of a stream."""
    problem: str = ""
    text: str = ""
    tokens: list[str] = dataclasses.field(default_factory=list)
    """Bytes of each token in hexadecimal, for requests with logprobs."""
    completion_tokens: int = -1
    finish_reason: str = ""
    last_s: float = 0.0
    """Time of the last text; 0 before the first."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExpectedAnswer:
    """The answer to a task without faults."""

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
    """Number of tokens that are duplicated, missing or different."""
    examples: list[str] = dataclasses.field(default_factory=list)
    """Sentences about the first few problems."""

    def add(self, record: StreamRecord, expected: ExpectedAnswer) -> None:
        """Count a record that has ended."""
        if record.outcome == "refused":
            self.refused += 1
            self._add_example(f"{record.task.name} refused: {record.problem}")
            return
        if record.outcome != "ok":
            self.lost += 1
            self._add_example(
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
        self._add_example(f"{record.task.name} differs: {_difference(record.text, expected.text)}")

    def _add_example(self, text: str) -> None:
        if len(self.examples) < 8:
            self.examples.append(text)


def wrong_tokens(record: StreamRecord, expected: ExpectedAnswer) -> int:
    """Return the number of duplicated, missing or different tokens.

    With logprobs tokens are compared one by one, without them only their number.
    """
    difference = abs(record.completion_tokens - expected.completion_tokens)
    if not record.task.has_logprobs:
        return difference
    return max(difference, _edits(record.tokens, expected.tokens))


def _edits(actual: Sequence[str], expected: Sequence[str]) -> int:
    if list(actual) == list(expected):
        return 0
    codes = difflib.SequenceMatcher(None, actual, expected, autojunk=False).get_opcodes()
    return sum(max(b - a, d - c) for kind, a, b, c, d in codes if kind != "equal")


def _difference(actual: str, expected: str) -> str:
    """Describe where two texts begin to differ, with a few characters around it."""
    pairs = enumerate(zip(actual, expected, strict=False))
    at = next((at for at, (a, b) in pairs if a != b), min(len(actual), len(expected)))
    begin = max(0, at - 20)
    return (
        f"at character {at}: {actual[begin : at + 20]!r} instead of {expected[begin : at + 20]!r}"
    )
