"""A real rank worker that lies when it is told to: only tests can start it.

It runs the rank worker's own main. A lie is a file that the test writes; the next step that can
tell it takes the file away:

- digest: one bit of the receipt's digest is flipped;
- token: a sampled id is another one, in the receipt and in what the digest is made from;
- row: every sequence's decode is computed from its neighbour's last token, so that this rank's
  part of every matrix product is wrong.

    python -m tests.chaos.lying_rank LIE_FILE --rank R --config FILE
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from services.rank_worker import main as rank_worker
from shared.configuration.loading import load_config
from shared.log import Log

KINDS = ("digest", "token", "row")

_log = Log("lying_rank")


class Lie:
    """The file, looked at once or more each step."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def is_due(self, kind: str) -> bool:
        """Tell whether a lie of this kind is to be told now; it is told once."""
        try:
            if self._file.read_text(encoding="ascii") != kind:
                return False
        except FileNotFoundError:
            return False
        self._file.unlink()
        _log.warning("lie_told", kind=kind)
        return True


def wrap(lie: Lie) -> None:
    """Wrap the executor. MLX must not have been imported before the rank worker has chosen how."""
    from services.rank_worker.execution.executor import Executor
    from services.rank_worker.execution.receipt import ReceiptChain
    from services.rank_worker.model.forward import Forward

    finish, chain, all_logits = Executor.finish, ReceiptChain.add_step, Forward.all_logits

    def lying_logits(self: Any, tokens: Any, caches: Any) -> Any:
        is_wrong = tokens.shape[0] > 1 and lie.is_due("row")
        return all_logits(self, _neighbours(tokens) if is_wrong else tokens, caches)

    def lying_finish(self: Any, launched: Any) -> Any:
        result = finish(self, launched)
        if result.tokens and lie.is_due("digest"):
            flipped = bytes([result.digest[0] ^ 1]) + result.digest[1:]
            return dataclasses.replace(result, digest=flipped)
        return result

    def lying_chain(self: Any, plan: Any, rows: Any, tokens: Any, *more: Any) -> bytes:
        if tokens and lie.is_due("token"):
            # In place: what is reported is made from this list after its digest is.
            tokens[0] ^= 1
        return chain(self, plan, rows, tokens, *more)

    Forward.all_logits = lying_logits  # type: ignore[method-assign]
    Executor.finish = lying_finish  # type: ignore[method-assign]
    ReceiptChain.add_step = lying_chain  # type: ignore[assignment, method-assign]


def _neighbours(tokens: Any) -> Any:
    """Give every row what belongs to the next one."""
    import mlx.core as mx

    return mx.concatenate([tokens[1:], tokens[:1]])


def main() -> int:
    """Be a rank worker that tells lies."""
    parser = argparse.ArgumentParser()
    parser.add_argument("lie_file", type=Path)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--config", required=True)
    options = parser.parse_args()
    look = rank_worker._describe_device

    def look_and_wrap() -> Any:
        here = look()
        wrap(Lie(options.lie_file))
        return here

    rank_worker._describe_device = look_and_wrap
    return rank_worker.run(load_config(options.config), options.rank)


if __name__ == "__main__":
    sys.exit(main())
