"""Speculation replayed over texts and cost models: it brings much or costs next to nothing.

Texts are known in advance, and a draft is accepted when it is what the text goes on with, as on the
ranks, where drafts never change which tokens come. Devices are modelled by the milliseconds of a
step, the round trip, and the building of a graph, which only a step before it hides.
"""

import dataclasses
import random
from collections import deque
from collections.abc import Callable
from typing import Literal

import pytest

from services.scheduler.speculation.costs import StepWidth
from services.scheduler.speculation.drafting import Drafting
from services.scheduler.speculation.speculator import DecodingRow, Speculator
from shared.messages import Speculation
from shared.settings import SpeculationConfig

PLANS_IN_FLIGHT = 2


@dataclasses.dataclass(frozen=True)
class Device:
    """Milliseconds of a step: fixed, per token; and around it."""

    fixed_ms: float
    token_ms: float
    round_trip_ms: float = 0.5
    build_ms: float = 1.0
    noise: float = 0.0
    """Steps vary by up to so much of their time."""

    def step_ms(self, counts: list[int], chance: random.Random) -> float:
        """Return how long it computes so many tokens per row.

        Rows are padded to the longest, or those with drafts have a forward of their own.
        """
        noise = 1.0 + self.noise * (2.0 * chance.random() - 1.0)
        drafted = sum(count > 1 for count in counts)
        together = self.fixed_ms + self.token_ms * len(counts) * max(counts)
        apart = self.token_ms * (len(counts) + drafted * (max(counts) - 1)) + 2 * self.fixed_ms
        return min(together, apart) * noise


GPU = Device(fixed_ms=10.0, token_ms=0.04)
"""Bound by memory: a token more costs next to nothing."""
SMALL_GPU = Device(fixed_ms=3.0, token_ms=0.02, build_ms=2.5)
"""A small model: what lock-step exposes is as long as a step."""
CPU = Device(fixed_ms=2.0, token_ms=1.5)
"""Bound by computing: every token costs its time."""
DEMO_CPU = Device(fixed_ms=3.0, token_ms=0.27)
"""The demo model on two cores, as measured."""
FAR = Device(fixed_ms=4.0, token_ms=0.02, round_trip_ms=12.0)
"""Ranks far away: waiting for results takes three times a step."""
NOISY = Device(fixed_ms=3.0, token_ms=0.02, build_ms=2.5, noise=0.25)
NOISY_CPU = Device(fixed_ms=2.0, token_ms=1.5, noise=0.25)
DEVICES = {
    "gpu": GPU,
    "small_gpu": SMALL_GPU,
    "cpu": CPU,
    "demo_cpu": DEMO_CPU,
    "far": FAR,
    "noisy": NOISY,
    "noisy_cpu": NOISY_CPU,
}


@dataclasses.dataclass(eq=False)
class Text:
    """One sequence: what is known, and what will come."""

    tokens: list[int]
    rest: list[int]
    drafting: Drafting | None = None
    lag: int = 0
    verifying: bool = False

    @property
    def left(self) -> int:
        """Tokens that will come."""
        return len(self.rest)


@dataclasses.dataclass(frozen=True)
class Flight:
    """A plan on its way."""

    texts: list[Text]
    drafts: list[list[int]]
    shape: StepWidth
    held: bool
    busy_ms: float
    idle_ms: float
    receipt_at_ms: float


