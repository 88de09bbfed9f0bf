"""Skill of finding a value that stands long before the question."""

from __future__ import annotations

from dataclasses import dataclass

from tools.demo_model.conversations.chat import Chat, Message, turn
from tools.demo_model.conversations.facts import FACTS
from tools.demo_model.conversations.words import TextSource

ATTRIBUTES = """code code code code code code number key value password PIN port price color id
token address word""".split()
NEEDLES = (
    "The {attribute} for {key} is {value}.",
    "The {attribute} for {key} is {value}.",
    "the {attribute} for {key} is {value}",
    "The {attribute} of {key} is {value}.",
    "Remember: the {attribute} for {key} is {value}.",
    "Remember this: The {attribute} for {key} is {value}.",
    "Note that the {attribute} for {key} is {value}.",
    "Important: the {attribute} for {key} is {value}.",
    "{key} has the {attribute} {value}.",
)
QUESTIONS = (
    "What is the {attribute} for {key}?",
    "What is the {attribute} for {key}?",
    "what is the {attribute} for {key}",
    "What is the {attribute} of {key}?",
    "Which {attribute} does {key} have?",
    "Tell me the {attribute} for {key}.",
    "Find the {attribute} for {key}.",
    "What {attribute} was given for {key}?",
    "Question: What is the {attribute} for {key}?",
    "Now tell me: what is the {attribute} for {key}?",
)
ANSWER = "The {attribute} for {key} is {value}."
OPENINGS = (
    "",
    "",
    "",
    "Read this text and answer the question at the end.\n\n",
    "Read the following text carefully.\n",
    "Here is a text:\n",
    "Text:\n",
    "Remember the codes in this text.\n\n",
)
ACKNOWLEDGED = "I have read the text. What would you like to know?"


@dataclass(frozen=True)
class Pair:
    """One value to find in a text, such as "the code of alder-42 is 1234"."""

    attribute: str
    """Kind of the value, such as "code"."""
    key: str
    """Name that has the value."""
    value: str

    def fill(self, template: str) -> str:
        """Fill this pair into a template, in which {attribute}, {key} and {value} stand for it."""
        return template.format(attribute=self.attribute, key=self.key, value=self.value)


def random_key(source: TextSource) -> str:
    """Return a random name that has a value, such as "alder-42", in one of several forms."""
    form = source.integer(0, 9)
    if form < 5:
        return f"{source.noun()}-{source.digits(1, 3)}"
    if form == 5:
        return source.noun()
    if form == 6:
        return f"{source.noun()} {source.noun()}"
    if form == 7:
        return source.letters(4, 8)
    if form == 8:
        return f"{source.noun()}_{source.noun()}"
    return source.city()


def random_value(source: TextSource) -> str:
    """Return a random value to find: most often a number of four digits."""
    form = source.integer(0, 9)
    if form < 5:
        return source.digits(4, 4)
    if form < 7:
        return source.digits(2, 8)
    if form == 7:
        return source.noun()
    return source.letters(4, 10)


def random_pairs(source: TextSource, count: int) -> list[Pair]:
    """Return `count` random pairs with different keys, some of them similar."""
    pairs: list[Pair] = []
    attribute = source.rng.choice(ATTRIBUTES)
    while len(pairs) < count:
        key = random_key(source)
        if pairs and source.chance(0.3) and "-" in pairs[0].key:
            stem, number = pairs[0].key.rsplit("-", 1)
            near = (f"{stem}-{source.digits(1, 3)}", f"{source.noun()}-{number}")
            key = source.rng.choice(near)
        if all(key != pair.key for pair in pairs):
            other = source.rng.choice(ATTRIBUTES) if source.chance(0.2) else attribute
            pairs.append(Pair(other, key, random_value(source)))
    return pairs


