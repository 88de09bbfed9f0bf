"""Replays of speculation over known texts and cost models of devices.

Texts are known in advance. A draft is accepted when the text continues with it, as on ranks, where
drafts never change the tokens. For drafts that ranks propose, the text says which ones are right. A
device is modelled by the milliseconds of a step, of a draft forward, of the round trip, and of
building a graph, which only a step before it hides.
"""

import dataclasses
import random
from collections import deque
from collections.abc import Callable

from services.scheduler.speculation.methods import Method, is_model
from services.scheduler.speculation.sequence_drafts import (
    DecodingRow,
    DraftState,
    PlannedDrafts,
)
from services.scheduler.speculation.speculator import Speculator
from shared.configuration.settings import SpeculationConfig
from shared.messages import Speculation

PLANS_IN_FLIGHT = 2


@dataclasses.dataclass(frozen=True)
class Device:
    """Cost model of a device in milliseconds: a step's fixed time and time per token, a draft
    forward, and the times around a step."""

    fixed_ms: float
    token_ms: float
    draft_ms: float = 0.0
    """A draft forward, for any number of rows."""
    draft_token_ms: float = 0.0
    round_trip_ms: float = 0.5
    build_ms: float = 1.0
    noise: float = 0.0
    """Step times vary by up to this fraction."""

    def step_ms(self, planned: PlannedDrafts, rows: int, rng: random.Random) -> float:
        """Return the milliseconds of a plan.

        Rows are padded to the longest drafts, or rows with drafts have a forward of their own.
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
        return taken * (1.0 + self.noise * (2.0 * rng.random() - 1.0))


@dataclasses.dataclass(eq=False)
class ReplayedText:
    """One sequence: known tokens, future tokens, and which of them a draft model guesses."""

    tokens: list[int]
    future_tokens: list[int]
    hits: list[bool] = dataclasses.field(default_factory=list)
    draft_state: DraftState | None = None
    tokens_done: int = 0
    tokens_in_flight: int = 0
    is_verifying: bool = False
    row_tokens: int = 0
    """Tokens of its row."""
    draft_row_tokens: int = 0

    @property
    def tokens_left(self) -> int:
        """Number of tokens that are not known yet."""
        return len(self.future_tokens) - self.tokens_done

    def count_accepted(self, drafts: list[int], count: int) -> int:
        """Return how many drafts are right: given ones, or `count` drafts of a model."""
        future_tokens, tokens_done = self.future_tokens, self.tokens_done
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == future_tokens[tokens_done + accepted]:
            accepted += 1
        while accepted < count and self.hits[tokens_done + accepted]:
            accepted += 1
        return accepted


@dataclasses.dataclass(frozen=True)
class ReplayedPlan:
    """A plan in flight."""

    texts: list[ReplayedText]
    planned: PlannedDrafts
    was_held: bool
    busy_ms: float
    idle_ms: float
    receipt_at_ms: float


class Replay:
    """Runs a speculator with two plans in flight, or one while drafts are verified or a plan is
    held."""

    def __init__(self, device: Device, texts: list[ReplayedText], speculator: Speculator) -> None:
        self.device, self.texts, self.speculator = device, texts, speculator
        self.plans_in_flight: deque[ReplayedPlan] = deque()
        self.now_ms = self.device_end_ms = 0.0
        self.decisions: list[int] = []
        """Largest number of drafts of a row, by plan."""
        self.reads: list[int] = []
        """Tokens that draft rows read, by plan."""
        self.rng = random.Random(1)

    def run(self) -> float:
        """Run to the end of all texts; return tokens per millisecond."""
        tokens = sum(text.tokens_left for text in self.texts)
        self._send()
        while self.plans_in_flight:
            self._receive(self.plans_in_flight.popleft())
            self._send()
        assert not any(text.tokens_left for text in self.texts), "a plan was held forever"
        return tokens / self.now_ms

    @property
    def drafted_share(self) -> float:
        """Share of the plans that had drafts."""
        return sum(map(bool, self.decisions)) / len(self.decisions)

    def _send(self) -> None:
        while len(self.plans_in_flight) < PLANS_IN_FLIGHT:
            if any(text.is_verifying for text in self.texts):
                return
            texts = [text for text in self.texts if text.tokens_left > text.tokens_in_flight]
            if not texts:
                return
            planned = self.speculator.choose([_row(text) for text in texts])
            if planned.waits_for_results:
                assert self.plans_in_flight, "a plan waits for results, but no plan is in flight"
                return
            self._launch(texts, planned)

    def _launch(self, texts: list[ReplayedText], planned: PlannedDrafts) -> None:
        was_held = self.speculator.record_plan(planned, sum(planned.reads))
        for text, drafts, count, read in _by_row(texts, planned):
            assert not (drafts and text.tokens_in_flight), "drafts need known tokens"
            text.draft_row_tokens += read
            assert text.draft_row_tokens <= text.row_tokens
            if count >= 0:
                assert not _row(text).unread_tokens, "the draft row lacks tokens"
                text.draft_row_tokens = text.row_tokens + 1 + count
            proposed = max(len(drafts), count)
            assert proposed < text.tokens_left - text.tokens_in_flight
            text.row_tokens += 1 + max(0, proposed)
            text.tokens_in_flight += 1
            text.is_verifying = proposed > 0
        device = self.device
        arrives = self.now_ms + device.round_trip_ms / 2
        built = arrives + device.build_ms
        began = max(arrives, self.device_end_ms)
        idle_ms = began - self.device_end_ms
        taken_ms = device.step_ms(planned, len(texts), self.rng)
        self.device_end_ms = max(built, began) + taken_ms
        busy_ms = self.device_end_ms - began
        receipt_at_ms = self.device_end_ms + device.round_trip_ms / 2
        self.plans_in_flight.append(
            ReplayedPlan(texts, planned, was_held, busy_ms, idle_ms, receipt_at_ms)
        )
        self.decisions.append(planned.decode_work(len(texts)).width - 1)
        self.reads.append(sum(planned.reads))

    def _receive(self, plan: ReplayedPlan) -> None:
        self.now_ms = plan.receipt_at_ms
        planned = plan.planned
        shape = planned.decode_work(len(plan.texts))
        reads = [read for read in planned.reads if read]
        self.speculator.record_step(
            shape, plan.busy_ms, plan.idle_ms, was_held=plan.was_held, reads=reads
        )
        for text, drafts, count, _ in _by_row(plan.texts, planned):
            proposed = max(0, len(drafts), count)
            emitted = 1 + text.count_accepted(drafts, count)
            text.tokens += text.future_tokens[text.tokens_done : text.tokens_done + emitted]
            text.tokens_done += emitted
            text.tokens_in_flight -= 1
            if proposed:
                text.is_verifying = False
                text.row_tokens += emitted - proposed - 1
                text.draft_row_tokens = min(text.draft_row_tokens, text.row_tokens)
                assert text.draft_state is not None
                self.speculator.record_verification(text.draft_state, proposed, emitted, emitted)


def _row(text: ReplayedText) -> DecodingRow:
    has_draft_row = text.draft_state is not None and text.draft_state.method == "draft_model"
    return DecodingRow(
        text.draft_state,
        text.tokens_in_flight,
        text.tokens_left,
        text.row_tokens - text.draft_row_tokens if has_draft_row else 0,
    )


def _by_row(
    texts: list[ReplayedText], planned: PlannedDrafts
) -> list[tuple[ReplayedText, list[int], int, int]]:
    drafts: list[list[int]] = planned.drafts or [[] for _ in texts]
    counts = planned.counts or [-1] * len(texts)
    reads = planned.reads or [0] * len(texts)
    return list(zip(texts, drafts, counts, reads, strict=True))


def draw_draft_hits(quality: float, count: int, seed: int) -> list[bool]:
    """Draw which of `count` tokens a draft model of this quality guesses."""
    rng = random.Random(seed)
    return [rng.random() < quality for _ in range(count)]


def text_with_hits(hits: list[bool], prompt: int = 0) -> ReplayedText:
    """Return a text with the given guesses; `prompt`: tokens that its draft row lacks at first."""
    return ReplayedText([], [0] * len(hits), list(hits), row_tokens=prompt)


def make_speculator(method: Method, tokens_max: int = 5, *, adaptive: bool = True) -> Speculator:
    """Return a speculator of a server with this method."""
    return Speculator(
        SpeculationConfig(
            method=method,
            draft_model="small" if is_model(method) else "",
            tokens_max=tokens_max,
            adaptive=adaptive,
        )
    )


def make_replay(device: Device, texts: list[ReplayedText], speculator: Speculator) -> Replay:
    """Return a replay of these texts that has not started."""
    for text in texts:
        text.draft_state = speculator.new_draft_state(text.tokens, Speculation())
    return Replay(device, texts, speculator)


def measure_speedup(
    device: Device,
    make: Callable[[int], ReplayedText],
    rows: int,
    speculator: Speculator,
    *,
    rounds: int = 1,
) -> tuple[float, Replay]:
    """Return tokens per millisecond relative to a run without drafts, and the replay of the last
    round.

    Args:
        device: cost model of the steps.
        make: makes a text from a seed; texts of the last round equal those without drafts.
        rows: number of texts at once.
        one: the speculator, which keeps its measurements between rounds.
        rounds: number of runs over the same texts.
    """
    off = Speculator(SpeculationConfig())
    plain = make_replay(device, [make(seed) for seed in range(rows)], off).run()
    for _ in range(rounds):
        drafted = make_replay(device, [make(seed) for seed in range(rows)], speculator)
        rate = drafted.run()
    return rate / plain, drafted
