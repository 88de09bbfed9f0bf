"""Drafts of a model replayed over texts and cost models: scheduler and device in turn.

A text is the list of which of its tokens the draft model would have guessed. Devices are modelled
by the milliseconds of a step, of a draft forward, of the round trip, and of the building of a
graph, which only a step before it hides.
"""

import dataclasses
import random
from collections import deque

from services.scheduler.speculation.costs import StepWidth
from services.scheduler.speculation.drafting import Drafting
from services.scheduler.speculation.speculator import DecodingRow, PlannedDrafts, Speculator
from shared.messages import Speculation
from shared.settings import SpeculationConfig

PLANS_IN_FLIGHT = 2


@dataclasses.dataclass(frozen=True)
class Device:
    """Milliseconds of a step: fixed, per token; of a draft forward; and around it."""

    fixed_ms: float
    token_ms: float
    draft_ms: float
    """A draft forward, whatever its rows."""
    draft_token_ms: float
    round_trip_ms: float = 0.5
    build_ms: float = 1.0
    noise: float = 0.0
    """Steps vary by up to so much of their time."""

    def step_ms(self, counts: list[int], reads: list[int], chance: random.Random) -> float:
        """Return how long it computes a step; counts as in StepPlan.draft_counts."""
        width = 1 + max(0, *counts)
        forwards = 1 + max(counts)
        following = sum(count >= 0 for count in counts)
        taken = self.fixed_ms + self.token_ms * len(counts) * width
        taken += forwards * (self.draft_ms + self.draft_token_ms * following)
        taken += sum(self.draft_ms + self.draft_token_ms * read for read in reads if read)
        return taken * (1.0 + self.noise * (2.0 * chance.random() - 1.0))


@dataclasses.dataclass(eq=False)
class Text:
    """One sequence: which of the tokens that will come the draft model would guess."""

    guessed: list[bool]
    drafting: Drafting | None = None
    done: int = 0
    lag: int = 0
    verifying: bool = False
    row: int = 0
    """Tokens of its row, those of the prompt left out."""
    draft_row: int = 0

    @property
    def left(self) -> int:
        """Tokens that are not known yet."""
        return len(self.guessed) - self.done


@dataclasses.dataclass(frozen=True)
class Flight:
    """A plan on its way."""

    texts: list[Text]
    planned: PlannedDrafts
    reads: list[int]
    held: bool
    busy_ms: float
    idle_ms: float
    receipt_at_ms: float


class Replay:
    """Two plans in flight, but one while somebody is verified."""

    def __init__(self, device: Device, texts: list[Text], speculator: Speculator) -> None:
        self.device, self.texts, self.speculator = device, texts, speculator
        self.flights: deque[Flight] = deque()
        self.now_ms = self.device_end_ms = 0.0
        self.decisions: list[int] = []
        self.reads: list[int] = []
        self.chance = random.Random(1)

    def run(self) -> float:
        """Return tokens per millisecond."""
        tokens = sum(text.left for text in self.texts)
        self._send()
        while self.flights:
            self._receive(self.flights.popleft())
            self._send()
        assert not any(text.left for text in self.texts), "a plan was held for ever"
        return tokens / self.now_ms

    def _send(self) -> None:
        while len(self.flights) < PLANS_IN_FLIGHT:
            if any(text.verifying for text in self.texts):
                return
            texts = [text for text in self.texts if text.left > text.lag]
            if not texts:
                return
            rows = [
                DecodingRow(text.drafting, text.lag, text.left, text.row - text.draft_row)
                for text in texts
            ]
            planned = self.speculator.choose(rows)
            assert not planned.holds, "the ranks propose from what is on the device"
            self._launch(texts, planned)

    def _launch(self, texts: list[Text], planned: PlannedDrafts) -> None:
        counts = planned.counts or [-1] * len(texts)
        reads = planned.reads or [0] * len(texts)
        held = self.speculator.planned(planned, sum(reads))
        for text, count, read in zip(texts, counts, reads, strict=True):
            text.draft_row += read
            assert text.draft_row <= text.row
            if count >= 0:
                assert text.draft_row == text.row, "a draft row that is not level"
                text.draft_row += 1 + count
            assert count < text.left - text.lag
            text.row += 1 + max(0, count)
            text.lag += 1
            text.verifying = count > 0
        device = self.device
        arrives = self.now_ms + device.round_trip_ms / 2
        built = arrives + device.build_ms
        began = max(arrives, self.device_end_ms)
        idle_ms = began - self.device_end_ms
        self.device_end_ms = max(built, began) + device.step_ms(counts, reads, self.chance)
        busy_ms = self.device_end_ms - began
        receipt_at_ms = self.device_end_ms + device.round_trip_ms / 2
        self.flights.append(
            Flight(
                texts, planned, [one for one in reads if one], held, busy_ms, idle_ms, receipt_at_ms
            )
        )
        self.decisions.append(max(0, *counts))
        self.reads.append(sum(reads))

    def _receive(self, flight: Flight) -> None:
        self.now_ms = flight.receipt_at_ms
        shape: StepWidth = flight.planned.shape(len(flight.texts))
        self.speculator.finished(
            shape, flight.busy_ms, flight.idle_ms, held=flight.held, reads=flight.reads
        )
        counts = flight.planned.counts or [-1] * len(flight.texts)
        for text, count in zip(flight.texts, counts, strict=True):
            emitted = 1
            while emitted <= count and text.guessed[text.done + emitted - 1]:
                emitted += 1
            text.done += emitted
            text.lag -= 1
            if count > 0:
                text.verifying = False
                text.row += emitted - count - 1
                text.draft_row = min(text.draft_row, text.row)
                assert text.drafting is not None
                self.speculator.verified(text.drafting, count, emitted, emitted)


def guesses(quality: float, count: int, seed: int) -> list[bool]:
    """Return a text of which the draft model guesses so much."""
    chance = random.Random(seed)
    return [chance.random() < quality for _ in range(count)]


def replay(
    device: Device,
    texts: list[list[bool]],
    *,
    drafts: bool = True,
    prompt: int = 0,
    tokens_max: int = 5,
    speculator: Speculator | None = None,
) -> Replay:
    """Return a replay of these texts, not run; `prompt`: tokens that draft rows lack at first."""
    one = speculator or Speculator(
        SpeculationConfig(method="draft_model", draft_model="small", tokens_max=tokens_max)
    )
    sequences = [Text(list(text), row=prompt) for text in texts]
    for text in sequences:
        text.drafting = one.drafting([], Speculation()) if drafts else None
    return Replay(device, sequences, one)


def gain(
    device: Device,
    texts: list[list[bool]],
    *,
    prompt: int = 0,
    tokens_max: int = 5,
    rounds: int = 1,
) -> tuple[float, Replay]:
    """Return tokens per millisecond against the same without drafts; of the last of some rounds."""
    plain = replay(device, texts, drafts=False).run()
    drafted = replay(device, texts, prompt=prompt, tokens_max=tokens_max)
    rate = drafted.run()
    for _ in range(rounds - 1):
        drafted = replay(device, texts, prompt=prompt, speculator=drafted.speculator)
        rate = drafted.run()
    return rate / plain, drafted