class Replay:
    """Scheduler and device in turn, two plans in flight unless speculation holds one back."""

    def __init__(self, device: Device, texts: list[Text], speculator: Speculator) -> None:
        self.device, self.texts, self.speculator = device, texts, speculator
        self.flights: deque[Flight] = deque()
        self.now_ms = self.device_end_ms = 0.0
        self.decisions: list[int] = []
        self.chance = random.Random(1)

    def run(self) -> float:
        """Return tokens per millisecond."""
        tokens = sum(text.left for text in self.texts)
        self.send()
        while self.flights:
            self.receive(self.flights.popleft())
            self.send()
        assert not any(text.left for text in self.texts), "a plan was held for ever"
        return tokens / self.now_ms

    def send(self) -> None:
        while len(self.flights) < PLANS_IN_FLIGHT:
            if any(text.verifying for text in self.texts):
                return
            texts = [text for text in self.texts if text.left > text.lag]
            if not texts:
                return
            rows = [DecodingRow(text.drafting, text.lag, text.left) for text in texts]
            planned = self.speculator.choose(rows)
            if planned.holds:
                assert self.flights, "nothing is in flight, so nothing would end the wait"
                return
            held = self.speculator.planned(planned)
            drafts = planned.drafts or [[] for _ in texts]
            for text, tokens in zip(texts, drafts, strict=True):
                assert not (tokens and text.lag), "drafts follow tokens that are not known"
                assert len(tokens) < text.left
                text.lag += 1
                text.verifying = bool(tokens)
            self.launch(texts, drafts, planned.shape(len(texts)), held=held)

    def launch(
        self, texts: list[Text], drafts: list[list[int]], shape: StepWidth, *, held: bool
    ) -> None:
        device = self.device
        arrives = self.now_ms + device.round_trip_ms / 2
        built = arrives + device.build_ms
        began = max(arrives, self.device_end_ms)
        idle_ms = began - self.device_end_ms
        self.device_end_ms = max(built, began) + device.step_ms(
            [1 + len(one) for one in drafts], self.chance
        )
        busy_ms = self.device_end_ms - began
        receipt_at_ms = self.device_end_ms + device.round_trip_ms / 2
        self.flights.append(Flight(texts, drafts, shape, held, busy_ms, idle_ms, receipt_at_ms))
        self.decisions.append(shape.width - 1)

    def receive(self, flight: Flight) -> None:
        self.now_ms = flight.receipt_at_ms
        self.speculator.finished(flight.shape, flight.busy_ms, flight.idle_ms, held=flight.held)
        for text, drafts in zip(flight.texts, flight.drafts, strict=True):
            emitted = 1
            while emitted <= len(drafts) and drafts[emitted - 1] == text.rest[emitted - 1]:
                emitted += 1
            text.tokens += text.rest[:emitted]
            del text.rest[:emitted]
            text.lag -= 1
            text.verifying = False
            if drafts and text.drafting is not None:
                self.speculator.verified(text.drafting, len(drafts), emitted, emitted)


def prose(seed: int, count: int) -> list[int]:
    """Words by their frequency in language: pairs come again by chance, and go on otherwise."""
    rnd = random.Random(seed)
    return rnd.choices(range(8_000), [1 / (rank + 2) for rank in range(8_000)], k=count)


def plain_text(seed: int) -> Text:
    return Text(prose(seed, 600), prose(seed + 1_000, 500))


def copied_text(seed: int) -> Text:
    """An edit: the prompt's text once more, with a word changed here and there."""
    prompt = prose(seed, 700)
    rnd = random.Random(seed)
    copy = [rnd.randrange(8_000) if rnd.random() < 0.015 else token for token in prompt[100:]]
    return Text(prompt, copy)


def code(seed: int) -> Text:
    """Lines of a few forms, with names from a short list."""
    rnd = random.Random(seed)
    forms = [[rnd.randrange(100, 8_000) for _ in range(12)] for _ in range(6)]
    tokens = []
    for _ in range(90):
        line = list(rnd.choice(forms))
        for place in (3, 8):
            line[place] = rnd.randrange(20)
        tokens += line
    return Text(tokens[:500], tokens[500:])


def trap(seed: int) -> Text:
    """One line again and again, each time with another word at the end: long matches that fail."""
    rnd = random.Random(seed)
    line = [rnd.randrange(8_000) for _ in range(7)]
    tokens = []
    for _ in range(100):
        tokens += [token for token in line if rnd.random() < 0.6]
        tokens.append(rnd.randrange(8_000))
    return Text(tokens[:200], tokens[200:])


