"""Probes of drafts that lose: their cost, their schedule, and effects that must not change it."""

from services.scheduler.speculation.costs import DecodeWork
from services.scheduler.speculation.sequence_drafts import (
    DecodingRow,
    ModelDraftState,
    PlannedDrafts,
    PromptRow,
)
from services.scheduler.speculation.speculator import Speculator
from shared.configuration.settings import SpeculationConfig
from shared.messages import Speculation

NGRAM = PlannedDrafts([[1, 2, 3]])
PLAIN_MS, PROBE_MS = 10.0, 16.0


class FailingDrafts:
    """A sequence whose model drafts are never right, on a device that never waits."""

    def __init__(self) -> None:
        config = SpeculationConfig(method="draft_model", draft_model="small", tokens_max=5)
        self.speculator = Speculator(config)
        drafting = self.speculator.new_draft_state([], Speculation())
        assert isinstance(drafting, ModelDraftState)
        self.drafting = drafting
        ngram = self.speculator.new_draft_state([1, 2, 3] * 5, Speculation(method="ngram"))
        assert ngram is not None
        self.ngram = ngram
        self.finish(PlannedDrafts([]))
        self.finish(PlannedDrafts([]))
        for _ in range(100):
            self.speculator.record_verification(self.drafting, 3, 1, 1)

    def choose(self, gap: int = 0) -> PlannedDrafts:
        """Return the next plan's drafts."""
        return self.speculator.choose([DecodingRow(self.drafting, 0, 10_000, gap)])

    def finish(self, planned: PlannedDrafts, busy_ms: float = PLAIN_MS) -> None:
        """Plan and execute a step; none of its drafts is right."""
        was_held = self.speculator.record_plan(planned)
        self.speculator.record_step(planned.decode_work(1), busy_ms, 0.0, was_held=was_held)
        for count in planned.counts:
            if count > 0:
                self.speculator.record_verification(self.drafting, count, 1, 1)

    def steps_to_probe(self) -> int:
        """Make plain steps until a probe is due; return their number."""
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


def test_ngram_steps_do_not_delay_next_trial_of_model_drafts() -> None:
    """Steps with n-gram drafts do not change when the model's drafts are tried next."""
    alone, beside = FailingDrafts(), FailingDrafts()
    for speculator in (alone, beside):
        speculator.steps_to_probe()
        speculator.probe()
    for _ in range(3):
        beside.finish(NGRAM, 500.0)
    assert beside.steps_to_probe() == alone.steps_to_probe()


def test_slow_trial_of_drafts_delays_next_trial() -> None:
    """A trial of drafts that took longer than predicted delays the next one, also when a long
    prompt was considered meanwhile."""
    usual, slow, beside = FailingDrafts(), FailingDrafts(), FailingDrafts()
    for speculator in (usual, slow, beside):
        speculator.steps_to_probe()
    usual.probe()
    slow.probe(PROBE_MS + 100.0)
    planned = beside.choose()
    prompt = PromptRow(drafts_max=5, unread_tokens=4_000, tokens_left=1_000, token_ms=3.0)
    beside.speculator.should_read_prompt(prompt, 1)
    beside.finish(planned, PROBE_MS + 100.0)
    steps = slow.steps_to_probe()
    assert steps > 3 * usual.steps_to_probe()
    assert beside.steps_to_probe() == steps


def test_accepted_draft_after_failed_trial_starts_no_immediate_trial() -> None:
    """A draft that is accepted in a later plan does not start another trial of drafts at once."""
    quiet, lucky = FailingDrafts(), FailingDrafts()
    for speculator in (quiet, lucky):
        speculator.steps_to_probe()
        speculator.probe()
        speculator.finish(PlannedDrafts([]))
    lucky.speculator.record_verification(lucky.drafting, 1, 2, 2)
    assert lucky.steps_to_probe() > quiet.steps_to_probe() / 2


def test_plans_with_ngrams_only_do_not_shorten_later_draft_chunks() -> None:
    """Plans that use n-grams read nothing, so later plans may read as much as before."""
    config = SpeculationConfig(method="draft_model", draft_model="small", tokens_max=5)
    speculator = Speculator(config)
    for rows in (4, 8):
        for _ in range(3):
            speculator.record_step(DecodeWork(rows, 1, 0), 10.0, 0.0, was_held=False)
    models = [
        DecodingRow(speculator.new_draft_state([], Speculation()), 0, 1_000, 128) for _ in range(4)
    ]
    asked = Speculation(method="ngram")
    ngrams = [
        DecodingRow(speculator.new_draft_state([1, 2, 3, 4] * 30, asked), 0, 1_000)
        for _ in range(4)
    ]
    first = speculator.choose(models)
    assert first.reads == [128, 0, 0, 0]
    for _ in range(10):
        planned = speculator.choose([*models, *ngrams])
        assert planned.drafts
        speculator.record_plan(planned)
    assert speculator.choose(models).reads == first.reads


def test_ngram_rows_get_drafts_only_when_draft_model_proposes_none() -> None:
    """Without adapting, n-gram rows get drafts only in plans where the model has none."""
    config = SpeculationConfig(
        method="draft_model", draft_model="small", tokens_max=5, adaptive=False
    )
    speculator = Speculator(config)
    model = speculator.new_draft_state([], Speculation())
    ngram = speculator.new_draft_state([1, 2, 3, 4] * 9, Speculation(method="ngram"))
    rows = [DecodingRow(ngram, 0, 100), DecodingRow(model, 0, 100), DecodingRow(None, 0, 100)]
    assert speculator.choose(rows).counts == [-1, 5, -1]
    ends = [rows[0], DecodingRow(model, 0, 1), rows[2]]
    assert speculator.choose(ends).drafts == [[1, 2, 3, 4, 1], [], []]
