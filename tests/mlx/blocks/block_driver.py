"""Plays the scheduler of one rank with blocks: keeps all that is computed, reuses what is there."""

import hashlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
from mlx import nn

from services.rank_worker.execution.executor import LaunchedStep, StepResult
from services.rank_worker.kv_cache.blocks.items import RestoredItem, SpillItem
from shared.messages import (
    AdmittedSequence,
    AdoptedRestore,
    KeptBlock,
    KeptCheckpoint,
    Sampling,
    SpillOrder,
    StepPlan,
)
from tests.mlx.executor_driver import GREEDY, Driver, admit, chunk, executor_of

BLOCK_TOKENS = 8
NAMESPACE = "0f"


def block_hash(tokens: Sequence[int]) -> bytes:
    """Return the hash of the block that ends these tokens."""
    return hashlib.blake2b(np.array(tokens, dtype="<i4").tobytes(), digest_size=32).digest()


def checkpoint_hash(tokens: Sequence[int]) -> bytes:
    """Return the hash of the checkpoint behind these tokens."""
    return hashlib.blake2b(block_hash(tokens) + b"checkpoint", digest_size=32).digest()


def restored(items: Sequence[SpillItem]) -> list[RestoredItem]:
    """Return what comes back from files that hold these bytes."""
    return [
        RestoredItem(
            hash=item.hash,
            kind=item.kind,
            tokens=item.tokens,
            payload=mx.array(np.frombuffer(bytes(item.payload), dtype=np.uint8)),
        )
        for item in items
    ]


