"""Probes of drafts that lose: what they are charged with, and what is no business of theirs."""

from services.scheduler.speculation.costs import DecodeWork
from services.scheduler.speculation.sequence_drafts import (
    DecodingRow,
    ModelDraftState,
    PromptRow,
)
from services.scheduler.speculation.speculator import PlannedDrafts, Speculator
from shared.configuration.settings import SpeculationConfig
from shared.messages import Speculation

NGRAM = PlannedDrafts([[1, 2, 3]])
PLAIN_MS, PROBE_MS = 10.0, 16.0


class Losing:
    """A sequence whose drafts, made by a model, never come true, on a device that never waits."""

    def __init__(self) -> None:
        config = SpeculationConfig(method="draft_model", draft_model="small", tokens_max=5)
        self.one = Speculator(config)
        drafting = self.one.new_draft_state([], Speculation())
        assert isinstance(drafting, ModelDraftState)
        self.drafting = drafting
        ngram = self.one.new_draft_state([1, 2, 3] * 5, Speculation(method="ngram"))
        assert ngram is not None
        self.ngram = ngram
        self.finish(PlannedDrafts([]))
        self.finish(PlannedDrafts([]))
        for _ in range(100):
            self.one.record_verification(self.drafting, 3, 1, 1)

    def choose(self, gap: int = 0) -> PlannedDrafts:
        """Ask what the next plan does."""
        return self.one.choose([DecodingRow(self.drafting, 0, 10_000, gap)])

    def finish(self, planned: PlannedDrafts, busy_ms: float = PLAIN_MS) -> None:
        """Let a plan be made and executed; no draft of it comes true."""
        was_held = self.one.record_plan(planned)
        self.one.record_step(planned.decode_work(1), busy_ms, 0.0, was_held=was_held)
        for count in planned.counts:
            if count > 0:
                self.one.record_verification(self.drafting, count, 1, 1)

    def steps_to_probe(self) -> int:
        """Make plain steps until a probe is due; return how many."""
        for steps in range(20_000):
            if self.choose().counts:
                return steps
            self.finish(PlannedDrafts([]))
        raise AssertionError("no probe")

    def probe(self, busy_ms: float = PROBE_MS) -> None:
        """Make the probe that is due."""
        planned = self.choose()
        assert planned.counts
        self.finish(planned, busy_ms)


def test_another_methods_steps_are_not_charged_to_a_probe() -> None:
    """Verified n-grams cost what they cost; the next probe of the model's drafts is due as ever."""
    alone, beside = Losing(), Losing()
    for one in (alone, beside):
        one.steps_to_probe()
        one.probe()
    for _ in range(3):
        beside.finish(NGRAM, 500.0)
    assert beside.steps_to_probe() == alone.steps_to_probe()


def test_a_probe_that_took_longer_than_foreseen_is_waited_off() -> None:
    """Also when a prompt was looked at meanwhile, which would have taken longer to read."""
    usual, slow, beside = Losing(), Losing(), Losing()
    for one in (usual, slow, beside):
        one.steps_to_probe()
    usual.probe()
    slow.probe(PROBE_MS + 100.0)
    planned = beside.choose()
    prompt = PromptRow(drafts_max=5, unread_tokens=4_000, tokens_left=1_000, token_ms=3.0)
    beside.one.should_read_prompt(prompt, 1)
    beside.finish(planned, PROBE_MS + 100.0)
    steps = slow.steps_to_probe()
    assert steps > 3 * usual.steps_to_probe()
    assert beside.steps_to_probe() == steps


def test_only_a_probes_own_drafts_make_it_hopeful() -> None:
    """What comes true in a later plan is no reason to probe at once."""
    quiet, lucky = Losing(), Losing()
    for one in (quiet, lucky):
        one.steps_to_probe()
        one.probe()
        one.finish(PlannedDrafts([]))
    lucky.one.record_verification(lucky.drafting, 1, 2, 2)
    assert lucky.steps_to_probe() > quiet.steps_to_probe() / 2


def test_reading_that_was_not_done_is_not_in_vain() -> None:
    """Plans that go to n-grams read nothing, so rows that lack much may read as ever after them."""
    config = SpeculationConfig(method="draft_model", draft_model="small", tokens_max=5)
    one = Speculator(config)
    for rows in (4, 8):
        for _ in range(3):
            one.record_step(DecodeWork(rows, 1, 0), 10.0, 0.0, was_held=False)
    models = [DecodingRow(one.new_draft_state([], Speculation()), 0, 1_000, 128) for _ in range(4)]
    asked = Speculation(method="ngram")
    ngrams = [
        DecodingRow(one.new_draft_state([1, 2, 3, 4] * 30, asked), 0, 1_000) for _ in range(4)
    ]
    first = one.choose(models)
    assert first.reads == [128, 0, 0, 0]
    for _ in range(10):
        planned = one.choose([*models, *ngrams])
        assert planned.drafts
        one.record_plan(planned)
    assert one.choose(models).reads == first.reads


def test_the_configured_method_goes_first_where_nothing_is_weighed() -> None:
    """Without adapting, rows that ask for n-grams take turns where the model has nothing to do."""
    config = SpeculationConfig(
        method="draft_model", draft_model="small", tokens_max=5, adaptive=False
    )
    one = Speculator(config)
    model = one.new_draft_state([], Speculation())
    ngram = one.new_draft_state([1, 2, 3, 4] * 9, Speculation(method="ngram"))
    rows = [DecodingRow(ngram, 0, 100), DecodingRow(model, 0, 100), DecodingRow(None, 0, 100)]
    assert one.choose(rows).counts == [-1, 5, -1]
    ends = [rows[0], DecodingRow(model, 0, 1), rows[2]]
    assert one.choose(ends).drafts == [[1, 2, 3, 4, 1], [], []]