def mixed_text(seed: int) -> Text:
    """Prose, then a copy of it, then prose again."""
    first, last = prose(seed, 200), prose(seed + 7, 200)
    return Text(prose(seed + 9, 300), first + first + last)


def gain(
    device: Device, make: Callable[[int], Text], rows: int, tokens_max: int = 5
) -> tuple[float, Replay]:
    """Return tokens per millisecond against the same without speculation."""
    rates = []
    methods: tuple[Literal["off", "ngram"], ...] = ("off", "ngram")
    for method in methods:
        config = SpeculationConfig(method=method, tokens_max=tokens_max)
        speculator = Speculator(config)
        texts = [make(seed) for seed in range(rows)]
        for text in texts:
            text.drafting = speculator.drafting(text.tokens, Speculation())
        replay = Replay(device, texts, speculator)
        rates.append(replay.run())
    return rates[1] / rates[0], replay


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_lost_on_text_without_repetition(device: str, rows: int) -> None:
    """On prose nothing is more than 3 % slower, whatever a step costs."""
    assert gain(DEVICES[device], plain_text, rows)[0] >= 0.97


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_lost_on_matches_that_fail(device: str, rows: int) -> None:
    """Text whose matches promise what never comes is found out."""
    assert gain(DEVICES[device], trap, rows)[0] >= 0.97


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("make", [copied_text, code, mixed_text])
@pytest.mark.parametrize("device", ["cpu", "demo_cpu", "far", "noisy", "noisy_cpu"])
def test_nothing_is_lost_where_drafts_cost_more_than_they_save(
    device: str, make: Callable[[int], Text], rows: int
) -> None:
    """Where drafts lose, that is found out in a few steps, also by times that scatter."""
    assert gain(DEVICES[device], make, rows)[0] >= 0.97


@pytest.mark.parametrize(("rows", "least"), [(1, 1.8), (8, 1.8), (32, 1.5)])
def test_copies_come_faster_where_memory_bounds(rows: int, least: float) -> None:
    """Copied text comes 1.8 times as fast on a GPU."""
    assert gain(GPU, copied_text, rows)[0] >= least


def test_code_comes_faster_where_memory_bounds() -> None:
    """Code that repeats its forms comes faster, although its names differ."""
    assert gain(GPU, code, 1)[0] >= 1.4
    assert gain(GPU, code, 8)[0] >= 1.4


def test_small_models_gain_in_spite_of_lock_step() -> None:
    """What lock-step exposes is weighed, and still pays where whole texts are copied."""
    assert gain(SMALL_GPU, copied_text, 1)[0] >= 1.2


def test_drafts_stop_and_come_back() -> None:
    """Prose gets no drafts, a copy after it does within a few steps, prose after that none."""
    ratio, replay = gain(GPU, mixed_text, 1)
    drafted = [place for place, drafts in enumerate(replay.decisions) if drafts]
    assert ratio > 1.2
    assert drafted[0] > 150, "prose has next to no drafts"
    assert len([place for place in drafted if place > drafted[0] + 90]) < 10


def test_the_threshold_of_rows_is_learnt() -> None:
    """The same device verifies for few rows and not for many, by measured periods alone."""
    device = Device(fixed_ms=10.0, token_ms=1.5)
    few, some = gain(device, copied_text, 1)
    many, none = gain(device, copied_text, 48)
    assert few > 1.5
    assert many >= 0.97
    share = [sum(map(bool, one.decisions)) / len(one.decisions) for one in (some, none)]
    assert share[0] > 0.6
    assert share[1] < 0.1


def test_decisions_are_the_same_each_time() -> None:
    """Nothing but texts and costs decides."""
    first, second = (gain(GPU, code, 4)[1].decisions for _ in range(2))
    assert first == second
    assert any(first)
