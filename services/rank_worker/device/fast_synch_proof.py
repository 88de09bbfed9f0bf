"""When a rank records or revokes the proof that Metal's fast synchronization works. No MLX.

A build is proven when a world has passed its canary and computed a step with the variable set. The
proof is withheld while a canary runs, because a GPU that hangs then ends this process by SIGKILL.
"""

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from services.rank_worker.device.description import Device
from shared.errors import CanaryFailed, ConfigError
from shared.log import Log
from shared.measurements import canary_names
from shared.messages import CanaryFinding, LeaveWorld
from shared.os import fast_synch

_log = Log("rank_worker.fast_synch")


class FastSynchProof:
    """Records, withholds and revokes the proof that Metal's fast synchronization works here.

    The proof is an entry in this user's file of proven builds (`shared.os.fast_synch`). The rank
    reports it when it starts, and the scheduler uses it to decide on fast synchronization. Does
    nothing unless the environment enables fast synchronization.
    """

    def __init__(
        self,
        device: Device,
        *,
        path: Path | None = None,
        system: str = sys.platform,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Change nothing yet.

        Args:
            device: the rank's device.
            path: the file of proofs; None: this user's.
            system: the value of `sys.platform`.
            environment: variables of this process.
        """
        is_enabled = fast_synch.is_enabled(environment)
        self._build = (
            fast_synch.platform_build(device.kind, device.name, system) if is_enabled else ""
        )
        # Without a build nothing is read or recorded, and no home folder is needed.
        self._path = path or (fast_synch.proof_file() if self._build else Path())
        self._is_withheld = False
        """A recorded proof was removed while a canary runs."""
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def withheld(self) -> Iterator[None]:
        """Remove the proof while the block runs part of the canary; for good if the canary fails.

        Otherwise a removed proof is recorded again, also after another exception, which says
        nothing about synchronization.
        """
        with self._lock:
            if fast_synch.proof_state(self._path, self._build) == "proven":
                self._revoke(is_withheld=True)
        try:
            yield
        except CanaryFailed:
            self._revoke(is_withheld=False)
            raise
        finally:
            self._record_again()

    def world_left(self, order: LeaveWorld) -> None:
        """Revoke the proof if the canary failed; otherwise record again a proof that is withheld.

        Only the scheduler compares the ranks' findings, so this order may be the only sign of a
        failed canary. Runs in the thread that then ends this process.

        Args:
            order: the scheduler's order, with the cause of the world's end.
        """
        if order.cause == "canary":
            self._revoke(is_withheld=False)
        else:
            self._record_again()

    def recorder(self, findings: Sequence[CanaryFinding]) -> Callable[[], None] | None:
        """Return a function that records the proof; to be called after this rank's first step.

        Args:
            findings: of the canary, which has passed; both sums and a prompt are needed.

        Returns:
            None if fast synchronization is off, or the canary has not checked sums and a prompt.
        """
        names = [finding.name for finding in findings]
        is_complete = all(
            any(name.startswith(kind) for name in names)
            for kind in (canary_names.SUM_PREFIX, canary_names.PROMPT_PREFIX)
        )
        if not self._build or not is_complete:
            return None
        return functools.partial(_record, self._path, self._build)

    def _record_again(self) -> None:
        with self._lock:
            if self._is_withheld:
                self._is_withheld = False
                _record(self._path, self._build)

    def _revoke(self, *, is_withheld: bool) -> None:
        with self._lock:
            self._is_withheld = is_withheld
            if not self._build:
                return
            try:
                fast_synch.record_proof(self._path, self._build, is_proven=False)
            except ConfigError as error:
                remedy = f"delete {self._path} if the canary fails"
                _log.error("fast_synch_proof_not_revoked", detail=str(error), remedy=remedy)


def _record(path: Path, build: str) -> None:
    try:
        fast_synch.record_proof(path, build)
    except ConfigError as error:
        # Only the next start is affected: it does not enable fast synchronization by itself.
        _log.warning("fast_synch_proof_not_recorded", detail=str(error))
    else:
        _log.info("fast_synch_proven", build=build)
