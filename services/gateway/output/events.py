"""Events of one completion's output. Owns their kinds; knows no family of models and no dialect."""

from msgspec import Struct


class Text(Struct, frozen=True, gc=False):
    """A piece of the answer."""

    text: str


class Reasoning(Struct, frozen=True, gc=False):
    """A piece of what the model thinks before it answers or calls a tool."""

    text: str


class CallBegun(Struct, frozen=True, gc=False):
    """A tool call whose name is complete; all its arguments follow before anything else."""

    number: int
    """Position among the calls of its completion, counted from 0."""
    call_id: str
    """Id by which the tool's result answers the call."""
    name: str
    """Name of the tool."""


class CallArguments(Struct, frozen=True, gc=False):
    """A piece of the arguments of the latest call; together they are a JSON object as text."""

    text: str


class CallEnded(Struct, frozen=True, gc=False):
    """The end of the call that was begun last."""


OutputEvent = Text | Reasoning | CallBegun | CallArguments | CallEnded


def joined(events: list[OutputEvent]) -> list[OutputEvent]:
    """Return the same output with neighbouring pieces of one kind joined to one piece.

    However a completion's tokens arrive, its joined events are equal.
    """
    found: list[OutputEvent] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Text | Reasoning | CallArguments) and type(last) is type(event):
            found[-1] = type(event)(last.text + event.text)
        else:
            found.append(event)
    return found
