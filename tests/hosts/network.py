"""Several hosts on one Linux machine: network namespaces on a bridge.

The bridge has its own namespace, so that the machine's namespace is not changed. Each host has a
host name (a UTS namespace), an address for the bus, and an address for collectives.
"""

import ctypes
import http.client
import os
import queue
import secrets
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

from tests.support.captured_process import CapturedProcess

_NEW_NETWORK = 0x4000_0000
"""CLONE_NEWNET of setns(2)."""


def missing_requirement() -> str:
    """Return why network namespaces cannot be used here; "" if they can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root rights"
    if missing := [name for name in ("ip", "unshare") if shutil.which(name) is None]:
        return f"`{missing[0]}` is not installed (Debian: apt install iproute2 util-linux)"
    name = f"lk{secrets.token_hex(4)}"
    tried = subprocess.run(
        ["ip", "netns", "add", name], check=False, capture_output=True, text=True
    )
    if tried.returncode:
        return f"network namespaces are not permitted here: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


class Network:
    """A bridge and the hosts on it."""

    def __init__(self, names: Sequence[str]) -> None:
        """Create bridge and hosts; `close` deletes them."""
        self._prefix = f"lk{os.getpid()}-{secrets.token_hex(3)}"
        self._namespaces: list[str] = []
        self.bus = {name: f"10.77.0.{number}" for number, name in enumerate(names, 1)}
        self.data = {name: f"10.78.0.{number}" for number, name in enumerate(names, 1)}
        try:
            self._build(names)
        except BaseException:
            self.close()
            raise

    def namespace(self, name: str) -> str:
        """Return the system's name of a host's namespace."""
        return f"{self._prefix}-{name}"

    def command(self, host: str, arguments: Sequence[str]) -> list[str]:
        """Return the command that runs `lockstep` with these arguments on a host."""
        with_host_name = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host]
        program = [sys.executable, "-m", "services.commands.main", *arguments]
        return ["ip", "netns", "exec", self.namespace(host), *with_host_name, *program]

    def connect(self, host: str, port: int, timeout_s: float) -> http.client.HTTPConnection:
        """Return a connection to a port of a host's loopback interface."""
        opened: queue.Queue[socket.socket | OSError] = queue.Queue()
        path = f"/var/run/netns/{self.namespace(host)}"

        def connect() -> None:
            # Only this thread changes its namespace; a socket stays in the one that created it.
            descriptor = os.open(path, os.O_RDONLY)
            try:
                if ctypes.CDLL(None, use_errno=True).setns(descriptor, _NEW_NETWORK):
                    raise OSError(ctypes.get_errno(), "setns")
                opened.put(socket.create_connection(("127.0.0.1", port), timeout_s))
            except OSError as error:
                opened.put(error)
            finally:
                os.close(descriptor)

        thread = threading.Thread(target=connect)
        thread.start()
        thread.join()
        found = opened.get()
        if isinstance(found, OSError):
            raise found
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
        connection.sock = found
        return connection

    def close(self) -> None:
        """Delete the namespaces with everything in them."""
        while self._namespaces:
            subprocess.run(["ip", "netns", "delete", self._namespaces.pop()], check=False)

    def _build(self, names: Sequence[str]) -> None:
        switch = self.namespace("switch")
        self._add(switch)
        _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge0", "up")
        for number, name in enumerate(names):
            host, plug = self.namespace(name), f"plug{number}"
            self._add(host)
            pair = ["veth", "peer", "name", plug, "netns", switch]
            _ip("link", "add", "wire0", "netns", host, "type", *pair)
            _ip("-n", switch, "link", "set", plug, "master", "bridge0", "up")
            for address in (self.bus[name], self.data[name]):
                _ip("-n", host, "address", "add", f"{address}/24", "dev", "wire0")
            _ip("-n", host, "link", "set", "wire0", "up")
            _ip("-n", host, "link", "set", "lo", "up")

    def _add(self, name: str) -> None:
        _ip("netns", "add", name)
        self._namespaces.append(name)


class HostProcess(CapturedProcess):
    """A `lockstep` process on a host."""

    def __init__(self, network: Network, host: str, arguments: Sequence[str]) -> None:
        """Start the process."""
        super().__init__(network.command(host, arguments))

    def wait_and_close(self, deadline_s: float = 60.0) -> int:
        """Wait for the end of the process; return its exit code."""
        try:
            return self.wait(deadline_s)
        finally:
            self.close()


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