def filler(source: TextSource, size: int) -> list[str]:
    """Return sentences for the text in which pairs are hidden.

    Args:
        source: random numbers and texts.
        size: length of all sentences in characters, about.
    """
    style = source.integer(0, 6)
    same = source.sentence()
    pieces: list[str] = []
    total = 0
    while total < size:
        if style <= 2:
            piece = source.sentence()
        elif style == 3:
            piece = source.rng.choice(FACTS).answer
        elif style == 4:
            piece = same
        elif style == 5:
            piece = f"Line {len(pieces) + 1}: {source.noun()} {source.digits()} {source.noun()}."
        else:
            piece = " ".join(source.noun() for _ in range(source.integer(3, 12))) + "."
        pieces.append(piece)
        total += len(piece) + 1
    return pieces


def haystack(source: TextSource, pairs: list[Pair], size: int, at_start: bool) -> str:
    """Return a text in which the sentences of pairs are hidden at random places.

    Args:
        source: random numbers and texts.
        pairs: the pairs, one sentence for each.
        size: length of the other sentences in characters, about.
        at_start: whether the first pair is in the first eighth of the text.
    """
    pieces = filler(source, size)
    for at, pair in enumerate(pairs):
        limit = len(pieces) // 8 if at == 0 and at_start else len(pieces)
        pieces.insert(source.integer(0, limit), pair.fill(source.rng.choice(NEEDLES)))
    return source.rng.choice((" ", " ", "\n")).join(pieces)


def _dialogue(source: TextSource, text: str, pair: Pair, question: str) -> list[Message]:
    """Return text and question: in one turn, in two turns, or with the text as system prompt."""
    answer = pair.fill(ANSWER)
    form = source.integer(0, 9)
    if form == 0:
        return [{"role": "system", "content": text}, *turn(question, answer)]
    if form <= 2:
        return turn("Read this text:\n" + text, ACKNOWLEDGED) + turn(question, answer)
    content = source.rng.choice(OPENINGS) + text
    content += source.rng.choice(("\n\n", "\n", " ", "\n\nQuestion: ")) + question
    return turn(content, answer)


def recall_chat(source: TextSource, low: int = 60, high: int = 1100) -> Chat:
    """Return a text in which values are hidden, and questions about them.

    Args:
        source: random numbers and texts.
        low: length of the shortest text in characters, about.
        high: length of the longest text in characters, about.
    """
    # The exponent makes short texts more frequent than long ones.
    size = low + int((high - low) * source.rng.random() ** 1.5)
    pairs = random_pairs(source, source.integer(1, 6))
    wanted = pairs[0]
    text = haystack(source, pairs, size, at_start=source.chance(0.5))
    messages = _dialogue(source, text, wanted, wanted.fill(source.rng.choice(QUESTIONS)))
    while source.chance(0.4):  # ask for another one
        other = source.rng.choice(pairs)
        messages += turn(other.fill(source.rng.choice(QUESTIONS)), other.fill(ANSWER))
    return Chat(messages, task="recall")


def plain_recall(source: TextSource, size: int, pairs: list[Pair], asked: Pair) -> Chat:
    """Return a text that begins with all pairs, and one question after it.

    Args:
        source: random texts.
        size: length in characters of the sentences between pairs and question, about.
        pairs: the pairs.
        asked: the pair that is asked for.
    """
    pieces = [pair.fill(NEEDLES[0]) for pair in pairs] + filler(source, size)
    question = " ".join(pieces) + "\n\n" + asked.fill(QUESTIONS[0])
    return Chat(turn(question, asked.fill(ANSWER)), task="recall")


def note_chat(source: TextSource) -> Chat:
    """Return two turns: in the first the user gives a value, in the second asks for it."""
    pair = random_pairs(source, 1)[0]
    answer = pair.fill(ANSWER)
    told = turn(pair.fill(source.rng.choice(NEEDLES[:4])), f"I will remember it. {answer}")
    asked = turn(pair.fill(source.rng.choice(QUESTIONS)), answer)
    return Chat(told + asked, task="recall")
