"""Program that runs a command in a network namespace where only loopback exists.

It is started in a new namespace. It listens on a port there, sends the listening socket to the
process that started it, and becomes the command. Needs only the standard library.
"""

import fcntl
import os
import socket
import struct
import sys

SET_FLAGS = 0x8914
"""SIOCSIFFLAGS of netdevice(7)."""
UP = 0x1
"""IFF_UP."""


def main(descriptor: str, port: str, *command: str) -> None:
    """Make loopback work, hand over a listening socket, and become `command`.

    Args:
        descriptor: number of an open Unix socket that receives the listening socket.
        port: where to listen.
        command: program and arguments.
    """
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sh14x", b"lo", UP))
    with socket.create_server(("127.0.0.1", int(port))) as listener:
        with socket.socket(fileno=int(descriptor)) as starter:
            socket.send_fds(starter, [b"listening"], [listener.fileno()])
        os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
