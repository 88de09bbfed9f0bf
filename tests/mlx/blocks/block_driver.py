"""Scheduler stand-in for one rank with blocks: keeps everything it computes and reuses it."""

import hashlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
from mlx import nn

from services.rank_worker.batch.step_outputs import LaunchedStep, StepResult
from services.rank_worker.execution.executor import Executor
from services.rank_worker.kv_cache.blocks.items import CachedItem, SpillItem
from shared.messages import (
    AdmittedSequence,
    AdoptedRestore,
    KeptBlock,
    KeptCheckpoint,
    Sampling,
    SpillOrder,
    StepPlan,
)
from tests.mlx.executor_driver import (
    GREEDY,
    ExecutorDriver,
    admission,
    make_executor,
    prefill_chunk,
)

BLOCK_TOKENS = 8
NAMESPACE = "0f"


def block_hash(tokens: Sequence[int]) -> bytes:
    """Return the hash of the block that ends with the last of `tokens`."""
    return hashlib.blake2b(np.array(tokens, dtype="<i4").tobytes(), digest_size=32).digest()


def checkpoint_hash(tokens: Sequence[int]) -> bytes:
    """Return the hash of the checkpoint after the last of `tokens`."""
    return hashlib.blake2b(block_hash(tokens) + b"checkpoint", digest_size=32).digest()


def as_restored_items(items: Sequence[SpillItem]) -> list[CachedItem]:
    """Return spilled items as a restore returns them from files with the same bytes."""
    return [
        CachedItem(
            hash=item.hash,
            kind=item.kind,
            tokens=item.tokens,
            payload=mx.array(np.frombuffer(bytes(item.payload), dtype=np.uint8)),
        )
        for item in items
    ]


def resident_bytes(executor: Executor) -> int:
    """Return the bytes of all blocks and checkpoints in the executor's memory."""
    return sum(item.payload.nbytes for item in executor.blocks.resident.values())


