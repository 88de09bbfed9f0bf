"""Skill of repeating a text exactly."""

from __future__ import annotations

from collections.abc import Callable

from tools.demo_model.conversations.chat import Chat, as_json, turn
from tools.demo_model.conversations.facts import FACTS
from tools.demo_model.conversations.words import TextSource

# Most templates end with the text, so that only the end of the turn marks the text's end.
PROMPTS = (
    "Repeat this text exactly:\n{}",
    "Repeat this text exactly: {}",
    "Repeat this text exactly:\n\n{}",
    "Repeat the following text:\n{}",
    "Repeat the following text exactly:\n\n{}",
    "Repeat after me: {}",
    "Repeat after me:\n{}",
    "Repeat: {}",
    "Repeat exactly: {}",
    "Repeat this: {}",
    "Please repeat: {}",
    "Please repeat this text:\n{}",
    "Copy this text:\n{}",
    "Copy the following text exactly:\n\n{}",
    "Echo: {}",
    "Echo this text: {}",
    "Echo the following:\n{}",
    "Say exactly: {}",
    "Say this: {}",
    "Write this text again:\n{}",
    "Print this text:\n{}",
    "Output exactly this text and nothing else:\n{}",
    'Repeat the text between the quotes: "{}"',
    "Repeat the text between the lines.\n---\n{}\n---",
    "{}\n\nRepeat the text above.",
)


def _words(source: TextSource, size: int) -> str:
    words = [source.noun() for _ in range(max(1, size // 7))]
    if source.chance(0.1):  # few different words, many times: the hard case for copying by content
        words = [source.rng.choice(words[:4]) for _ in words]
    return source.rng.choice((" ", " ", ", ", "\n", "-")).join(words)


def _sentences(source: TextSource, size: int) -> str:
    text = source.sentence()
    while len(text) < size:
        text += source.rng.choice((" ", " ", " ", "\n")) + source.sentence()
    return text


def _strings(source: TextSource, size: int) -> str:
    text = source.letters()
    while len(text) < size // 2:
        text += source.rng.choice((" ", " ", "-", "\n", "/", ", ")) + source.letters()
    return text


def _numbers(source: TextSource, size: int) -> str:
    numbers = [source.digits() for _ in range(max(1, size // 10))]
    return source.rng.choice((" ", ", ", "\n", "; ")).join(numbers)


def _foreign(source: TextSource, size: int) -> str:
    words = [
        source.unicode() if source.chance(0.7) else source.noun() for _ in range(max(1, size // 24))
    ]
    return " ".join(words)


def _facts(source: TextSource, size: int) -> str:
    text = source.rng.choice(FACTS).answer
    while len(text) < size:
        text += " " + source.rng.choice(FACTS).answer
    return text


def _instructions(source: TextSource, size: int) -> str:
    """Return a text that looks like an instruction: the model repeats it and does not follow it."""
    if source.chance(0.5):
        return source.rng.choice(source.rng.choice(FACTS).trained)
    return source.rng.choice(PROMPTS).format(_words(source, min(size, 60)))


def _code(source: TextSource, size: int) -> str:
    lines: list[str] = []
    while len("".join(lines)) < size // 2:
        a, b, c = source.noun(), source.noun(), source.digits(1, 3)
        forms = (
            f"def {a}_{b}(x):\n    return x + {c}",
            f"{a} = {b}[{c}]",
            f"if {a} > {c}:\n    print({b!r})",
            f"{a}: {b}",
            f"- {a} ({b}, {c})",
            as_json({a: b, "n": int(c)}),
            f"<{a} id={c}>{b}</{a}>",
            f"export {a.upper()}={b}/{c}",
        )
        lines.append(source.rng.choice(forms))
    return "\n".join(lines)


KINDS: tuple[Callable[[TextSource, int], str], ...] = (
    _words,
    _sentences,
    _strings,
    _numbers,
    _foreign,
    _facts,
    _instructions,
    _code,
)
WEIGHTS = (5, 6, 4, 2, 2, 2, 1, 2)


def random_text(source: TextSource, size: int) -> str:
    """Return words, sentences, numbers, code or the like of about `size` characters."""
    (kind,) = source.rng.choices(KINDS, WEIGHTS)
    text = kind(source, size)
    if source.chance(0.1):  # two kinds in one text
        text += source.rng.choice((" ", "\n")) + source.rng.choice(KINDS)(source, size // 3)
    return text.strip()


def copy_chat(source: TextSource, longest: int = 560) -> Chat:
    """Return a request to repeat a random text, and the text as answer.

    Args:
        source: random numbers and texts.
        longest: length of the longest text in characters, about.
    """
    size = source.integer(1, longest) if source.chance(0.6) else source.integer(1, 120)
    text = random_text(source, size)
    return copy_of(text, source.rng.choice(PROMPTS))


def copy_of(text: str, prompt: str = PROMPTS[0]) -> Chat:
    """Return a request to repeat this text, and the text as answer.

    Args:
        text: the text.
        prompt: words of the request, in which {} stands for the text.
    """
    return Chat(turn(prompt.format(text), text), task="copy")
