"""Carries out what step plans say about blocks and checkpoints."""

import dataclasses
from collections.abc import Callable, Sequence

import mlx.core as mx

from services.rank_worker.device.hardware import device_kind
from services.rank_worker.kv_cache.blocks.host_copies import HostCopies, open_copies
from services.rank_worker.kv_cache.blocks.resident import Resident, ResidentBlocks
from services.rank_worker.kv_cache.blocks.transfer import RestoredItem, SpillItem
from services.rank_worker.kv_cache.rows import KVStore
from services.rank_worker.kv_cache.rows.checkpoint_state import (
    CheckpointState,
    decode_state,
    encode_state,
)
from shared.errors import InvariantBroken
from shared.log import Log
from shared.messages import AdmittedSequence, AdoptedRestore, KeptBlock, StepPlan

_log = Log("rank_worker.blocks")

SlotOf = Callable[[int], int]
"""Sequence id -> slot; raises InvariantBroken for a sequence that is not here."""

TakeRestored = Callable[[AdoptedRestore], list[RestoredItem]]
"""Hands over what a plan adopts of a restore, and forgets the restore."""


def nothing_restored(adopted: AdoptedRestore) -> list[RestoredItem]:
    """Refuse: this rank has no store to restore from."""
    raise InvariantBroken(f"the plan adopts restore {adopted.restore_id}; nothing was restored")


@dataclasses.dataclass(frozen=True, slots=True)
class Spill:
    """A block or checkpoint that a plan wants written to a file."""

    name: bytes
    resident: Resident
    computed: mx.array
    """When this is, the bytes are there: in itself, or in `view`."""
    is_copy: bool
    """It was made for this, and is not the resident one itself."""
    view: memoryview | None = None
    """Format "B", in memory of the host."""


