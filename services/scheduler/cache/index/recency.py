"""In which order things are given up: least recently touched first, one class after the other."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Recency(Generic[T]):
    """Things in two classes; those that go last go after all others."""

    def __init__(self) -> None:
        self._classes: tuple[OrderedDict[T, None], OrderedDict[T, None]]
        self._classes = (OrderedDict(), OrderedDict())

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._classes[0]) + len(self._classes[1])

    def __contains__(self, thing: T) -> bool:
        """Tell whether it is there, in whichever class."""
        return thing in self._classes[0] or thing in self._classes[1]

    def of_class(self, *, last: bool) -> Iterator[T]:
        """Iterate over one class, the least recently touched first."""
        return iter(self._classes[last])

    def add(self, thing: T, *, last: bool) -> None:
        """Take a new one in, as just touched."""
        self._classes[last][thing] = None

    def remove(self, thing: T, *, last: bool) -> None:
        """Let one go."""
        del self._classes[last][thing]

    def touch(self, thing: T, *, last: bool) -> None:
        """Note that one was used."""
        self._classes[last].move_to_end(thing)

    def clear(self) -> None:
        """Let all go."""
        self._classes[0].clear()
        self._classes[1].clear()
