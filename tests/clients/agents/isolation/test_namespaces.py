"""Commands in namespaces of their own: one port is their whole network."""

import os
import socket
import sys
import threading
from pathlib import Path

import psutil

from tests.clients.agents.isolation.namespaces import CutOffProcess
from tests.support.waiting import wait_until

DEADLINE_S = 30.0
_LOOK_ROUND = """
import socket, subprocess, sys
_, port, other = sys.argv
print([name for _, name in socket.if_nameindex()])
with socket.create_connection(("127.0.0.1", int(port))) as connection:
    print(connection.recv(100).decode())
for address in (("127.0.0.1", int(other)), ("192.0.2.1", 80)):
    try:
        socket.create_connection(address, 5.0)
    except OSError as error:
        print(type(error).__name__)
subprocess.Popen(["sleep", sys.argv[1] + "0"], start_new_session=True)
"""


def test_cut_off_command_reaches_one_port_and_leaves_no_process(tmp_path: Path) -> None:
    """It sees loopback alone; neither another port of this machine nor any other address answers,
    and a process that it leaves in the background ends with it."""
    output = tmp_path / "output"
    with socket.create_server(("127.0.0.1", 0)) as other, output.open("wb") as stream:
        port = other.getsockname()[1]
        words = [sys.executable, "-c", _LOOK_ROUND, "7654", str(port)]
        cut_off = CutOffProcess(words, 7654, tmp_path, dict(os.environ), stream)
        with cut_off.listener as listener:
            listener.settimeout(DEADLINE_S)
            accepting = threading.Thread(target=_greet, args=(listener,))
            accepting.start()
            code = cut_off.process.wait(DEADLINE_S)
            accepting.join()
        cut_off.close()

    said = output.read_text().splitlines()
    assert (code, said) == (0, ["['lo']", "hello", "ConnectionRefusedError", "OSError"])
    wait_until(lambda: not _sleeps("76540"), DEADLINE_S)


def _greet(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.sendall(b"hello")


def _sleeps(seconds: str) -> bool:
    return any(
        one.info["cmdline"] == ["sleep", seconds] for one in psutil.process_iter(["cmdline"])
    )
