"""Scripts: what a model answers, step by step. Knows no tokens and no family of models."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Step:
    """An answer, and the word by which the model knows that it is due."""

    cue: str
    """A word that is one token. The model gives the answer of the last step whose cue it has read,
    be it in a user's message, in a tool's result or in an answer of its own."""
    text: str
    call: Call | None = None
    reasoning: str = ""
    """Thoughts before the answer; left out by families that have none."""
    needs_tools: bool = True
    """Without tools in the prompt the step does not count: clients show the user's message to the
    model in requests beside the conversation, for example for a title."""


@dataclass(frozen=True)
class Script:
    """Everything that a model answers."""

    steps: Sequence[Step]
    default: str = "A short title."
    """Answer to a context without any cue that counts."""

    @property
    def cues(self) -> list[str]:
        """The words that must be tokens, each once."""
        return list(dict.fromkeys(step.cue for step in self.steps))
