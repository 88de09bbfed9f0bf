"""What the streams ask for: texts of the demo model that last long enough to be hit.

Counting gives hundreds of tokens that are known in advance, copying gives texts that need the whole
prompt, and a value far back needs a long prefill. The model is sure of all of them, so that a seed
at temperature 1 draws the same text whatever the batch's rounding is.
"""

import dataclasses
import random
from typing import Any

from tools.demo_model import skill_copy, skill_recall
from tools.demo_model.words import Source

LONG_PROMPT_TOKENS = 1_500
LOGPROBS_EVERY = 3
"""Every third task asks for logprobs: then each event names its token."""


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One request."""

    name: str
    content: str
    max_tokens: int
    seed: int | None = None
    """None: greedy; else temperature 1 with this seed."""
    has_logprobs: bool = False
    is_long: bool = False
    """Its prompt takes many prefill chunks."""

    def body(self, salt: str) -> dict[str, Any]:
        """Return the request's JSON.

        Args:
            salt: requests with another one share no prefix with this one; "": all share.
        """
        body: dict[str, Any] = {
            "model": "lockstep-demo",
            "messages": [{"role": "user", "content": self.content}],
            "max_tokens": self.max_tokens,
            "temperature": 0.0 if self.seed is None else 1.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.seed is not None:
            body["seed"] = self.seed
        if self.has_logprobs:
            body["logprobs"] = True
        if salt:
            body["cache_salt"] = salt
        return body


def make_tasks(count: int, answer_tokens: int, seed: int) -> list[Task]:
    """Return `count` tasks: half count, a quarter copy, a quarter look for a value far back."""
    chance = random.Random(seed)
    return [_task(number, answer_tokens, chance.randrange(2**31)) for number in range(count)]


def _task(number: int, answer_tokens: int, seed: int) -> Task:
    source = Source(seed, "held_out")
    has_logprobs = number % LOGPROBS_EVERY == 0
    drawn_with = seed if number % 5 == 0 else None
    kind = number % 4
    if kind == 3:
        content = _far_back(source, seed)
        return Task(f"recall-{number}", content, 24, drawn_with, has_logprobs, is_long=True)
    if kind == 1:
        text = " ".join(source.noun() for _ in range(100))
        content = skill_copy.PROMPTS[0].format(text)
        return Task(f"copy-{number}", content, answer_tokens, drawn_with, has_logprobs)
    content = f"Count from {number + 1} to {number + 150}."
    return Task(f"count-{number}", content, answer_tokens, drawn_with, has_logprobs)


def _far_back(source: Source, seed: int) -> str:
    pairs = [
        skill_recall.Pair("code", f"alder-{seed % 89}", str(1_000 + seed % 9_000)),
        skill_recall.Pair("code", f"birch-{seed % 97}", str(1_000 + seed // 7 % 9_000)),
    ]
    chat = skill_recall.recall_at(source, LONG_PROMPT_TOKENS, pairs, pairs[0])
    content: str = chat.messages[0]["content"]
    return content
