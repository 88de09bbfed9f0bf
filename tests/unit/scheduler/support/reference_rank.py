"""The reference rank: a second, independent implementation of docs/reference/protocol.md.

It keeps the state of a rank, asserts that every plan fits that state, and samples each token by a
hash of all tokens before it, so a lost, repeated or misplaced token shows. The KV of a token is a
hash of all tokens up to it, so a row built from the blocks of another text shows too.
"""

import dataclasses
import hashlib
from collections.abc import Sequence

from shared.messages import (
    AdmittedSequence,
    BlocksRestored,
    RestoreBlocks,
    StepFinished,
    StepPlan,
)
from shared.transport import codec

VOCABULARY = 1_000
BYTES_PER_TOKEN = 10
DRAFT_BYTES_PER_TOKEN = 3


REPEAT_MARKER = 999
"""A prompt that begins with this token and a number n repeats itself with period n, except at a few
positions."""


def next_token(tokens: list[int]) -> int:
    """Return the next token, a function of all tokens before it."""
    if tokens[0] == REPEAT_MARKER and len(tokens) % 23:
        return tokens[-min(tokens[1], len(tokens))]
    digest = hashlib.blake2b(repr(tokens).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % VOCABULARY


def completion(prompt: list[int], count: int, stop_ids: tuple[int, ...] = ()) -> list[int]:
    """Return the completion of an undisturbed run."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


def guessed_token(tokens: list[int], quality: float) -> int:
    """Return a draft model's guess of the next token, right with probability `quality` by the text
    alone."""
    digest = hashlib.blake2b(repr(tokens[-3:]).encode(), digest_size=2).digest()
    is_right = int.from_bytes(digest, "big") < quality * 2**16
    return (next_token(tokens) + (not is_right)) % VOCABULARY


def extend_kv(kv: list[bytes], tokens: Sequence[int]) -> None:
    """Append the KV of `tokens` to `kv`."""
    for token in tokens:
        before = kv[-1] if kv else b""
        kv.append(hashlib.blake2b(before + token.to_bytes(4, "big"), digest_size=8).digest())


@dataclasses.dataclass(frozen=True)
class Block:
    """Tokens [start, start + len(kv)) of a sequence, or with `state` a checkpoint at that
    position."""

    start: int
    kv: tuple[bytes, ...]
    state: bytes = b""

    @property
    def end(self) -> int:
        """Number of tokens up to the block's end."""
        return self.start + len(self.kv)

    @property
    def content(self) -> tuple[int, bytes]:
        """The content that the block's hash must always stand for."""
        return self.end, self.state or self.kv[-1]


@dataclasses.dataclass
class WorldTraits:
    """Properties that all ranks of a world share."""

    budget_bytes: int
    resident_bytes_max: int
    checkpoint_bytes: int = 0
    """Size of a row's state that cannot be cut; 0: rows have none."""
    content_by_hash: dict[bytes, tuple[int, bytes]] = dataclasses.field(default_factory=dict)
    """Content of each hash seen so far."""
    draft_method: str = ""
    """Draft method of the ranks: draft_model, eagle, or "" for none."""
    draft_quality: float = 0.8
    """Share of drafts that are right."""


@dataclasses.dataclass
class _Row:
    slot: int
    known: list[int]
    """Tokens of the sequence, including those sampled here."""
    kv: list[bytes]
    checkpoint_state: tuple[int, bytes] | None = None
    base: int | None = None
    """Tokens before the row's drafts, until the row is cut back."""
    draft_kv: list[bytes] = dataclasses.field(default_factory=list)
    """KV of the draft model's row."""


class ReferenceRank:
    """Executes plans as the protocol says, and asserts that each fits its state."""

    def __init__(
        self, peer: bytes, rank: int, epoch: int, traits: WorldTraits, disk: dict[bytes, Block]
    ) -> None:
        self.peer = peer
        self.rank = rank
        self.epoch = epoch
        self.rows: dict[int, _Row] = {}
        self.blocks: dict[bytes, Block] = {}
        self.disk = disk
        self.spills: list[tuple[bytes, Block]] = []
        """Spills that were ordered and not reported."""
        self.row_count = 0
        self.row_tokens = 0
        self.step_id = 0
        self.digest = b""
        self._traits = traits
        self._staged: dict[int, list[tuple[bytes, Block]]] = {}
        self._answered: dict[int, tuple[RestoreBlocks, int]] = {}

    @property
    def resident_bytes(self) -> int:
        """Bytes of resident blocks and checkpoints."""
        return sum(
            self._traits.checkpoint_bytes if one.state else len(one.kv) * BYTES_PER_TOKEN
            for one in self.blocks.values()
        )

    def execute(self, plan: StepPlan) -> StepFinished:
        """Apply a plan and return its receipt."""
        assert plan.epoch == self.epoch
        assert plan.step_id == self.step_id + 1, "plans have no gaps"
        self.step_id = plan.step_id
        self._roll_back(plan)
        self._keep(plan)
        self._adopt(plan)
        if plan.spill is not None:
            self.spills += [(name, self.blocks[name]) for name in plan.spill.hashes]
        for sequence_id in plan.dropped:
            del self.rows[sequence_id]
        for name in plan.evict_blocks:
            del self.blocks[name]
        self._move(plan)
        self._resize(plan)
        for entry in plan.admitted:
            self._admit(entry)
        sampled = self._prefill(plan)
        self._read(plan)
        tokens = sampled + self._decode(plan)
        for sequence_id in plan.checkpoints:
            row = self.rows[sequence_id]
            row.checkpoint_state = len(row.kv), row.kv[-1]
        text = f"{self.digest!r}{codec.encode(plan)!r}{tokens}".encode()
        self.digest = hashlib.blake2b(text, digest_size=16).digest()
        work_ms = sum(chunk.length for chunk in plan.prefill_chunks) * 0.5 + 5.0
        work_ms += sum(len(chunk.tokens) for chunk in plan.draft_chunks) * 0.05
        work_ms += (1 + max(plan.draft_counts, default=-1)) * 0.3
        return StepFinished(
            epoch=plan.epoch,
            step_id=plan.step_id,
            rank=self.rank,
            digest=self.digest,
            tokens=tokens if self.rank == 0 else [],
            busy_ms=work_ms,
            idle_ms=0.0,
            memory_bytes=1,
        )

    def restore(self, order: RestoreBlocks, damaged: bytes = b"") -> BlocksRestored:
        """Read a prefix from disk as far as it is there, and answer.

        Args:
            order: the blocks and checkpoints to read.
            damaged: hash of a record that fails its checks.
        """
        assert order.epoch == self.epoch
        read: list[tuple[bytes, Block]] = []
        usable = 0
        stopped_by = ""
        for place, item in enumerate(order.items):
            if item.block is None:
                assert item.checkpoint is not None or self._traits.checkpoint_bytes
            elif item.block in self.disk and item.block != damaged:
                read.append((item.block, self.disk[item.block]))
                assert len(self.disk[item.block].kv) == item.length
            else:
                stopped_by = "unreadable" if item.block == damaged else "absent"
                break
            has_state = item.checkpoint in self.disk and item.checkpoint != damaged
            if not self._traits.checkpoint_bytes or has_state:
                usable = place + 1
        if usable < len(order.items) and not stopped_by:
            stopped_by = "unreadable" if damaged else "absent"
        wanted = [item.block for item in order.items[:usable] if item.block is not None]
        staged = [one for one in read if one[0] in wanted]
        state = order.items[usable - 1].checkpoint if usable else None
        if state is not None and self._traits.checkpoint_bytes:
            staged.append((state, self.disk[state]))
        return self.answer(order, usable, stopped_by, staged)

    def answer(
        self,
        order: RestoreBlocks,
        count: int,
        stopped_by: str,
        staged: Sequence[tuple[bytes, Block]] = (),
    ) -> BlocksRestored:
        """Answer a restore, and remember the blocks that can be adopted."""
        assert order.restore_id not in self._answered, "a restore has its own number"
        self._answered[order.restore_id] = order, count
        self._staged[order.restore_id] = list(staged)
        return BlocksRestored(
            epoch=self.epoch,
            rank=self.rank,
            restore_id=order.restore_id,
            count=count,
            stopped_by=stopped_by,  # type: ignore[arg-type]
            bytes_read=sum(len(block.kv) * BYTES_PER_TOKEN for _, block in staged),
            read_ms=1.0,
        )

    @property
    def open_restores(self) -> int:
        """Number of restores that were answered and neither adopted nor forgotten."""
        return len(self._staged)

    # --- blocks -----------------------------------------------------------------------------------

    def _hold(self, name: bytes, block: Block) -> None:
        assert name not in self.blocks, "kept or adopted twice"
        assert self._traits.content_by_hash.setdefault(name, block.content) == block.content
        self.blocks[name] = block

    def _keep(self, plan: StepPlan) -> None:
        for kept in plan.keep_blocks:
            row = self.rows[kept.sequence_id]
            end = kept.start + kept.length
            assert end <= len(row.kv), "kept before it was computed"
            assert row.base is None or end <= row.base + 1, "kept drafts that may be wrong"
            self._hold(kept.hash, Block(kept.start, tuple(row.kv[kept.start : end])))
        for state in plan.keep_checkpoints:
            checkpoint_state = self.rows[state.sequence_id].checkpoint_state
            assert checkpoint_state is not None
            assert checkpoint_state[0] == state.position, "the state of another position was saved"
            self._hold(state.hash, Block(state.position, (), checkpoint_state[1]))

    def _adopt(self, plan: StepPlan) -> None:
        for adopted in plan.adopted:
            order, answered = self._answered[adopted.restore_id]
            staged = self._staged.pop(adopted.restore_id)
            assert adopted.count <= answered
            if self._traits.checkpoint_bytes:
                assert adopted.count in (0, answered), "only the last item's state was read"
            items = order.items[: adopted.count]
            wanted = {item.block for item in items}
            if items and self._traits.checkpoint_bytes:
                wanted.add(items[-1].checkpoint)
            for item in items:
                assert item.block is None or item.block in dict(staged)
            for name, block in staged:
                if name in wanted:
                    self._hold(name, block)

    def _resize(self, plan: StepPlan) -> None:
        traits = self._traits
        self.row_count, self.row_tokens = plan.row_count, plan.row_tokens
        for row in self.rows.values():
            assert row.slot < self.row_count
            assert len(row.kv) <= self.row_tokens
        token_bytes = BYTES_PER_TOKEN + (DRAFT_BYTES_PER_TOKEN if traits.draft_method else 0)
        row_bytes = self.row_tokens * token_bytes + traits.checkpoint_bytes
        assert self.resident_bytes <= traits.resident_bytes_max
        assert self.row_count * row_bytes + self.resident_bytes <= traits.budget_bytes

    def _admit(self, entry: AdmittedSequence) -> None:
        assert entry.slot not in self._slots()
        assert entry.slot < self.row_count
        assert entry.sequence_id not in self.rows
        reused = entry.reused_tokens
        assert reused <= len(entry.tokens) - 1
        kv: list[bytes] = []
        for name in entry.reused_blocks:
            assert len(kv) < reused, "no token of the block is used"
            block = self.blocks[name]
            assert block.start == len(kv)
            kv += block.kv
        assert len(kv) >= reused
        if self._traits.checkpoint_bytes and reused:
            assert entry.checkpoint is not None
            assert len(kv) == reused, "rows begin where there is a state"
            assert self.blocks[entry.checkpoint] == Block(reused, (), kv[-1])
        else:
            assert entry.checkpoint is None
        expected: list[bytes] = []
        extend_kv(expected, entry.tokens[:reused])
        assert kv[:reused] == expected, "the KV belongs to another text"
        self.rows[entry.sequence_id] = _Row(entry.slot, list(entry.tokens), kv[:reused])

    # --- steps ------------------------------------------------------------------------------------

    def _move(self, plan: StepPlan) -> None:
        for move in plan.moves:
            assert move.slot not in self._slots()
            assert move.slot < self.rows[move.sequence_id].slot
            self.rows[move.sequence_id].slot = move.slot

    def _prefill(self, plan: StepPlan) -> list[list[int]]:
        sampled = []
        for chunk in plan.prefill_chunks:
            row = self.rows[chunk.sequence_id]
            assert chunk.start == len(row.kv), "chunks are contiguous"
            extend_kv(row.kv, row.known[chunk.start : chunk.start + chunk.length])
            assert len(row.kv) == chunk.start + chunk.length
            assert len(row.kv) <= self.row_tokens
            assert chunk.samples == (len(row.kv) == len(row.known))
            if chunk.samples:
                row.known.append(next_token(row.known))
                sampled.append([row.known[-1]])
        return sampled

    def _read(self, plan: StepPlan) -> None:
        assert not plan.draft_chunks or self._traits.draft_method == "draft_model", (
            "no draft model reads them"
        )
        for chunk in plan.draft_chunks:
            row = self.rows[chunk.sequence_id]
            assert chunk.start == len(row.draft_kv), "draft chunks are contiguous"
            extend_kv(row.draft_kv, chunk.tokens)
            assert row.base is None, "the row's drafts were not cut back"
            assert row.draft_kv == row.kv[: len(row.draft_kv)], (
                "the draft row belongs to another text"
            )

    def _decode(self, plan: StepPlan) -> list[list[int]]:
        slots = [self.rows[sequence_id].slot for sequence_id in plan.decodes]
        assert slots == sorted(slots), "decodes are in slot order"
        assert not plan.drafts or len(plan.drafts) == len(plan.decodes)
        assert not plan.draft_counts or len(plan.draft_counts) == len(plan.decodes)
        assert not (plan.drafts and plan.draft_counts), "drafts of two kinds in a plan"
        assert not plan.draft_counts or self._traits.draft_method, "the ranks have no draft method"
        counts = plan.draft_counts or [-1] * len(plan.decodes)
        longest = max([0, *map(len, plan.drafts), *counts])
        sampled = []
        for place, sequence_id in enumerate(plan.decodes):
            row = self.rows[sequence_id]
            assert row.base is None, "the row's drafts were not cut back"
            assert len(row.kv) == len(row.known) - 1, "a decode computes the last sampled token"
            assert len(row.kv) + 1 + longest <= self.row_tokens
            drafts = plan.drafts[place] if plan.drafts else self._propose(row, counts[place])
            row.base = len(row.kv) if drafts else None
            extend_kv(row.kv, [row.known[-1], *drafts])
            if counts[place] >= 0 and self._traits.draft_method == "draft_model":
                row.draft_kv = list(row.kv)
            emitted = [next_token(row.known)]
            for draft in drafts:
                if draft != emitted[-1]:
                    break
                emitted.append(next_token([*row.known, *emitted]))
            row.known += emitted
            sampled.append(emitted)
        return sampled

    def _propose(self, row: _Row, count: int) -> list[int]:
        if count >= 0 and self._traits.draft_method == "draft_model":
            assert row.draft_kv == row.kv, "the draft row lacks tokens"
        drafts: list[int] = []
        while len(drafts) < count:
            drafts.append(guessed_token([*row.known, *drafts], self._traits.draft_quality))
        return drafts

    def _roll_back(self, plan: StepPlan) -> None:
        for cut in plan.rolled_back:
            row = self.rows[cut.sequence_id]
            assert row.base is not None, "cut back without drafts"
            assert cut.length == len(row.known) - 1, "cut back to the accepted tokens"
            del row.kv[cut.length :]
            del row.draft_kv[cut.length :]
            row.base = None

    def _slots(self) -> set[int]:
        return {row.slot for row in self.rows.values()}
