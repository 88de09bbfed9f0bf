"""The configuration of one client for one server: shown as a shell script, or run.

Owns the script's form and the private folder of a run; knows no client.
"""

import contextlib
import dataclasses
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from shared.errors import UnavailableError

KEY_VARIABLE = "LOCKSTEP_API_KEY"
"""Environment variable with the API key."""
KEY_REFERENCE = f"${KEY_VARIABLE}"
"""Stands for the API key in a shown configuration, which then holds no secret."""

_END = "END_OF_FILE"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClientSetup:
    """Everything that makes a client use a server."""

    title: str
    """The client's name for people."""
    program: str
    """Its console command."""
    install: str
    """Command that installs it."""
    arguments: Sequence[str] = ()
    """Words after the console command."""
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables; none of them is empty unless it takes back one of the user's."""
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Name in the folder of the configuration -> content; arguments or variables name them."""


def script(setup: ClientSetup, folder: Path, headline: str) -> str:
    """Return a shell script that writes the files, sets the variables and starts the client.

    Args:
        setup: made for this folder, with KEY_REFERENCE as key if the server needs one.
        folder: where the files are.
        headline: comment in the first line.
    """
    lines = [f"# {headline}"]
    if KEY_REFERENCE in setup.variables.values():
        lines.append(f"# {KEY_VARIABLE} must hold the API key.")
    if setup.files:
        lines.append(f"mkdir -p {shlex.quote(str(folder))}")
    for name, content in setup.files.items():
        path = shlex.quote(str(folder / name))
        lines += [f"cat > {path} << '{_END}'", content.rstrip("\n"), _END]
    lines += [f"export {name}={_quoted(value)}" for name, value in setup.variables.items()]
    words = [setup.program, *setup.arguments]
    lines.append(" \\\n  ".join(_grouped([_quoted(word) for word in words])))
    return "\n".join(lines)


def run(make: Callable[[Path], ClientSetup]) -> int:
    """Run a client in the foreground until it ends; return its exit code, 128 + N after signal N.

    Its files are in a private folder, which is deleted then.

    Args:
        make: returns the configuration with its files in a given folder.

    Raises:
        UnavailableError: when the client is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-launch-") as folder:
        setup = make(Path(folder))
        program = shutil.which(setup.program)
        if program is None:
            raise UnavailableError(
                f"{setup.title} is not installed here: there is no `{setup.program}` in PATH. "
                f"`{setup.install}` installs it."
            )
        for name, content in setup.files.items():
            (Path(folder) / name).write_text(content, encoding="utf-8")
        environment = {**os.environ, **setup.variables}
        command = [program, *setup.arguments]
        with (
            _passed_signals() as pass_to,
            subprocess.Popen(command, env=environment) as client,  # noqa: S603 - the user's client
        ):
            pass_to(client)
            code = client.wait()
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _passed_signals() -> Iterator[Callable[["subprocess.Popen[bytes]"], None]]:
    """End with the client, not before it: this process only passes signals on.

    Ctrl-C reaches the client from the terminal already, and many clients go on after it.

    Yields:
        A function that names the client; it gets the signals that came before, too.
    """
    clients: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        if not clients:
            early.append(number)
        for client in clients:
            client.send_signal(number)

    def pass_to(client: "subprocess.Popen[bytes]") -> None:
        clients.append(client)
        for number in early:
            client.send_signal(number)

    def ignore(_number: int, _frame: FrameType | None) -> None:
        """Stay; a handler, unlike SIG_IGN, is not inherited by processes."""

    handlers = {signal.SIGINT: ignore, signal.SIGTERM: forward, signal.SIGHUP: forward}
    earlier = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield pass_to
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _quoted(word: str) -> str:
    return f'"{word}"' if word == KEY_REFERENCE else shlex.quote(word)


def _grouped(words: Sequence[str]) -> list[str]:
    """Join each option of a long command with its value, one pair per line."""
    if sum(map(len, words)) < 80:
        return [" ".join(words)]
    groups: list[str] = []
    for word in words:
        if groups and groups[-1].startswith("-") and " " not in groups[-1]:
            groups[-1] += f" {word}"
        else:
            groups.append(word)
    return groups
