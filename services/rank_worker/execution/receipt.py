"""Receipt of a step: the digest that shows whether all ranks did the same."""

import hashlib
import struct
from collections.abc import Sequence

DIGEST_BYTES = 16


class ReceiptChain:
    """Computes the digest in each step's receipt, which covers this step and all steps before.

    Ranks with equal digests had equal plans, rows and tokens in every step, not only in the last.
    """

    def __init__(self) -> None:
        self._last_digest = bytes(DIGEST_BYTES)

    def add_step(
        self,
        plan: bytes,
        rows: Sequence[tuple[int, int, int]],
        tokens: Sequence[int],
        top_logits: Sequence[float] | None,
        masks: bytes = b"",
    ) -> bytes:
        """Add one step and return the digest of all steps so far.

        Args:
            plan: the encoded plan.
            rows: (slot, sequence id, tokens in the row) of every occupied row after the step, in
                slot order.
            tokens: sampled ids, in plan order, then drafts that the ranks proposed.
            top_logits: the highest logit of each sampling row, as float32; None to leave them out.
            masks: digest of the masks of grammars; b"" in a step without any.

        Returns:
            16 bytes, BLAKE2b.
        """
        digest = hashlib.blake2b(self._last_digest, digest_size=DIGEST_BYTES)
        digest.update(struct.pack("<QQQ", len(plan), len(rows), len(tokens)))
        digest.update(plan)
        for row in rows:
            digest.update(struct.pack("<QQQ", *row))
        digest.update(struct.pack(f"<{len(tokens)}i", *tokens))
        if top_logits is not None:
            digest.update(struct.pack(f"<{len(top_logits)}f", *top_logits))
        digest.update(masks)
        self._last_digest = digest.digest()
        return self._last_digest
