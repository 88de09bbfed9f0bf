"""Sentences of `lockstep up` about loading and readiness. Pure. Owns wording and bar layout."""

import json

from shared.configuration.settings import Config
from shared.messages import RankStatus, StatusReported

COLUMNS = 80
"""Longest line of bars in characters. A terminal cannot redraw a wrapped line."""

_BAR_MAX = 24
_BAR_MIN = 3


def base_url(config: Config) -> str:
    """Return the gateway's URL without a path, for clients on this machine."""
    host = config.gateway.host
    return f"http://{f'[{host}]' if ':' in host else host}:{config.gateway.port}"


def is_loaded(status: StatusReported) -> bool:
    """Return whether the report has ranks and all of them have loaded their shards."""
    return bool(status.ranks) and all(rank.state == "ready" for rank in status.ranks)


def loading_line(status: StatusReported, *, with_bar: bool) -> str:
    """Return one line about the loading progress of all ranks.

    Args:
        status: the scheduler's report.
        with_bar: True for a terminal that redraws the line: a bar per rank, or one bar if they do
            not fit. False: percentages in steps of ten, so that a log gets few lines.
    """
    if not status.ranks:
        return "Waiting for ranks"
    if not with_bar:
        states = (f"rank {rank.rank} {_state(rank, exact=False)}" for rank in status.ranks)
        return f"Loading: {', '.join(states)}"
    names = [f"rank {rank.rank} " for rank in status.ranks]
    words = [f" {_state(rank, exact=True):>5}" for rank in status.ranks]
    text_width = sum(map(len, [*names, *words])) + 2 * len(names)
    width = min(_BAR_MAX, (COLUMNS - text_width) // len(names) - 2)
    if width < _BAR_MIN:
        return _one_bar(status.ranks)
    bars = [_bar(_share(rank), width) for rank in status.ranks]
    return "  ".join(map("".join, zip(names, bars, words, strict=True)))


def ready_line(config: Config, status: StatusReported) -> str:
    """Return the sentence that Lockstep is ready, with its model, URL, ranks and backend."""
    ranks = f"{status.world_size} rank" + ("s" if status.world_size != 1 else "")
    return (
        f"Lockstep is ready: model {config.served_name} on {base_url(config)} "
        f"({ranks}, {status.backend})"
    )


def curl_line(config: Config, *, needs_key: bool) -> str:
    """Return a curl command, in several lines, with which the user can ask the model a question.

    Args:
        config: the settings.
        needs_key: requests need an API key, for which the command has a variable of the shell.
    """
    body = {
        "model": config.served_name,
        "messages": [{"role": "user", "content": "What is Lockstep?"}],
        "stream": True,
    }
    data = json.dumps(body).replace("'", "'\\''")
    authorization = '  -H "Authorization: Bearer $LOCKSTEP_API_KEY" \\\n' if needs_key else ""
    return (
        f"curl -N {base_url(config)}/v1/chat/completions \\\n"
        f"  -H 'Content-Type: application/json' \\\n"
        f"{authorization}"
        f"  -d '{data}'"
    )


def _one_bar(ranks: list[RankStatus]) -> str:
    """Return one bar with the mean of all ranks, and the slowest rank."""
    mean = sum(map(_share, ranks)) / len(ranks)
    slowest = min(ranks, key=_share)
    ready = sum(rank.state == "ready" for rank in ranks)
    return (
        f"{_bar(mean, _BAR_MAX)} {mean:4.0%}  {ready} of {len(ranks)} ranks ready, "
        f"rank {slowest.rank} {_state(slowest, exact=True)}"
    )


def _bar(share: float, width: int) -> str:
    filled = int(share * width)
    return f"[{'#' * filled}{'.' * (width - filled)}]"


def _share(rank: RankStatus) -> float:
    return 1.0 if rank.state == "ready" else rank.loaded


def _state(rank: RankStatus, *, exact: bool) -> str:
    if rank.state != "loading":
        return rank.state
    percent = int(rank.loaded * 100)
    return f"{percent if exact else percent // 10 * 10} %"
