"""Requests of the load: texts of the demo model that last long enough for a fault.

Counting gives hundreds of known tokens, copying needs the whole prompt, and recall of a distant
value needs a long prefill. The model is certain of each token, so that a seed at temperature 1
samples the same text with any rounding of the batch.
"""

import dataclasses
import random
from typing import Any

from tools.demo_model.conversations import skill_copy, skill_recall
from tools.demo_model.conversations.words import TextSource

LONG_PROMPT_TOKENS = 1_500
LOGPROBS_EVERY = 3
"""Every third task requests logprobs, with which each event names its token."""


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One request."""

    name: str
    content: str
    max_tokens: int
    seed: int | None = None
    """None: greedy sampling; else temperature 1 with this seed."""
    has_logprobs: bool = False
    is_long: bool = False
    """Whether the prompt takes many prefill chunks."""

    def body(self, salt: str) -> dict[str, Any]:
        """Return the request body.

        Args:
            salt: requests with different salts share no cached prefix; "": all share.
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
    """Return `count` tasks: half count, a quarter copy, a quarter recall a distant value."""
    rng = random.Random(seed)
    return [_task(number, answer_tokens, rng.randrange(2**31)) for number in range(count)]


def _task(number: int, answer_tokens: int, seed: int) -> Task:
    source = TextSource(seed, "held_out")
    has_logprobs = number % LOGPROBS_EVERY == 0
    sampling_seed = seed if number % 5 == 0 else None
    kind = number % 4
    if kind == 3:
        content = _recall_prompt(source, seed)
        return Task(f"recall-{number}", content, 24, sampling_seed, has_logprobs, is_long=True)
    if kind == 1:
        text = " ".join(source.noun() for _ in range(100))
        content = skill_copy.PROMPTS[0].format(text)
        return Task(f"copy-{number}", content, answer_tokens, sampling_seed, has_logprobs)
    content = f"Count from {number + 1} to {number + 150}."
    return Task(f"count-{number}", content, answer_tokens, sampling_seed, has_logprobs)


def _recall_prompt(source: TextSource, seed: int) -> str:
    pairs = [
        skill_recall.Pair("code", f"alder-{seed % 89}", str(1_000 + seed % 9_000)),
        skill_recall.Pair("code", f"birch-{seed % 97}", str(1_000 + seed // 7 % 9_000)),
    ]
    chat = skill_recall.plain_recall(source, LONG_PROMPT_TOKENS, pairs, pairs[0])
    content: str = chat.messages[0]["content"]
    return content