class BlockDriver(Driver):
    """Steps that keep a block at each border that a row has passed, and a checkpoint at each border
    that a row ends at."""

    def __init__(
        self,
        model: nn.Module,
        row_count: int = 4,
        row_tokens: int = 96,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        super().__init__(model, row_count, row_tokens)
        self.block_tokens = block_tokens
        self.executor = executor_of(model, take_restored=self._take)
        self.resident: dict[bytes, tuple[int, ...]] = {}
        """Hash -> all tokens up to its end."""
        self.restores: dict[int, list[RestoredItem]] = {}
        self.lengths: dict[int, int] = {}
        self._admitted: dict[int, list[int]] = {}
        self._due: list[tuple[int, int, int]] = []
        """(sequence, start, stop) of blocks to keep with the next plan."""
        self._due_checkpoints: list[tuple[int, int]] = []

    def known(self, sequence_id: int) -> list[int]:
        """Return all tokens of a sequence, generated ones too."""
        return self._admitted[sequence_id] + self.tokens.get(sequence_id, [])

    def plan(self, **fields: Any) -> StepPlan:
        """Return the next plan; it keeps what the plans before it have computed."""
        kept = self._keep()
        fields = {**fields, **{name: kept[name] + fields.get(name, []) for name in kept}}
        for one in fields.get("dropped", []):
            del self.lengths[one]
        for name in fields.get("evict_blocks", []):
            del self.resident[name]
        for one in fields.get("admitted", []):
            self.lengths[one.sequence_id] = one.reused_tokens
            self._admitted[one.sequence_id] = list(one.tokens)
        aside = [
            *(
                self._advance(one.sequence_id, one.length)
                for one in fields.get("prefill_chunks", [])
            ),
            *(self._advance(one, 1) for one in fields.get("decodes", [])),
        ]
        if self.executor.needs_checkpoints:
            fields["checkpoints"] = [one for one in aside if one is not None]
            self._due_checkpoints += [(one, self.lengths[one]) for one in fields["checkpoints"]]
        return super().plan(**fields)

    def keep_tail(self, sequence_id: int) -> bytes:
        """Have the next plan keep what lies behind the last border; return the block's hash."""
        length = self.lengths[sequence_id]
        self._due.append((sequence_id, length - length % self.block_tokens, length))
        return block_hash(self.known(sequence_id)[:length])

    def match(self, tokens: Sequence[int]) -> tuple[int, list[bytes], bytes | None]:
        """Return (reused tokens, blocks, checkpoint) of the longest prefix that is resident."""
        here = {**self.resident, **self.due()}
        names: list[bytes] = []
        best: tuple[int, list[bytes], bytes | None] = (0, [], None)
        limit = len(tokens) - 1
        for stop in range(self.block_tokens, limit + 1, self.block_tokens):
            if block_hash(tokens[:stop]) not in here:
                break
            names.append(block_hash(tokens[:stop]))
            checkpoint = checkpoint_hash(tokens[:stop])
            if not self.executor.needs_checkpoints:
                best = (stop, list(names), None)
            elif checkpoint in here:
                best = (stop, list(names), checkpoint)
        if self.executor.needs_checkpoints:
            return best
        return _match_part(tokens, best[1], here, self.block_tokens)

    def due(self) -> dict[bytes, tuple[int, ...]]:
        """Return what the next plan will keep; rows can be built from it in that very plan."""
        ends = [(block_hash, one, stop) for one, _, stop in self._due]
        ends += [(checkpoint_hash, one, stop) for one, stop in self._due_checkpoints]
        return {
            name(self.known(one)[:stop]): tuple(self.known(one)[:stop]) for name, one, stop in ends
        }

    def admit(
        self,
        sequence_id: int,
        slot: int,
        tokens: list[int],
        sampling: Sampling = GREEDY,
        prompt_tokens: int | None = None,
    ) -> AdmittedSequence:
        """Return an admission that reuses all it can."""
        reused, blocks, checkpoint = self.match(tokens)
        return msgspec.structs.replace(
            admit(sequence_id, slot, tokens, sampling, prompt_tokens),
            reused_tokens=reused,
            reused_blocks=blocks,
            checkpoint=checkpoint,
        )

    def begin(
        self,
        sequence_id: int,
        slot: int,
        tokens: list[int],
        sampling: Sampling = GREEDY,
        **fields: Any,
    ) -> int:
        """Admit and prefill a sequence, border by border; return how many tokens it reused."""
        admitted = self.admit(sequence_id, slot, tokens, sampling)
        fields["admitted"] = [admitted]
        start = admitted.reused_tokens
        while start < len(tokens):
            stop = min(len(tokens), start - start % self.block_tokens + self.block_tokens)
            self.step(prefill_chunks=[chunk(sequence_id, start, stop, len(tokens))], **fields)
            fields, start = {}, stop
        return admitted.reused_tokens

    def spill(self, names: Sequence[bytes], **fields: Any) -> list[SpillItem]:
        """Step once; return the bytes of these."""
        order = SpillOrder(namespace=NAMESPACE, hashes=list(names))
        return self.step(spill=order, **fields).spills

    def adopt(
        self, items: Sequence[RestoredItem], ends: Sequence[tuple[int, ...]], **fields: Any
    ) -> None:
        """Step once; these become resident. `ends` are all tokens up to the end of each."""
        self.restores[7] = list(items)
        self.step(adopted=[AdoptedRestore(restore_id=7, count=len(items))], **fields)
        self.resident.update({item.hash: end for item, end in zip(items, ends, strict=True)})

    def finish(self, launched: LaunchedStep) -> StepResult:
        """Finish a step; a rank's spills stand in the plan's order, with the plan's hashes."""
        result = super().finish(launched)
        order = launched.plan.spill
        assert [item.hash for item in result.spills] == (order.hashes if order else [])
        return result

    def _take(self, adopted: AdoptedRestore) -> list[RestoredItem]:
        return self.restores.pop(adopted.restore_id)[: adopted.count]

    def _advance(self, sequence_id: int, count: int) -> int | None:
        before = self.lengths[sequence_id]
        after = self.lengths[sequence_id] = before + count
        first = before - before % self.block_tokens
        for start in range(first, after - self.block_tokens + 1, self.block_tokens):
            self._due.append((sequence_id, start, start + self.block_tokens))
        return sequence_id if after % self.block_tokens == 0 else None

    def _keep(self) -> dict[str, list[Any]]:
        blocks, checkpoints = [], []
        for one, start, stop in self._due:
            tokens = self.known(one)[:stop]
            name = block_hash(tokens)
            if name not in self.resident:
                self.resident[name] = tuple(tokens)
                blocks.append(
                    KeptBlock(sequence_id=one, start=start, length=stop - start, hash=name)
                )
        for one, position in self._due_checkpoints:
            tokens = self.known(one)[:position]
            name = checkpoint_hash(tokens)
            if name not in self.resident:
                self.resident[name] = tuple(tokens)
                checkpoints.append(KeptCheckpoint(sequence_id=one, position=position, hash=name))
        self._due, self._due_checkpoints = [], []
        return {"keep_blocks": blocks, "keep_checkpoints": checkpoints}


def _match_part(
    tokens: Sequence[int],
    names: list[bytes],
    here: dict[bytes, tuple[int, ...]],
    block_tokens: int,
) -> tuple[int, list[bytes], bytes | None]:
    """Lengthen a match by the part of one more block that agrees."""
    start = block_tokens * len(names)
    best, chosen = start, names
    for name, end in here.items():
        if not start < len(end) <= start + block_tokens or end[:start] != tuple(tokens[:start]):
            continue
        agreed = start
        while agreed < min(len(end), len(tokens) - 1) and end[agreed] == tokens[agreed]:
            agreed += 1
        if agreed > best:
            best, chosen = agreed, [*names, name]
    return best, chosen, None
