"""Speculation replayed over texts and cost models: scheduler and device in turn.

Texts are known in advance, and a draft is accepted when it is what the text goes on with, as on the
ranks, where drafts never change which tokens come. Of drafts that ranks propose themselves a text
says which ones come true. Devices are modelled by the milliseconds of a step, of a draft forward,
of the round trip, and of the building of a graph, which only a step before it hides.
"""

import dataclasses
import random
from collections import deque
from collections.abc import Callable

from services.scheduler.speculation.methods import Method, is_model
from services.scheduler.speculation.sequence_drafts import (
    DecodingRow,
    DraftState,
)
from services.scheduler.speculation.speculator import PlannedDrafts, Speculator
from shared.configuration.settings import SpeculationConfig
from shared.messages import Speculation

PLANS_IN_FLIGHT = 2


@dataclasses.dataclass(frozen=True)
class Device:
    """Milliseconds of a step: fixed, per token; of a draft forward; and around it."""

    fixed_ms: float
    token_ms: float
    draft_ms: float = 0.0
    """A draft forward, whatever its rows."""
    draft_token_ms: float = 0.0
    round_trip_ms: float = 0.5
    build_ms: float = 1.0
    noise: float = 0.0
    """Steps vary by up to so much of their time."""

    def step_ms(self, planned: PlannedDrafts, rows: int, chance: random.Random) -> float:
        """Return how long it computes a plan.

        Rows are padded to the longest drafts, or those with drafts have a forward of their own.
        """
        counts = planned.counts or [len(drafts) for drafts in planned.drafts] or [0] * rows
        longest = max(0, *counts)
        drafted = sum(count > 0 for count in counts)
        together = self.fixed_ms + self.token_ms * rows * (1 + longest)
        apart = 2 * self.fixed_ms + self.token_ms * (rows + drafted * longest)
        taken = min(together, apart)
        if planned.counts:
            following = sum(count >= 0 for count in counts)
            taken += (1 + longest) * (self.draft_ms + self.draft_token_ms * following)
        taken += sum(self.draft_ms + self.draft_token_ms * read for read in planned.reads if read)
        return taken * (1.0 + self.noise * (2.0 * chance.random() - 1.0))


@dataclasses.dataclass(eq=False)
class ReplayedText:
    """One sequence: what is known, what will come, and what a draft model would guess of that."""

    tokens: list[int]
    rest: list[int]
    guessed: list[bool] = dataclasses.field(default_factory=list)
    draft_state: DraftState | None = None
    done: int = 0
    lag: int = 0
    verifying: bool = False
    row: int = 0
    """Tokens of its row."""
    draft_row: int = 0

    @property
    def left(self) -> int:
        """Tokens that are not known yet."""
        return len(self.rest) - self.done

    def accepts(self, drafts: list[int], count: int) -> int:
        """Return how many drafts come true: of those known here, or of so many of a model."""
        rest, done = self.rest, self.done
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == rest[done + accepted]:
            accepted += 1
        while accepted < count and self.guessed[done + accepted]:
            accepted += 1
        return accepted


@dataclasses.dataclass(frozen=True)
class ReplayedPlan:
    """A plan on its way."""

    texts: list[ReplayedText]
    planned: PlannedDrafts
    was_held: bool
    busy_ms: float
    idle_ms: float
    receipt_at_ms: float