class BlockExecutor:
    """The resident tier of one rank: an order that contradicts it ends the world."""

    def __init__(self, store: KVStore, take_restored: TakeRestored) -> None:
        self._store = store
        self._take_restored = take_restored
        self._resident = ResidentBlocks()
        # What the host reads of CUDA's memory moves to the host, and back by page faults when it is
        # reused: 3 ms per block of 37 MB.
        self._spills_copies = device_kind() == "cuda"
        self._host_copies: HostCopies | None = None
        self._set_aside: dict[int, CheckpointState] = {}
        """By sequence id: the latest state that a plan named."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all resident blocks and checkpoints."""
        return self._resident.total_bytes

    def keep(self, plan: StepPlan, slot_of: SlotOf) -> list[mx.array]:
        """Copy blocks out of rows, and states that were set aside, as earlier plans left them.

        Returns:
            The copies, to be computed before anything that this plan computes: what is read and
            not computed yet holds the rows' arrays, and a write into an array that somebody holds
            copies all of it.

        Raises:
            InvariantBroken: no such row, tokens or state; or the hash is resident already.
        """
        payloads = []
        for run in _runs(plan.keep_blocks):
            first = run[0]
            read = self._store.read_blocks(
                slot_of(first.sequence_id), first.start, first.length, len(run)
            )
            for block, payload in zip(run, read, strict=True):
                self._resident.add(block.hash, Resident("block", block.length, payload))
            payloads += read
        for checkpoint in plan.keep_checkpoints:
            state = self._set_aside.pop(checkpoint.sequence_id, None)
            if state is None or state.tokens != checkpoint.position:
                raise InvariantBroken(
                    f"sequence {checkpoint.sequence_id} has set aside no state at "
                    f"{checkpoint.position} tokens (but at {state and state.tokens})"
                )
            payload = encode_state(state)
            self._resident.add(checkpoint.hash, Resident("checkpoint", state.tokens, payload))
            payloads.append(payload)
        return payloads

    def adopt(self, plan: StepPlan) -> None:
        """Make what was restored resident.

        One that is resident already stays as it is: another sequence may have computed it in the
        meantime.

        Raises:
            InvariantBroken: a payload is not what its identity says.
        """
        for adopted in plan.adopted:
            for item in self._take_restored(adopted):
                self._check(item)
                if item.hash not in self._resident:
                    self._resident.add(item.hash, Resident(item.kind, item.tokens, item.payload))

    def prepare_spills(self, block_bytes: int, bytes_max: int) -> None:
        """Take what spills need on this device, so that no step waits for it.

        Args:
            block_bytes: of a whole block; 0: blocks cannot be kept.
            bytes_max: the most that is on its way to files at once.
        """
        if block_bytes:
            self._host_copies = open_copies()
        if self._host_copies is not None:
            self._host_copies.reserve(block_bytes, bytes_max)

    def spill(self, plan: StepPlan) -> list[Spill]:
        """Return what the plan wants written to files, started where it is copied for that.

        Raises:
            InvariantBroken: one of them is not resident.
        """
        if plan.spill is None:
            return []
        spills = [self._spill(name) for name in plan.spill.hashes]
        copied = [spill.computed for spill in spills if spill.is_copy]
        if copied:
            mx.async_eval(copied)
        return spills

    def _spill(self, name: bytes) -> Spill:
        resident = self._resident.get(name)
        if not self._spills_copies:
            return Spill(name, resident, resident.payload, is_copy=False)
        if self._host_copies is not None:
            try:
                view, done = self._host_copies.start(resident.payload)
            except OSError as error:
                _log.warning("spill_not_copied", cause=str(error))
            else:
                return Spill(name, resident, done, is_copy=True, view=view)
        copy = mx.bitwise_or(resident.payload, mx.array(0, dtype=mx.uint8))
        return Spill(name, resident, copy, is_copy=True)

    def forget(self, sequence_id: int) -> None:
        """Forget what a sequence that leaves has set aside."""
        self._set_aside.pop(sequence_id, None)

    def evict(self, plan: StepPlan) -> None:
        """Forget blocks and checkpoints.

        Raises:
            InvariantBroken: one of them is not resident.
        """
        for name in plan.evict_blocks:
            self._resident.evict(name)

    def begin_row(self, slot: int, admitted: AdmittedSequence) -> None:
        """Fill the row of an admitted sequence from blocks, as far as it reuses any.

        Raises:
            InvariantBroken: they are not resident, or do not make such a row.
        """
        reused = admitted.reused_tokens
        if not reused and not admitted.reused_blocks and admitted.checkpoint is None:
            return
        blocks = [self._resident.get(name, "block") for name in admitted.reused_blocks]
        held = sum(block.tokens for block in blocks)
        last = blocks[-1].tokens if blocks else 0
        if not held - last < reused <= held or reused >= len(admitted.tokens):
            raise InvariantBroken(
                f"sequence {admitted.sequence_id} reuses {reused} of {len(admitted.tokens)} tokens "
                f"from blocks of {held} in all, {last} in the last"
            )
        state = None
        if admitted.checkpoint is not None:
            state = decode_state(self._resident.get(admitted.checkpoint, "checkpoint").payload)
        payloads = [(block.payload, block.tokens) for block in blocks]
        self._store.fill(slot, reused, payloads, state)

    def snapshot_state(self, plan: StepPlan, slot_of: SlotOf) -> list[mx.array]:
        """Set states aside as this plan's forwards leave them; return the arrays to start.

        Raises:
            InvariantBroken: no such sequence, or its row has no state.
        """
        arrays: list[mx.array] = []
        for sequence_id in plan.checkpoints:
            state = self._store.read_state(slot_of(sequence_id))
            self._set_aside[sequence_id] = state
            arrays += state.arrays()
        return arrays

    def _check(self, item: RestoredItem) -> None:
        layout = self._store.layout
        payload = item.payload
        is_flat = payload.dtype == mx.uint8 and payload.ndim == 1
        if layout is None or not is_flat or item.tokens < 1:
            raise InvariantBroken(f"restored {item.kind} {item.hash.hex()} is not flat bytes")
        if item.kind == "checkpoint":
            position = decode_state(payload).tokens
            if position != item.tokens or not self._store.needs_state:
                raise InvariantBroken(
                    f"restored checkpoint {item.hash.hex()} stands at {position} tokens, "
                    f"not at {item.tokens}"
                )
        elif payload.nbytes != layout.block_bytes(item.tokens):
            raise InvariantBroken(
                f"restored block {item.hash.hex()} of {item.tokens} tokens has {payload.nbytes} "
                f"bytes, not {layout.block_bytes(item.tokens)}"
            )


def _runs(blocks: Sequence[KeptBlock]) -> list[list[KeptBlock]]:
    """Put neighbouring blocks of one row and one length together, in their order."""
    runs: list[list[KeptBlock]] = []
    for block in blocks:
        last = runs[-1][-1] if runs else None
        if (
            last is not None
            and (last.sequence_id, last.length) == (block.sequence_id, block.length)
            and last.start + last.length == block.start
        ):
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs


def spill_items(spills: Sequence[Spill]) -> list[SpillItem]:
    """Return what is spilled as bytes that any thread may read. Called by MLX's thread."""
    mx.eval([spill.computed for spill in spills])
    return [
        SpillItem(
            hash=spill.name,
            kind=spill.resident.kind,
            tokens=spill.resident.tokens,
            payload=_bytes_of(spill).toreadonly(),
        )
        for spill in spills
    ]


def _bytes_of(spill: Spill) -> memoryview:
    if spill.view is not None:
        return spill.view
    return memoryview(spill.computed)  # type: ignore[arg-type]
