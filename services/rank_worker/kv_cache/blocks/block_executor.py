"""Executes the orders of step plans about blocks and checkpoints. Does no file I/O."""

import dataclasses
from collections.abc import Callable, Sequence

import mlx.core as mx

from services.rank_worker.device.hardware import device_kind
from services.rank_worker.kv_cache.blocks.host_copier import HostCopier, open_host_copier
from services.rank_worker.kv_cache.blocks.items import CachedItem, ItemKind, SpillItem
from services.rank_worker.kv_cache.rows.checkpoint_state import (
    CheckpointState,
    decode_state,
    encode_state,
)
from services.rank_worker.kv_cache.rows.interface import KVStore
from shared.errors import InvariantBroken
from shared.log import Log
from shared.messages import AdmittedSequence, AdoptedRestore, KeptBlock, StepPlan

_log = Log("rank_worker.blocks")

SlotOf = Callable[[int], int]
"""Sequence id -> slot; raises InvariantBroken for an unknown sequence."""

TakeRestored = Callable[[AdoptedRestore], list[CachedItem]]
"""Removes the restored blocks and checkpoints that a plan adopts from the staging area and returns
them."""


def refuse_restores(adopted: AdoptedRestore) -> list[CachedItem]:
    """Raise InvariantBroken, because a plan adopts a restore on a rank without a cache store.

    A rank without a store passes it to `BlockExecutor` as `take_restored`.

    Args:
        adopted: the restore that the plan adopts.
    """
    raise InvariantBroken(
        f"the plan adopts restore {adopted.restore_id}, but this rank has no cache store"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class PendingSpill:
    """A block or checkpoint that a plan spills, until its bytes are in host memory."""

    resident: CachedItem
    computed: mx.array
    """Computed when the bytes are available: uint8 [bytes] itself, or uint8 [1] with `view`."""
    view: memoryview | None = None
    """The bytes in host memory, format "B"; None: they are in `computed`."""


class BlockExecutor:
    """Keeps, adopts, spills and evicts the blocks and checkpoints in one rank's memory.

    Plans say which; plans that contradict the contents of that memory raise InvariantBroken.
    """

    def __init__(self, store: KVStore, take_restored: TakeRestored) -> None:
        self._store = store
        self._take_restored = take_restored
        self.resident: dict[bytes, CachedItem] = {}
        """The blocks and checkpoints in this rank's memory, by hash."""
        # CUDA memory that the host reads moves to the host, and back by page faults when it is
        # used again: 3 ms per block of 37 MB. So spills are copied first.
        self._copies_spills = device_kind() == "cuda"
        self._host_copier: HostCopier | None = None
        self._snapshots: dict[int, CheckpointState] = {}
        """The latest state that a plan asked to snapshot, by sequence id."""

    def keep(self, plan: StepPlan, slot_of: SlotOf) -> list[mx.array]:
        """Copy the blocks and checkpoints that the plan keeps out of the rows; index them by hash.

        Rows are read as earlier plans left them.

        Args:
            plan: holds `keep_blocks` and `keep_checkpoints`.
            slot_of: returns the slot of a sequence.

        Returns:
            The copies, uint8 [bytes] each, to be computed before anything else of this plan. Until
            then they refer to the rows' arrays, and a write into these would copy the whole array.

        Raises:
            InvariantBroken: when a row, token or snapshot is missing, or a hash is resident.
        """
        payloads = []
        for run in _runs(plan.keep_blocks):
            first = run[0]
            read = self._store.read_blocks(
                slot_of(first.sequence_id), first.start, first.length, len(run)
            )
            for block, payload in zip(run, read, strict=True):
                self._add(CachedItem(block.hash, "block", block.length, payload))
            payloads += read
        for checkpoint in plan.keep_checkpoints:
            state = self._snapshots.pop(checkpoint.sequence_id, None)
            if state is None or state.tokens != checkpoint.position:
                raise InvariantBroken(
                    f"sequence {checkpoint.sequence_id} has no snapshot at {checkpoint.position} "
                    f"tokens (but at {state and state.tokens})"
                )
            payload = encode_state(state)
            self._add(CachedItem(checkpoint.hash, "checkpoint", state.tokens, payload))
            payloads.append(payload)
        return payloads

    def adopt(self, plan: StepPlan) -> None:
        """Take over the restored blocks and checkpoints that the plan adopts; index them by hash.

        Items that are resident already are skipped: another sequence may have computed them.

        Raises:
            InvariantBroken: when a payload does not match its kind or number of tokens.
        """
        for adopted in plan.adopted:
            for item in self._take_restored(adopted):
                self._check(item)
                if item.hash not in self.resident:
                    self._add(item)

    def prepare_spills(self, block_tokens: int, bytes_max: int) -> None:
        """Reserve host memory for spills, so that no step waits for it.

        Args:
            block_tokens: tokens in a full block.
            bytes_max: limit for the bytes being spilled at once.
        """
        block_bytes = self._store.block_bytes(block_tokens)
        if block_bytes:
            self._host_copier = open_host_copier()
        if self._host_copier is not None:
            self._host_copier.reserve(block_bytes, bytes_max)

    def spill(self, plan: StepPlan) -> list[PendingSpill]:
        """Return the payloads that the plan spills; on CUDA, start to copy them to host memory.

        `read_spills` waits for these copies.

        Returns:
            One entry per hash of the plan's spill order; empty without an order.

        Raises:
            InvariantBroken: when an item is not resident.
        """
        if plan.spill is None:
            return []
        spills = [self._spill(block_hash) for block_hash in plan.spill.hashes]
        if self._copies_spills:
            mx.async_eval([spill.computed for spill in spills])
        return spills

    def _spill(self, block_hash: bytes) -> PendingSpill:
        resident = self._get(block_hash)
        if not self._copies_spills:
            return PendingSpill(resident, resident.payload)
        if self._host_copier is not None:
            try:
                view, done = self._host_copier.start(resident.payload)
            except OSError as error:
                _log.warning(
                    "host_copy_failed", wanted_bytes=resident.payload.nbytes, cause=str(error)
                )
            else:
                return PendingSpill(resident, done, view)
        copy = mx.bitwise_or(resident.payload, mx.array(0, dtype=mx.uint8))
        return PendingSpill(resident, copy)

    def forget(self, sequence_id: int) -> None:
        """Drop the state snapshot of a sequence that leaves the batch, if there is one."""
        self._snapshots.pop(sequence_id, None)

    def evict(self, plan: StepPlan) -> None:
        """Remove the blocks and checkpoints that the plan evicts from this rank's memory.

        Raises:
            InvariantBroken: when an item is not resident.
        """
        for block_hash in plan.evict_blocks:
            self._get(block_hash)
            del self.resident[block_hash]

    def begin_row(self, slot: int, admitted: AdmittedSequence) -> None:
        """Fill the row of an admitted sequence from the resident blocks that it reuses, if any.

        Args:
            slot: the sequence's row, which is empty.
            admitted: names the blocks, the number of reused tokens and the checkpoint.

        Raises:
            InvariantBroken: when a block is not resident, the reused tokens do not end in the last
                block, or they include the sequence's last token.
        """
        reused = admitted.reused_tokens
        if not reused and not admitted.reused_blocks and admitted.checkpoint is None:
            return
        blocks = [self._get(block_hash, "block") for block_hash in admitted.reused_blocks]
        held = sum(block.tokens for block in blocks)
        last = blocks[-1].tokens if blocks else 0
        if not held - last < reused <= held or reused >= len(admitted.tokens):
            raise InvariantBroken(
                f"sequence {admitted.sequence_id} reuses {reused} of {len(admitted.tokens)} tokens "
                f"from blocks of {held} in all, {last} in the last"
            )
        state = None
        if admitted.checkpoint is not None:
            state = decode_state(self._get(admitted.checkpoint, "checkpoint").payload)
        payloads = [(block.payload, block.tokens) for block in blocks]
        self._store.fill_row(slot, reused, payloads, state)

    def snapshot_state(self, plan: StepPlan, slot_of: SlotOf) -> list[mx.array]:
        """Copy the windows and recurrent state of rows, as they are after this plan's forwards.

        Args:
            plan: lists the sequences in `checkpoints`.
            slot_of: returns the slot of a sequence.

        Returns:
            The arrays of all copies, which the caller must start to compute.

        Raises:
            InvariantBroken: when a sequence is unknown or its row has no state.
        """
        arrays: list[mx.array] = []
        for sequence_id in plan.checkpoints:
            state = self._store.read_state(slot_of(sequence_id))
            self._snapshots[sequence_id] = state
            arrays += state.arrays()
        return arrays

    def _add(self, item: CachedItem) -> None:
        if item.hash in self.resident:
            raise InvariantBroken(f"{item.hash.hex()} is already resident")
        self.resident[item.hash] = item

    def _get(self, block_hash: bytes, kind: ItemKind | None = None) -> CachedItem:
        """Return a resident item, of this kind unless None; otherwise raise InvariantBroken."""
        item = self.resident.get(block_hash)
        if item is None or kind not in (None, item.kind):
            raise InvariantBroken(
                f"the plan names {block_hash.hex()}, but no such {kind or 'block'} is resident"
            )
        return item

    def _check(self, item: CachedItem) -> None:
        layout = self._store.layout
        payload = item.payload
        is_flat = payload.dtype == mx.uint8 and payload.ndim == 1
        if layout is None or not is_flat or item.tokens < 1:
            raise InvariantBroken(f"restored {item.kind} {item.hash.hex()} is not flat bytes")
        if item.kind == "checkpoint":
            position = decode_state(payload).tokens
            if position != item.tokens or not self._store.needs_state:
                raise InvariantBroken(
                    f"restored checkpoint {item.hash.hex()} is the state at {position} tokens, "
                    f"not at {item.tokens}"
                )
        elif payload.nbytes != layout.block_bytes(item.tokens):
            raise InvariantBroken(
                f"restored block {item.hash.hex()} of {item.tokens} tokens has {payload.nbytes} "
                f"bytes, not {layout.block_bytes(item.tokens)}"
            )


def _runs(blocks: Sequence[KeptBlock]) -> list[list[KeptBlock]]:
    """Group adjacent blocks of one row and equal length, keeping their order."""
    runs: list[list[KeptBlock]] = []
    for block in blocks:
        last = runs[-1][-1] if runs else block
        expected = (last.sequence_id, last.length, last.start + last.length)
        if (block.sequence_id, block.length, block.start) == expected:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs


def read_spills(spills: Sequence[PendingSpill]) -> list[SpillItem]:
    """Wait for the copies and return the spilled bytes. To be called by MLX's thread.

    Returns:
        One item per spill in order; any thread may read its payload.
    """
    mx.eval([spill.computed for spill in spills])
    return [
        SpillItem(
            hash=spill.resident.hash,
            kind=spill.resident.kind,
            tokens=spill.resident.tokens,
            payload=_bytes_of(spill).toreadonly(),
        )
        for spill in spills
    ]


def _bytes_of(spill: PendingSpill) -> memoryview:
    if spill.view is not None:
        return spill.view
    return memoryview(spill.computed)  # type: ignore[arg-type]
