"""Command `lockstep launch`. Owns which server and which client a command line means."""

import dataclasses
import os
import urllib.parse
from pathlib import Path

import click

from services.commands.cli.click_support import Command
from services.commands.cli.flags import SettingSources, settings_options
from services.commands.cli.running_config import running_config
from services.commands.launch import served_model, setup
from services.commands.launch.clients import CLIENTS
from services.commands.launch.setup import KEY_REFERENCE, KEY_VARIABLE, ClientSetup
from services.supervisor.status.progress_text import base_url
from shared import limits
from shared.errors import UsageError
from shared.os import user_folders
from shared.os.standard_streams import print_line


@click.command(cls=Command)
@click.argument("client", metavar="CLIENT", type=click.Choice(list(CLIENTS)))
@click.argument("arguments", metavar="[-- ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED)
@click.option("--run", "is_run", is_flag=True, help="Start the client with the configuration.")
@click.option(
    "--name", metavar="NAME", default="", help="Name of the model for requests, or an alias of it."
)
@click.option(
    "--url", metavar="URL", default="", help="The server, if it is not a Lockstep of this machine."
)
@click.option(
    "--api-key",
    metavar="KEY",
    default="",
    help=f"API key of the server (default: {KEY_VARIABLE}).",
)
@settings_options
def launch(
    sources: SettingSources,
    *,
    client: str,
    arguments: tuple[str, ...],
    is_run: bool,
    name: str,
    url: str,
    api_key: str,
) -> int:
    """Print a client's configuration for a running Lockstep, or start it with --run.

    CLIENT is one of claude, codex, opencode, cline, continue, aider and open-webui. The printed
    shell script writes only into Lockstep's own folder; --run leaves no file. Words after `--` are
    passed to the client.
    """
    server = _checked_url(url) if url else base_url(running_config(sources))
    key = api_key or os.environ.get(KEY_VARIABLE, "")
    if not (key.isascii() and key.isprintable()):
        raise UsageError(
            "The API key holds a character that keys do not have: was it copied completely?"
        )
    model = served_model.ask(server, key, name)

    def make(folder: Path) -> ClientSetup:
        made = CLIENTS[client](model, folder)
        return dataclasses.replace(made, arguments=[*made.arguments, *arguments])

    if is_run:
        return setup.run(make)
    if key:
        model = dataclasses.replace(model, key=KEY_REFERENCE)
    folder = user_folders.config_folder("--run") / "clients"
    made = make(folder)
    headline = (
        f"{made.title} with {model.name} at {model.url}, context {model.context_tokens:,} tokens"
    )
    print_line(setup.script(made, folder, headline))
    return limits.EXIT_OK


def _checked_url(url: str) -> str:
    """Return a server's URL without a path. Raises UsageError: it is malformed."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"--url {url} is malformed: write one such as http://studio-1.local:8080.")
    return url.rstrip("/").removesuffix("/v1")