class BlockDriver(ExecutorDriver):
    """Steps that keep every complete block and a checkpoint wherever a row ends at a block
    boundary.
    """

    def __init__(
        self,
        model: nn.Module,
        row_count: int = 4,
        row_tokens: int = 96,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        super().__init__(model, row_count, row_tokens)
        self.block_tokens = block_tokens
        self.executor = make_executor(model, take_restored=self._take_restored)
        self.resident: dict[bytes, tuple[int, ...]] = {}
        """All tokens up to the end of each resident block or checkpoint, by hash."""
        self.restores: dict[int, list[CachedItem]] = {}
        self.lengths: dict[int, int] = {}
        self._admitted: dict[int, list[int]] = {}
        self._blocks_to_keep: list[tuple[int, int, int]] = []
        """(sequence, start, stop) of blocks that the next plan keeps."""
        self._checkpoints_to_keep: list[tuple[int, int]] = []

    def all_tokens(self, sequence_id: int) -> list[int]:
        """Return all tokens of a sequence, prompt and generated ones."""
        return self._admitted[sequence_id] + self.tokens.get(sequence_id, [])

    def plan(self, **fields: Any) -> StepPlan:
        """Return the next plan; it keeps the blocks and checkpoints that earlier plans computed."""
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
        if self.executor.store.needs_state:
            fields["checkpoints"] = [one for one in aside if one is not None]
            self._checkpoints_to_keep += [(one, self.lengths[one]) for one in fields["checkpoints"]]
        return super().plan(**fields)

    def keep_tail(self, sequence_id: int) -> bytes:
        """Have the next plan keep the incomplete last block of a row; return its hash."""
        length = self.lengths[sequence_id]
        self._blocks_to_keep.append((sequence_id, length - length % self.block_tokens, length))
        return block_hash(self.all_tokens(sequence_id)[:length])

    def longest_match(self, tokens: Sequence[int]) -> tuple[int, list[bytes], bytes | None]:
        """Return (reused tokens, blocks, checkpoint) of the longest resident prefix."""
        here = {**self.resident, **self.pending_keeps()}
        names: list[bytes] = []
        best: tuple[int, list[bytes], bytes | None] = (0, [], None)
        limit = len(tokens) - 1
        for stop in range(self.block_tokens, limit + 1, self.block_tokens):
            if block_hash(tokens[:stop]) not in here:
                break
            names.append(block_hash(tokens[:stop]))
            checkpoint = checkpoint_hash(tokens[:stop])
            if not self.executor.store.needs_state:
                best = (stop, list(names), None)
            elif checkpoint in here:
                best = (stop, list(names), checkpoint)
        if self.executor.store.needs_state:
            return best
        return _extend_match_into_block(tokens, best[1], here, self.block_tokens)

    def pending_keeps(self) -> dict[bytes, tuple[int, ...]]:
        """Return the tokens of all that the next plan will keep, by hash.

        That plan can already build rows from it.
        """
        ends = [(block_hash, one, stop) for one, _, stop in self._blocks_to_keep]
        ends += [(checkpoint_hash, one, stop) for one, stop in self._checkpoints_to_keep]
        return {
            name(self.all_tokens(one)[:stop]): tuple(self.all_tokens(one)[:stop])
            for name, one, stop in ends
        }

    def admit(
        self,
        sequence_id: int,
        slot: int,
        tokens: list[int],
        sampling: Sampling = GREEDY,
        prompt_tokens: int | None = None,
    ) -> AdmittedSequence:
        """Return an admission that reuses the longest resident prefix."""
        reused, blocks, checkpoint = self.longest_match(tokens)
        return msgspec.structs.replace(
            admission(sequence_id, slot, tokens, sampling, prompt_tokens),
            reused_tokens=reused,
            reused_blocks=blocks,
            checkpoint=checkpoint,
        )

    def start_from_blocks(
        self,
        sequence_id: int,
        slot: int,
        tokens: list[int],
        sampling: Sampling = GREEDY,
        **fields: Any,
    ) -> int:
        """Admit a sequence and prefill the rest block by block; return the reused tokens."""
        admitted = self.admit(sequence_id, slot, tokens, sampling)
        fields["admitted"] = [admitted]
        start = admitted.reused_tokens
        while start < len(tokens):
            stop = min(len(tokens), start - start % self.block_tokens + self.block_tokens)
            self.step(
                prefill_chunks=[prefill_chunk(sequence_id, start, stop, len(tokens))], **fields
            )
            fields, start = {}, stop
        return admitted.reused_tokens

    def spill(self, names: Sequence[bytes], **fields: Any) -> list[SpillItem]:
        """Step once with an order to spill these hashes; return the spilled items."""
        order = SpillOrder(namespace=NAMESPACE, hashes=list(names))
        return self.step(spill=order, **fields).spills

    def adopt(
        self, items: Sequence[CachedItem], ends: Sequence[tuple[int, ...]], **fields: Any
    ) -> None:
        """Step once and adopt restored items.

        Args:
            items: become resident.
            ends: for each item, all tokens up to its end.
            fields: further fields of the plan.
        """
        self.restores[7] = list(items)
        self.step(adopted=[AdoptedRestore(restore_id=7, count=len(items))], **fields)
        self.resident.update({item.hash: end for item, end in zip(items, ends, strict=True)})

    def finish(self, launched: LaunchedStep) -> StepResult:
        """Finish a step and check that its spills follow the plan's order."""
        result = super().finish(launched)
        order = launched.plan.spill
        assert [item.hash for item in result.spills] == (order.hashes if order else [])
        return result

    def _take_restored(self, adopted: AdoptedRestore) -> list[CachedItem]:
        return self.restores.pop(adopted.restore_id)[: adopted.count]

    def _advance(self, sequence_id: int, count: int) -> int | None:
        before = self.lengths[sequence_id]
        after = self.lengths[sequence_id] = before + count
        first = before - before % self.block_tokens
        for start in range(first, after - self.block_tokens + 1, self.block_tokens):
            self._blocks_to_keep.append((sequence_id, start, start + self.block_tokens))
        return sequence_id if after % self.block_tokens == 0 else None

    def _keep(self) -> dict[str, list[Any]]:
        blocks, checkpoints = [], []
        for one, start, stop in self._blocks_to_keep:
            tokens = self.all_tokens(one)[:stop]
            name = block_hash(tokens)
            if name not in self.resident:
                self.resident[name] = tuple(tokens)
                blocks.append(
                    KeptBlock(sequence_id=one, start=start, length=stop - start, hash=name)
                )
        for one, position in self._checkpoints_to_keep:
            tokens = self.all_tokens(one)[:position]
            name = checkpoint_hash(tokens)
            if name not in self.resident:
                self.resident[name] = tuple(tokens)
                checkpoints.append(KeptCheckpoint(sequence_id=one, position=position, hash=name))
        self._blocks_to_keep, self._checkpoints_to_keep = [], []
        return {"keep_blocks": blocks, "keep_checkpoints": checkpoints}


def _extend_match_into_block(
    tokens: Sequence[int],
    names: list[bytes],
    here: dict[bytes, tuple[int, ...]],
    block_tokens: int,
) -> tuple[int, list[bytes], bytes | None]:
    """Extend a match by the agreeing start of one more block."""
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
