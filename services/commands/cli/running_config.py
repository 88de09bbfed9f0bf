"""The running Lockstep that a command line means. Owns the choice between several of them."""

import os
from collections.abc import Mapping

from services.commands.cli.flags import SettingSources
from services.supervisor.status import running
from services.supervisor.status.running import Running
from shared.configuration.loading import overriding_variables
from shared.configuration.settings import Config
from shared.errors import UsageError

PORT = "gateway.port"
"""Setting that names a running Lockstep."""

_PLACES = {
    PORT,
    "paths.run_dir",
    "scheduler.gateway_address",
    "scheduler.rank_address",
    "cache.store_address",
}
"""Settings that say where a Lockstep runs; in the environment they name one."""


def names_one(sources: SettingSources, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether command line or environment say which Lockstep is meant."""
    is_configured = bool(sources.config or sources.inventory or sources.overrides)
    return is_configured or bool(_PLACES & set(overriding_variables(environment).values()))


def running_config(sources: SettingSources, environment: Mapping[str, str] = os.environ) -> Config:
    """Return the settings of the Lockstep that runs on this machine and is meant.

    Without flags that is the only one that runs. With `--port` alone it is the one with this port,
    wherever its run folder is. If none of them runs, the settings are those of the command line.

    Args:
        sources: the command line.
        environment: this process's variables.

    Raises:
        UsageError: when several are meant; the error lists them.
        ConfigError: when a setting is wrong.
    """
    is_by_port = set(sources.overrides) == {PORT} and not (sources.config or sources.inventory)
    if names_one(sources, environment) and not is_by_port:
        return sources.share().config
    port = sources.overrides.get(PORT)
    found = [one for one in running.find_running() if port in (None, str(one.config.gateway.port))]
    if len(found) > 1:
        raise UsageError(
            f"Several Locksteps run here: {', '.join(map(_described, found))}. Choose one with "
            "--port or --config."
        )
    return found[0].config if found else sources.share().config


def _described(one: Running) -> str:
    return f"--port {one.config.gateway.port} ({one.config.served_name}, {one.folder})"
