"""Random plans with block orders, compared with the tokens that each sequence gets alone."""

import random
from typing import Any

import msgspec
import pytest
from mlx import nn

from services.rank_worker.kv_cache.blocks.items import SpillItem
from shared.messages import AdmittedSequence, PrefillChunk
from tests.mlx.blocks.block_driver import BlockDriver, as_restored_items
from tests.mlx.executor_driver import generate_alone, make_prompt, prefill_chunk
from tests.mlx.models import MODEL_FACTORIES, MakeModel
from tests.support.effort import cases

PLANS = cases(30, 100)
ROWS = 4
GENERATED_MAX = 14


class RunningRequest(msgspec.Struct):
    """Request with its prompt, the tokens it wants, its known tokens and its prefill progress."""

    prompt: list[int]
    count: int
    known: list[int] = []
    slot: int = -1
    filled: int = 0


class RandomScheduler:
    """Makes random valid plans and checks the tokens of every sequence that ends."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.random = random.Random(seed)
        self.driver = BlockDriver(model, ROWS, 64, self.random.choice([3, 4, 8]))
        self.prompts = _prompts()
        self.expected = [generate_alone(model, prompt, GENERATED_MAX) for prompt in self.prompts]
        self.running: dict[int, RunningRequest] = {}
        self.preempted: list[RunningRequest] = []
        self.on_disk: dict[bytes, tuple[SpillItem, tuple[int, ...]]] = {}
        self.checked = 0
        self.reused = 0
        self._ids = iter(range(1, 10_000))

    def run_plan(self) -> None:
        """Make, run and check one plan."""
        dropped = self._drop()
        fields: dict[str, Any] = {"dropped": dropped, "moves": self._moves()}
        fields["decodes"] = self._decodes()
        fields["admitted"] = self._admit()
        fields["prefill_chunks"] = self._chunks()
        used = {name for one in fields["admitted"] for name in one.reused_blocks}
        used |= {one.checkpoint for one in fields["admitted"]}
        free = sorted(set(self.driver.resident) - used - set(self.driver.pending_keeps()))
        fields["evict_blocks"] = self.random.sample(
            free, len(free) // 4 if self._chance(0.2) else 0
        )
        if self._chance(0.3):
            self._spill(fields)
        elif self._chance(0.3):
            self._restore(fields)
        else:
            self.driver.step(**fields)
        assert set(self.driver.executor.blocks.resident) == set(self.driver.resident)

    def _chance(self, share: float) -> bool:
        return self.random.random() < share

    def _spill(self, fields: dict[str, Any]) -> None:
        ends = self.driver.resident
        names = self.random.sample(sorted(ends), min(len(ends), 5))
        ends = {name: ends[name] for name in names}
        for item in self.driver.spill(names, **fields):
            self.on_disk[item.hash] = (item, ends[item.hash])

    def _restore(self, fields: dict[str, Any]) -> None:
        here = {*self.driver.resident, *self.driver.pending_keeps()} - set(fields["evict_blocks"])
        chosen = [one for name, one in self.on_disk.items() if name not in here][:6]
        again = {item.hash for item, _ in chosen} & set(fields["evict_blocks"])
        fields["evict_blocks"] = [name for name in fields["evict_blocks"] if name not in again]
        self.driver.adopt(
            as_restored_items([item for item, _ in chosen]), [end for _, end in chosen], **fields
        )

    def _drop(self) -> list[int]:
        dropped = []
        for one, wanted in list(self.running.items()):
            tokens = self.driver.tokens.get(one, [])
            got = wanted.known[len(wanted.prompt) :] + tokens
            if len(got) >= wanted.count:
                assert got == self.expected[self.prompts.index(wanted.prompt)][: len(got)]
                self.checked += 1
            elif self._chance(0.04):
                self.preempted.append(
                    RunningRequest(wanted.prompt, wanted.count, wanted.known + tokens)
                )
            else:
                continue
            dropped.append(one)
            del self.running[one]
        return dropped

    def _moves(self) -> list[tuple[int, int]]:
        slots = {wanted.slot: one for one, wanted in self.running.items()}
        free = [slot for slot in range(ROWS) if slot not in slots]
        if not slots or not free or free[0] > max(slots) or self._chance(0.7):
            return []
        one = slots[max(slots)]
        self.running[one].slot = free[0]
        return [(one, free[0])]

    def _decodes(self) -> list[int]:
        ready = [
            (wanted.slot, one)
            for one, wanted in self.running.items()
            if wanted.filled == len(wanted.known) and self._chance(0.85)
        ]
        return [one for _, one in sorted(ready)]

    def _admit(self) -> list[AdmittedSequence]:
        admitted = []
        taken = {wanted.slot for wanted in self.running.values()}
        for slot in set(range(ROWS)) - taken:
            if self._chance(0.5):
                continue
            prompt = self.random.choice(self.prompts)
            wanted = RunningRequest(prompt, self.random.randint(2, GENERATED_MAX), list(prompt))
            if self.preempted:
                wanted = self.preempted.pop()
            wanted.slot = slot
            one = self.driver.admit(next(self._ids), slot, wanted.known)
            wanted.filled = one.reused_tokens
            self.reused += one.reused_tokens
            self.running[one.sequence_id] = wanted
            admitted.append(one)
        return admitted

    def _chunks(self) -> list[PrefillChunk]:
        chunks = []
        size = self.driver.block_tokens
        for one, wanted in self.running.items():
            known, start = len(wanted.known), wanted.filled
            if start == known or self._chance(0.2):
                continue
            border = start - start % size + size * self.random.randint(1, 3)
            stop = min(known, border if self._chance(0.8) else start + self.random.randint(1, 9))
            chunks.append(prefill_chunk(one, start, stop, known))
            wanted.filled = stop
        return chunks


def _prompts() -> list[list[int]]:
    """Return prompts that share prefixes of many lengths."""
    stem = make_prompt(1, 24)
    return [
        *(stem[:shared] + make_prompt(50 + shared, length) for shared, length in SHARED.items()),
        make_prompt(2, 7),
        make_prompt(3, 1),
    ]


SHARED = {5: 9, 8: 3, 12: 12, 16: 1, 19: 8, 24: 5}


@pytest.mark.deep
@pytest.mark.parametrize(("seed", "family"), list(enumerate(MODEL_FACTORIES)))
def test_random_plans_with_block_operations_change_no_tokens(
    make_model: MakeModel, seed: int, family: str
) -> None:
    """Random plans that keep, reuse, evict, spill, restore, preempt and move change no token."""
    scheduler = RandomScheduler(make_model(family), seed)
    for _ in range(PLANS):
        scheduler.run_plan()

    assert scheduler.checked >= cases(2, 10)
    assert scheduler.reused >= 100
    assert len(scheduler.on_disk) >= 10
