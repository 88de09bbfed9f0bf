"""Trials of grammars in processes of their own. Owns these processes and the limits of a trial.

Fifty characters of a client can make llguidance compile for minutes, take gigabytes or end the
process, and nothing in the library counts all of that. No thread can be stopped, but a process can.
"""

import contextlib
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Pipe

import orjson
import psutil

from services.gateway.http.errors import ApiError, unavailable
from shared.clock import Clock, SystemClock

CPU_S_MAX = 2.0
"""Computing time of a trial; ranks, whose threads cannot be stopped, take as long. Measured: 0.1 s
for 50 tools of 20 fields, 0.8 s for a schema of 3,000 optional fields."""
BYTES_MAX = 48 * 1024 * 1024
BYTES_PER_CHAR_MAX = 128
"""Memory of a trial, which grows with the text of the grammar. Ranks keep about as much for each
grammar. Measured: 27 MB for 50 tools of 20 fields, 36 MB for 3,000 optional fields, 26 MB for
multiples of 86,400; a first grammar has 8 MB for the tokenizer in it."""
_ADDRESS_BYTES_MAX = 1024 * 1024 * 1024
"""Address space beside that of the start, as the last bound where the watch comes too late. The
stack of a deep grammar and the heap of its thread are 384 MB."""
_WATCH_S = 0.02
"""Time between two looks at the memory of a trial; in 20 ms it can grow by about 50 MB."""
_WAIT_S_MAX = 8.0
"""Time for a trial on a busy machine; less than the time for all checks of a request."""
_START_S_MAX = 8.0
_IDLE_S_MAX = 600.0
"""Time after which a process ends that has nothing to do."""
_KEPT_BYTES_MAX = 32 * 1024 * 1024
"""Memory by which a process that is kept may have grown."""
_RETRY_S = 5.0
_NO_START = "no process could start for it"

FAILED = (
    f"compiling it takes more than {CPU_S_MAX:.0f} s or too much memory: make it smaller, use "
    "smaller numbers (multipleOf), and let fewer patterns match the same text"
)
"""The reason for refusing a grammar whose trial was stopped."""


