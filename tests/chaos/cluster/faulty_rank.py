"""A real rank worker that returns a wrong result on request.

It runs the rank worker's main function. A test requests a wrong result by writing its kind into a
file; the next step that can return it deletes the file:

- digest: one bit of the receipt's digest is flipped;
- token: a sampled token id is changed in the receipt, before its digest is computed;
- row: each sequence's decode uses the last token of the next row, so that this rank's part of
  each matrix product is wrong.

    python -m tests.chaos.cluster.faulty_rank FAULT_FILE --rank R --config FILE
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from shared.log import Log
from tests.chaos.cluster.patched_rank import run_patched_rank

RESULT_FAULTS = ("digest", "token", "row")

_log = Log("faulty_rank")


class FaultSwitch:
    """The file that requests a wrong result; each step reads it."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def take(self, kind: str) -> bool:
        """Return whether a wrong result of this kind is requested, and delete the request."""
        try:
            if self._file.read_text(encoding="ascii") != kind:
                return False
        except FileNotFoundError:
            return False
        self._file.unlink()
        _log.warning("fault_injected", kind=kind)
        return True


def patch_executor(switch: FaultSwitch) -> None:
    """Replace functions of the executor; call it after the rank worker has configured MLX."""
    from services.rank_worker.execution.executor import Executor
    from services.rank_worker.execution.receipt import ReceiptChain
    from services.rank_worker.model.forward import Forward

    finish, chain, all_logits = Executor.finish, ReceiptChain.add_step, Forward.all_logits

    def wrong_logits(self: Any, tokens: Any, caches: Any, rows: Any = None) -> Any:
        is_wrong = tokens.shape[0] > 1 and switch.take("row")
        return all_logits(self, _next_rows(tokens) if is_wrong else tokens, caches, rows)

    def wrong_finish(self: Any, launched: Any) -> Any:
        result = finish(self, launched)
        if result.tokens and switch.take("digest"):
            flipped = bytes([result.digest[0] ^ 1]) + result.digest[1:]
            return dataclasses.replace(result, digest=flipped)
        return result

    def wrong_chain(self: Any, plan: Any, rows: Any, tokens: Any, *more: Any) -> bytes:
        if tokens and switch.take("token"):
            # In place, because the reported tokens are taken from this list later.
            tokens[0] ^= 1
        return chain(self, plan, rows, tokens, *more)

    Forward.all_logits = wrong_logits  # type: ignore[method-assign]
    Executor.finish = wrong_finish  # type: ignore[method-assign]
    ReceiptChain.add_step = wrong_chain  # type: ignore[assignment, method-assign]


def _next_rows(tokens: Any) -> Any:
    """Return the tokens with each row replaced by the next one."""
    import mlx.core as mx

    return mx.concatenate([tokens[1:], tokens[:1]])


def main() -> int:
    """Run a rank worker whose results can be changed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("fault_file", type=Path)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--config", required=True)
    options = parser.parse_args()
    switch = FaultSwitch(options.fault_file)
    return run_patched_rank(lambda: patch_executor(switch), options.config, options.rank)


if __name__ == "__main__":
    sys.exit(main())
