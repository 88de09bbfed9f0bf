"""The shell of `lockstep up`: claims the run folder and the port, starts, watches, stops all roles.

It serves nothing and decides nothing about requests. In production launchd or systemd starts the
roles instead; nothing else differs.
"""

import fcntl
import http.client
import os
import signal
import socket
import sys
import sysconfig
import time
from pathlib import Path
from types import FrameType

import services
from services.supervisor import effective_config, progress
from services.supervisor.child import PERMANENT, Child, Role
from services.supervisor.console import Console
from services.supervisor.status import StatusWatch
from shared import lifeline, limits, model_location
from shared.clock import SystemClock
from shared.config import API_KEYS_VARIABLE, prepare_run_dir
from shared.errors import ConfigError
from shared.messages import StatusReported
from shared.settings import Config

TICK_S = 0.1
STATUS_INTERVAL_S = 0.5
END_DEADLINE_S = 5.0
"""A role that was told to end and has nothing to finish gets so long before it is killed."""

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(config: Config) -> int:
    """Serve until Ctrl-C or SIGTERM; return the exit code.

    Raises:
        ConfigError: the model, the run folder or the port cannot be used; nothing was started.
    """
    lifeline.watch()
    model_location.local_folder(config.model.path)
    folder = prepare_run_dir(config)
    lock = _claim(folder)
    try:
        _check_port(config)
        return Supervisor(config, folder, Console(sys.stdout)).run()
    finally:
        os.close(lock)


class Supervisor:
    """The children and what is known of them."""

    def __init__(self, config: Config, folder: Path, console: Console) -> None:
        self._config = config
        self._console = console
        self._clock = SystemClock()
        self._stop_signals = 0
        self._ready_epoch = 0
        config_file = effective_config.write(config, folder)
        environment = _child_environment(dict(os.environ))

        # Clients' keys are the gateway's alone.
        keyless = {name: text for name, text in environment.items() if name != API_KEYS_VARIABLE}

        def child(name: str, *arguments: str) -> Child:
            own = environment if name == "gateway" else keyless
            return Child(Role(name, arguments), config_file, own, console)

        self._scheduler = child("scheduler", "scheduler")
        self._ranks = [
            child(f"rank {rank}", "rank-worker", "--rank", str(rank))
            for rank in range(config.world.size)
        ]
        self._gateway = child("gateway", "gateway")
        keeps_blocks = config.cache.enabled and config.cache.ssd
        self._stores = [child("store", "cache-store")] if keeps_blocks else []
        self._children = [self._scheduler, *self._stores, *self._ranks, self._gateway]

    def run(self) -> int:
        """Start everything, watch until told to stop or until a child cannot go on, stop all."""
        before = {number: signal.signal(number, self._on_signal) for number in _STOP_SIGNALS}
        try:
            code = self._watch()
            return self._stop(code)
        finally:
            for child in self._children:
                child.kill()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _watch(self) -> int:
        size = len(self._ranks)
        self._console.say(
            f"Starting Lockstep: {self._config.served_name}, {size} rank{'s' if size > 1 else ''} "
            f"({self._config.backend}). Ctrl-C stops it."
        )
        watch = StatusWatch(self._config, STATUS_INTERVAL_S)
        try:
            while not self._stop_signals:
                now_s = self._clock.now()
                for child in list(self._children):
                    code = child.reap(now_s)
                    if code in PERMANENT:
                        assert code is not None
                        if child not in self._stores:
                            self._explain(child, code)
                            return code
                        self._give_up(child, code)
                    else:
                        child.start_if_due(now_s)
                status = watch.poll(TICK_S)
                if status is not None:
                    self._show(status)
        finally:
            watch.close()
        return limits.EXIT_OK

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._stop_signals += 1

    def _explain(self, child: Child, code: int) -> None:
        self._console.progress("")
        self._console.line(
            "lockstep",
            f"{child.role.name} cannot run like this (code {code}, its reason stands above): "
            "stopping everything",
        )

    def _give_up(self, child: Child, code: int) -> None:
        """Go on without a role that nobody needs."""
        self._children.remove(child)
        self._console.line(
            "lockstep",
            f"{child.role.name} cannot run like this (code {code}, its reason stands above): "
            "serving goes on without KV blocks on SSD",
        )

    def _show(self, status: StatusReported) -> None:
        if not status.ready:
            if self._ready_epoch != status.epoch:
                line = progress.loading_line(status, with_bar=self._console.is_terminal)
                self._console.progress(line)
            return
        if self._ready_epoch == status.epoch or not _answers(self._config):
            return
        is_first = self._ready_epoch == 0
        self._ready_epoch = status.epoch
        self._console.progress("")
        if is_first:
            self._console.say(f"\n{progress.ready_line(self._config, status)}\n")
            self._console.say(f"{progress.curl_line(self._config)}\n")
        else:
            self._console.line("lockstep", f"ready again (epoch {status.epoch})")

    def _stop(self, code: int) -> int:
        """End the roles from the outside in: who accepts work first, who computes last."""
        self._console.progress("")
        self._console.line("lockstep", "stopping (Ctrl-C again: at once)")
        drain_s = self._config.scheduler.drain_s + END_DEADLINE_S
        for stage, deadline_s in (
            ([self._gateway], drain_s),
            ([self._scheduler], END_DEADLINE_S),
            (self._ranks, END_DEADLINE_S),
            (self._stores, END_DEADLINE_S),
        ):
            self._end(stage, deadline_s)
        self._console.line("lockstep", "stopped")
        return code if self._stop_signals < 2 else 130

    def _end(self, stage: list[Child], deadline_s: float) -> None:
        until_s = self._clock.now() + deadline_s
        for child in stage:
            child.terminate()
        while not all(child.has_ended() for child in stage):
            if self._stop_signals > 1 or self._clock.now() > until_s:
                for child in stage:
                    child.kill()
                return
            time.sleep(0.02)


def _child_environment(own: dict[str, str]) -> dict[str, str]:
    environment = effective_config.without_overrides(own)
    # Log lines must not wait in a buffer: a process that is killed would take them along.
    environment["PYTHONUNBUFFERED"] = "1"
    # Children run the code that runs here, from a checkout too, and never a `services` folder that
    # happens to lie in the working directory (that is what -P in their command is for).
    root = str(Path(services.__file__).resolve().parents[1])
    if root != sysconfig.get_path("purelib"):
        paths = [root, *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def _claim(folder: Path) -> int:
    """Lock the run folder for as long as this process lives; return the lock's descriptor."""
    path = folder / "lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise ConfigError(
            f"Lockstep already runs with the run folder {folder} (process {holder}): stop it, "
            "or choose another --port or paths.run_dir."
        ) from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def _check_port(config: Config) -> None:
    """Find out now whether the gateway will be able to listen."""
    host, port = config.gateway.host, config.gateway.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror:
        raise ConfigError(f"The host name {host} is unknown: set gateway.host (--host).") from None
    for family, kind, protocol, _name, address in found:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                raise ConfigError(
                    f"Cannot listen on {host} port {port}: {error.strerror}. "
                    "Choose another with --port."
                ) from None


def _answers(config: Config) -> bool:
    """Tell whether the gateway says that it is ready, as a client would see it."""
    url = progress.base_url(config).removeprefix("http://")
    connection = http.client.HTTPConnection(url, timeout=1.0)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
