"""Command `lockstep status`. Owns which Lockstep it shows, and the line about stored blocks."""

import click

from services.commands.cache.serving import stored_blocks
from services.commands.cli.click_support import Command, json_option, json_text
from services.commands.cli.flags import SettingSources, settings_options
from services.commands.cli.running_config import names_one, running_config
from services.supervisor.status.running import find_running
from services.supervisor.status.service_queries import ask_all, ask_status, gateway_formats
from services.supervisor.status.status_table import render, render_all
from shared import limits
from shared.errors import UnavailableError
from shared.os.standard_streams import print_line


@click.command(cls=Command)
@settings_options
@json_option
@click.option("--all", "is_all", is_flag=True, help="List every Lockstep that runs here.")
def status(sources: SettingSources, *, as_json: bool, is_all: bool) -> int:
    """Show the state of a running Lockstep.

    Without flags it is the one that you run on this machine, or a list of all if there are several.
    """
    found = [] if names_one(sources) and not is_all else find_running()
    if is_all or len(found) > 1:
        if not found:
            raise UnavailableError("You run no Lockstep on this machine: start `lockstep up`.")
        summaries = ask_all(found)
        print_line(json_text(summaries) if as_json else render_all(summaries))
        return limits.EXIT_OK
    config = running_config(sources)
    reported = ask_status(config)
    if as_json:
        print_line(json_text(reported))
    else:
        stored = stored_blocks(config, reported.namespace)
        unused = stored.explain() if stored is not None and stored.others else ""
        print_line(render(reported, formats=gateway_formats(config), stored=unused))
    return limits.EXIT_OK