class Trials:
    """Processes that compile grammars: one for each thread that tries one at the same time.

    Thread-safe. A process starts when it is first needed, is kept for the next grammar, and ends
    when it has had none for some time, with this object, and with the process that has started it.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        """Start no process yet.

        Args:
            clock: ends the wait for a trial; None: the machine's.
        """
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._idle: list[_TrialProcess] = []
        self._all: set[_TrialProcess] = set()
        self._is_closed = False
        # Ends the processes of an object that is dropped without `close`.
        weakref.finalize(self, _end_all, self._all)

    def find_problem(self, text: str, special_ids: Sequence[int]) -> str:
        """Return why a grammar cannot be compiled; "" if it can.

        Takes 0.3 ms more than the library, and about 0.3 s when a process has to start.

        Args:
            text: the grammar.
            special_ids: ids of the model's special tokens.

        Raises:
            ApiError: 503 when the machine is too busy for a trial, or no process can start.
        """
        question = (orjson.dumps(special_ids), text.encode(errors="surrogatepass"))
        memory_bytes_max = BYTES_MAX + BYTES_PER_CHAR_MAX * len(text)
        while True:
            process = self._take()
            try:
                problem = process.ask(question, memory_bytes_max, self._clock)
            except _IdleEnd:
                continue
            finally:
                self._put_back(process)
            if self._is_closed:
                raise _unavailable("it is shutting down")
            return problem

    def close(self) -> None:
        """End all processes. Trials that run, or begin later, are a 503."""
        with self._lock:
            self._is_closed = True
            for process in self._all:
                # A thread that waits for one notices.
                process.kill()
            _end_all(self._idle)

    def _take(self) -> "_TrialProcess":
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_alive():
                    return process
                process.end()
                self._all.discard(process)
        process = _TrialProcess()
        with self._lock:
            self._all.add(process)
            if self._is_closed:
                process.kill()
        return process

    def _put_back(self, process: "_TrialProcess") -> None:
        if process.is_reusable():
            with self._lock:
                self._idle.append(process)
        else:
            process.end()
            with self._lock:
                self._all.discard(process)


class _IdleEnd(Exception):  # no error: another process does the work
    """The process has ended because it had nothing to do for a long time."""


class _TrialProcess:
    """One process that compiles a grammar at a time."""

    def __init__(self) -> None:
        """Start it and wait until it is ready.

        Raises:
            ApiError: 503 when it cannot start.
        """
        self._is_waiting = True
        """No grammar is in the process, so it can take the next one."""
        self._connection, other_end = Pipe()
        module = "services.gateway.structured.trial_process"
        numbers = (other_end.fileno(), CPU_S_MAX, _IDLE_S_MAX)
        command = [sys.executable, "-m", module, *map(str, numbers)]
        path = os.pathsep.join(filter(None, sys.path))
        try:
            with other_end:
                self._process = subprocess.Popen(  # noqa: S603 - a module of this program
                    command,
                    env={**os.environ, "PYTHONPATH": path},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[other_end.fileno()],
                )
        except OSError:
            self._connection.close()
            raise _unavailable(_NO_START) from None
        try:
            self._usage = psutil.Process(self._process.pid)
            if not self._connection.poll(_START_S_MAX):
                raise TimeoutError
            self._connection.recv_bytes()
            usage = self._usage.memory_info()
            self._start_bytes = usage.rss
            if sys.platform == "linux":
                address_bytes_max = usage.vms + _ADDRESS_BYTES_MAX
                self._usage.rlimit(psutil.RLIMIT_AS, (address_bytes_max, address_bytes_max))
        except (OSError, EOFError, psutil.Error):
            self.end()
            raise _unavailable(_NO_START) from None

    def ask(self, question: Iterable[bytes], memory_bytes_max: int, clock: Clock) -> str:
        """Compile a grammar in the process; return why it cannot be compiled, or "".

        Args:
            question: what the process expects, in parts.
            memory_bytes_max: memory by which the process may grow.
            clock: ends the wait.

        Raises:
            ApiError: 503 when the machine is too busy.
            _IdleEnd: the process had ended before.
        """
        end_s = clock.now() + _WAIT_S_MAX
        self._is_waiting = False
        try:
            for part in question:
                self._connection.send_bytes(part)
            while not self._connection.poll(_WATCH_S):
                if self._grown_bytes() > memory_bytes_max:
                    return FAILED
                if clock.now() > end_s:
                    raise _unavailable("it is too busy")
            problem = self._connection.recv_bytes().decode()
        except (OSError, EOFError, psutil.Error):
            if self._process.wait() == 0:
                raise _IdleEnd from None
            # Its computing time is over, or the library has failed in a way that ends processes.
            return FAILED
        self._is_waiting = True
        return problem

    def is_alive(self) -> bool:
        """Tell whether the process has not ended."""
        return self._process.poll() is None

    def is_reusable(self) -> bool:
        """Tell whether the process waits for a grammar and has given back the memory it took."""
        try:
            return self._is_waiting and self._grown_bytes() <= _KEPT_BYTES_MAX
        except psutil.Error:
            return False

    def kill(self) -> None:
        """End the process at once, also while a thread waits in `ask`."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def end(self) -> None:
        """End the process and close its connection, which no thread uses."""
        self.kill()
        self._process.wait()
        self._connection.close()

    def _grown_bytes(self) -> int:
        grown: int = self._usage.memory_info().rss - self._start_bytes
        return grown


def _end_all(processes: Iterable[_TrialProcess]) -> None:
    for process in processes:
        process.end()


def _unavailable(cause: str) -> ApiError:
    return unavailable(
        f"This server cannot check the grammar of the request now: {cause}. Try again later.",
        _RETRY_S,
    )
