"""Real ranks of one world that execute step plans of a test."""

from collections.abc import Mapping
from typing import Any

from shared.messages import AdmittedSequence, PrefillChunk, Sampling, StepFinished, StepPlan
from tests.multirank.worlds.scripted_scheduler import EPOCH, ScriptedScheduler


class PlannedWorld:
    """A joined world in which all sequences run from the first step to the last."""

    def __init__(
        self,
        link: ScriptedScheduler,
        prompts: Mapping[int, list[int]],
        sampling: Mapping[int, Sampling],
    ) -> None:
        """Use the ranks of `link`; prompts and sampling are by sequence id, from 1."""
        self.link = link
        self._prompts = prompts
        self._sampling = sampling
        self.tokens: dict[int, list[int]] = {one: [] for one in prompts}
        self._step_id = 0

    def prefill(self) -> None:
        """Admit and prefill all sequences."""
        self.step(
            admitted=[
                AdmittedSequence(
                    sequence_id=one,
                    slot=one - 1,
                    tokens=prompt,
                    prompt_tokens=len(prompt),
                    sampling=self._sampling[one],
                )
                for one, prompt in self._prompts.items()
            ],
            prefill_chunks=[
                PrefillChunk(sequence_id=one, start=0, length=len(prompt), samples=True)
                for one, prompt in self._prompts.items()
            ],
        )

    def step(self, **fields: Any) -> list[list[int]]:
        """Let all ranks execute the next plan; check that receipts are equal, return the tokens."""
        self._step_id += 1
        plan = StepPlan(
            epoch=EPOCH,
            step_id=self._step_id,
            deadline_s=20.0,
            row_count=len(self._prompts),
            row_tokens=96,
            **fields,
        )
        self.link.send_all(plan)
        due = len(self.link.peers) * self._step_id
        self.link.poll_until(lambda: len(self.link.messages_of(StepFinished)) == due)
        answers = [
            one for one in self.link.messages_of(StepFinished) if one.step_id == self._step_id
        ]
        assert len({answer.digest for answer in answers}) == 1
        (tokens,) = (answer.tokens for answer in answers if answer.rank == 0)
        ids = [one.sequence_id for one in plan.prefill_chunks] + plan.decodes
        for one, sampled in zip(ids, tokens, strict=True):
            self.tokens[one] += sampled
        return list(tokens)