class Replay:
    """Two plans in flight, but one while somebody is verified, or speculation holds one back."""

    def __init__(self, device: Device, texts: list[ReplayedText], speculator: Speculator) -> None:
        self.device, self.texts, self.speculator = device, texts, speculator
        self.flights: deque[ReplayedPlan] = deque()
        self.now_ms = self.device_end_ms = 0.0
        self.decisions: list[int] = []
        """By plan, the most drafts of a row."""
        self.reads: list[int] = []
        """By plan, tokens that draft rows read."""
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

    @property
    def drafted_share(self) -> float:
        """Part of the plans that had drafts."""
        return sum(map(bool, self.decisions)) / len(self.decisions)

    def _send(self) -> None:
        while len(self.flights) < PLANS_IN_FLIGHT:
            if any(text.verifying for text in self.texts):
                return
            texts = [text for text in self.texts if text.left > text.lag]
            if not texts:
                return
            planned = self.speculator.choose([_row(text) for text in texts])
            if planned.waits_for_results:
                assert self.flights, "nothing is in flight, so nothing would end the wait"
                return
            self._launch(texts, planned)

    def _launch(self, texts: list[ReplayedText], planned: PlannedDrafts) -> None:
        was_held = self.speculator.record_plan(planned, sum(planned.reads))
        for text, drafts, count, read in _by_row(texts, planned):
            assert not (drafts and text.lag), "drafts follow tokens that are not known"
            text.draft_row += read
            assert text.draft_row <= text.row
            if count >= 0:
                assert not _row(text).unread_tokens, "a draft row that is not level"
                text.draft_row = text.row + 1 + count
            proposed = max(len(drafts), count)
            assert proposed < text.left - text.lag
            text.row += 1 + max(0, proposed)
            text.lag += 1
            text.verifying = proposed > 0
        device = self.device
        arrives = self.now_ms + device.round_trip_ms / 2
        built = arrives + device.build_ms
        began = max(arrives, self.device_end_ms)
        idle_ms = began - self.device_end_ms
        taken_ms = device.step_ms(planned, len(texts), self.chance)
        self.device_end_ms = max(built, began) + taken_ms
        busy_ms = self.device_end_ms - began
        receipt_at_ms = self.device_end_ms + device.round_trip_ms / 2
        self.flights.append(ReplayedPlan(texts, planned, was_held, busy_ms, idle_ms, receipt_at_ms))
        self.decisions.append(planned.decode_work(len(texts)).width - 1)
        self.reads.append(sum(planned.reads))

    def _receive(self, flight: ReplayedPlan) -> None:
        self.now_ms = flight.receipt_at_ms
        planned = flight.planned
        shape = planned.decode_work(len(flight.texts))
        reads = [read for read in planned.reads if read]
        self.speculator.record_step(
            shape, flight.busy_ms, flight.idle_ms, was_held=flight.was_held, reads=reads
        )
        for text, drafts, count, _ in _by_row(flight.texts, planned):
            proposed = max(0, len(drafts), count)
            emitted = 1 + text.accepts(drafts, count)
            text.tokens += text.rest[text.done : text.done + emitted]
            text.done += emitted
            text.lag -= 1
            if proposed:
                text.verifying = False
                text.row += emitted - proposed - 1
                text.draft_row = min(text.draft_row, text.row)
                assert text.draft_state is not None
                self.speculator.record_verification(text.draft_state, proposed, emitted, emitted)


def _row(text: ReplayedText) -> DecodingRow:
    lacks = text.draft_state is not None and text.draft_state.method == "draft_model"
    return DecodingRow(
        text.draft_state, text.lag, text.left, text.row - text.draft_row if lacks else 0
    )


def _by_row(
    texts: list[ReplayedText], planned: PlannedDrafts
) -> list[tuple[ReplayedText, list[int], int, int]]:
    drafts: list[list[int]] = planned.drafts or [[] for _ in texts]
    counts = planned.counts or [-1] * len(texts)
    reads = planned.reads or [0] * len(texts)
    return list(zip(texts, drafts, counts, reads, strict=True))


def draw_draft_hits(quality: float, count: int, seed: int) -> list[bool]:
    """Return which of so many tokens a draft model guesses that guesses so much."""
    chance = random.Random(seed)
    return [chance.random() < quality for _ in range(count)]


def text_with_hits(guessed: list[bool], prompt: int = 0) -> ReplayedText:
    """Return a text of which so much is guessed; `prompt`: tokens that its draft row lacks."""
    return ReplayedText([], [0] * len(guessed), list(guessed), row=prompt)


def make_speculator(method: Method, tokens_max: int = 5, *, adaptive: bool = True) -> Speculator:
    """Return one for a server that is set up for this method."""
    return Speculator(
        SpeculationConfig(
            method=method,
            draft_model="small" if is_model(method) else "",
            tokens_max=tokens_max,
            adaptive=adaptive,
        )
    )


def make_replay(device: Device, texts: list[ReplayedText], one: Speculator) -> Replay:
    """Return a replay of these texts, not run."""
    for text in texts:
        text.draft_state = one.new_draft_state(text.tokens, Speculation())
    return Replay(device, texts, one)


def measure_speedup(
    device: Device,
    make: Callable[[int], ReplayedText],
    rows: int,
    one: Speculator,
    *,
    rounds: int = 1,
) -> tuple[float, Replay]:
    """Return tokens per millisecond against the same without drafts; of the last of some rounds.

    Args:
        device: what steps cost.
        make: makes a text of a seed; those of the last round are as those without drafts.
        rows: texts at once.
        one: what decides; it keeps what it learns from round to round.
        rounds: so often that many texts.
    """
    off = Speculator(SpeculationConfig())
    plain = make_replay(device, [make(seed) for seed in range(rows)], off).run()
    for _ in range(rounds):
        drafted = make_replay(device, [make(seed) for seed in range(rows)], one)
        rate = drafted.run()
    return rate / plain, drafted
