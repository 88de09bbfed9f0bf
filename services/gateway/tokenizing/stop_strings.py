"""Search for stop strings in streamed text. Holds back only text that may begin a stop string."""


class StopStrings:
    """Search for the first stop string in one completion's text.

    Each stop string is a Knuth-Morris-Pratt automaton (Knuth, Morris and Pratt, 1977) that moves
    once per character, so the cost does not depend on how the text is divided into pieces.
    """

    def __init__(self, stops: list[str]) -> None:
        """Begin without text.

        Args:
            stops: the stop strings, none of them empty.
        """
        self._stops = stops
        self._failures = [_failures(stop) for stop in stops]
        self._states = [0] * len(stops)
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._held = ""
        self.found = ""
        """The stop string that was found; "": none yet."""

    def push(self, text: str) -> tuple[str, bool]:
        """Search the next piece of text for stop strings.

        Returns:
            (text, found): the text that can be sent now, and whether a stop string was found,
            before which the text ends. Characters that may begin a stop string are held back.
        """
        if not self._held and self._first_chars.isdisjoint(text):
            return text, False
        buffer = self._held + text
        states = self._states
        for end in range(len(self._held), len(buffer)):
            longest_match = self._step(buffer[end])
            if longest_match:
                self._held = ""
                self.found = buffer[end + 1 - longest_match : end + 1]
                return buffer[: end + 1 - longest_match], True
        safe = len(buffer) - max(states)
        self._held = buffer[safe:]
        return buffer[:safe], False

    def finish(self) -> str:
        """Return the text held back at the completion's end, where no stop string can follow."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> int:
        """Move all automata by one character; return the length of the longest complete match."""
        longest_match = 0
        states = self._states
        for number, stop in enumerate(self._stops):
            state = states[number]
            failures = self._failures[number]
            while state and stop[state] != char:
                state = failures[state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                longest_match = max(longest_match, state)
                state = 0
            states[number] = state
        return longest_match


def _failures(stop: str) -> list[int]:
    """Return, per prefix, the length of its longest proper prefix that is also its suffix."""
    failures = [0] * len(stop)
    state = 0
    for at in range(1, len(stop)):
        while state and stop[at] != stop[state]:
            state = failures[state - 1]
        if stop[at] == stop[state]:
            state += 1
        failures[at] = state
    return failures
