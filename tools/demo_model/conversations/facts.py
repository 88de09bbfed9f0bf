"""Facts that the demo model learns: sentences about Lockstep and the questions they answer.

Every fact is one fixed answer and several phrasings of its question. The last phrasing of a fact
is held out: the training never shows it, and the test asks it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tools.demo_model.conversations.facts_operation import OPERATION
from tools.demo_model.conversations.facts_parts import PARTS


@dataclass(frozen=True)
class Fact:
    """One statement about Lockstep, with the questions that it answers."""

    answer: str
    trained: tuple[str, ...]
    """Phrasings of the question that the training shows."""
    held_out: str
    """Phrasing that only the test asks."""


def parse_facts(text: str) -> list[Fact]:
    """Parse facts from text, one per block of lines; empty lines separate blocks.

    A block is an answer `= ...`, continued by lines `+ ...`, then at least four questions, one per
    line. The last question is held out.

    Raises:
        ValueError: when a block has no answer or fewer than four questions.
    """
    facts = []
    for block in text.strip().replace("\n+ ", " ").split("\n\n"):
        lines = [line.strip() for line in block.strip().splitlines()]
        answer, questions = lines[0], lines[1:]
        if not answer.startswith("= ") or len(questions) < 4:
            raise ValueError(f"not a fact: {block!r}")
        facts.append(Fact(answer[2:], tuple(questions[:-1]), questions[-1]))
    return facts


FACTS: list[Fact] = parse_facts(PARTS) + parse_facts(OPERATION)

# The long text that plain completion continues: these sentences in this order.
STORY: tuple[str, ...] = tuple(fact.answer for fact in FACTS[:40])
