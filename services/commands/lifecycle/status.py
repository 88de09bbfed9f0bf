"""Command `lockstep status`. Owns which Lockstep it shows, and the files and lines beside that."""

from pathlib import Path

import click

from services.commands.cache.serving import stored_blocks
from services.commands.cli.click_support import Command, json_option, json_text
from services.commands.cli.flags import SettingSources, file_option, settings_options
from services.commands.cli.running_config import names_one, running_config
from services.supervisor.status.experts_query import ask_experts
from services.supervisor.status.running import find_running
from services.supervisor.status.service_queries import ask_all, ask_status, gateway_formats
from services.supervisor.status.status_table import render, render_all
from shared import limits
from shared.configuration.settings import Config
from shared.errors import UnavailableError
from shared.measurements import expert_file
from shared.measurements.expert_balance import expert_imbalance
from shared.os.standard_streams import print_line


@click.command(cls=Command)
@settings_options
@json_option
@click.option("--all", "is_all", is_flag=True, help="List every Lockstep that runs here.")
@file_option("--expert-stats", "Write how many tokens each routed expert got, for `lockstep plan`.")
def status(
    sources: SettingSources, *, as_json: bool, is_all: bool, expert_stats: str | None
) -> int:
    """Show the state of a running Lockstep.

    Without flags it is the one that you run on this machine, or a list of all if there are several.
    """
    if expert_stats is not None:
        return _write_experts(running_config(sources), Path(expert_stats))
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


def _write_experts(config: Config, file: Path) -> int:
    """Write the table of routed experts, and say how evenly they are used.

    Raises:
        UnavailableError: when the scheduler does not answer, or no tokens were counted yet.
    """
    report = ask_experts(config)
    total = sum(sum(layer.counts) for layer in report.layers)
    if not total:
        raise UnavailableError(
            "No tokens of routed experts were counted: the model has such experts only if it is a "
            "mixture of experts, scheduler.experts_every_steps must not be 0, and the ranks report "
            "some seconds after that many steps."
        )
    expert_file.write(file, report)
    worst = max(report.layers, key=lambda layer: expert_imbalance(layer.counts))
    print_line(
        f"The loads of the experts of {len(report.layers)} layers are in {file}. The busiest "
        f"expert has {expert_imbalance(worst.counts):.2f} times the mean load of its layer, "
        f"{worst.layer}."
    )
    return limits.EXIT_OK
