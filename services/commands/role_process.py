"""How a role's process is found while it lives, and how it ends before it has begun to serve."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

from shared import limits
from shared.configuration.loading import prepare_run_dir
from shared.configuration.settings import Config
from shared.os.process_file import ProcessFile

_CODES: dict[int, int] = {signal.SIGTERM: limits.EXIT_OK, signal.SIGINT: limits.EXIT_INTERRUPTED}


@contextlib.contextmanager
def found_as(
    config: Config, command: str, rank: int | None, warn: Callable[[str], None]
) -> Iterator[None]:
    """Hold the role's file in the run folder, by which `lockstep restart` finds this process.

    SIGTERM and Ctrl-C end the process, as soon as Python code runs, until the role has handlers of
    its own: nothing was accepted by then, so it ends as after a drain, and its file goes with it.

    Args:
        config: the settings.
        command: which role, as in the command line.
        rank: of a rank worker, -1: any; None: another role.
        warn: is told, in a sentence, that the file cannot be written; the role runs without.
    """
    name = {"cache-store": "store", "rank-worker": "rank"}.get(command, command)
    if rank is not None and rank >= 0:
        name = f"rank-{rank}"
    file: ProcessFile | None = None

    def end(number: int, _frame: object) -> None:
        try:
            if file:
                file.path.unlink(missing_ok=True)
        finally:
            # An exception could come up inside a library that suppresses all of them, as some do
            # while they are imported: the process would go on and serve.
            os._exit(_CODES[number])

    numbers = [signal.SIGTERM]
    # Who was started with it ignored, as by a script with `&`, is not ended by it meanwhile.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        numbers.append(signal.SIGINT)
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        try:
            file = ProcessFile(prepare_run_dir(config), name, by_pid=rank == -1)
        except OSError as error:
            # A full disk is no reason not to serve.
            warn(
                f"Cannot write to {config.run_dir}: {error.strerror}. `lockstep restart` will not "
                "find this process."
            )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        yield
    finally:
        for number, handler in before.items():
            # The role's own stays until the process is gone; ours would take another's file away.
            if signal.getsignal(number) is end:
                signal.signal(number, handler)
        if file:
            file.release()
