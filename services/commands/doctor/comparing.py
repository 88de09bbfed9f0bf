"""Comparison of hosts: versions, settings, models, keys, and both ends of cables. Pure."""

import itertools
from collections.abc import Iterable, Mapping, Sequence

from services.commands.doctor.checks.environment import changes_results, must_be_equal
from services.commands.doctor.facts import Facts, Findings

SKEW_S = 2.0
"""Largest difference of two hosts' clocks in seconds that is no finding."""
_FATAL = ("lockstep", "mlx", "mlx-lm")
"""Packages whose versions must be equal: ranks are refused, or compute other results."""


def compare(
    all_facts: Sequence[Facts],
    rdma: Mapping[str, Mapping[str, Sequence[str]]],
    scheduler: str,
    flags: Mapping[str, str] | None = None,
) -> Findings:
    """Compare versions, systems, environment variables, models, keys and cables of several hosts.

    A difference that refuses ranks, changes their results or breaks a link that they need is a
    FAIL; other differences are a WARN.

    Args:
        all_facts: one per host that has answered; fewer than two give no finding.
        rdma: host -> peer -> the RDMA devices that lead there, as the inventory says.
        scheduler: name of the scheduler's host, which must allow the keys of the others.
        flags: host -> flags with which commands there find their settings, for remedies.

    Returns:
        Findings about several hosts, whose host is "".
    """
    found = Findings("")
    if len(all_facts) < 2:
        return found
    _versions(found, all_facts)
    _system(found, all_facts)
    _environment(found, all_facts)
    _models(found, all_facts)
    _keys(found, all_facts, scheduler, flags or {})
    _cables(found, all_facts, rdma)
    return found


def check_clock(found: Findings, host: str, said_s: float, before_s: float, after_s: float) -> None:
    """Compare a host's clock with this host's; more than 2 s apart is a WARN, else no finding.

    Deadlines do not depend on it, but times in the hosts' logs do.

    Args:
        found: collects the finding.
        host: name of the other host.
        said_s: its clock when it answered, in seconds since 1970.
        before_s: this host's clock before it asked.
        after_s: this host's clock after the answer.
    """
    off = said_s - after_s if said_s > after_s else min(0.0, said_s - before_s)
    if abs(off) > SKEW_S:
        word = "ahead of" if off > 0 else "behind"
        found.warn(
            "clock",
            f"the clock of {host} is at least {abs(off):.0f} s {word} ours",
            f"on {host}: `sudo sntp -sS time.apple.com` (macOS) or `sudo timedatectl set-ntp true` "
            "(Linux)",
        )


def _groups(values: Mapping[str, str]) -> str:
    """Return which hosts have which value."""
    by_value: dict[str, list[str]] = {}
    for host, value in values.items():
        by_value.setdefault(value, []).append(host)
    return ", ".join(f"{value or 'none'} on {' and '.join(h)}" for value, h in by_value.items())


def _differences(names: Iterable[str], values: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return name -> which hosts have which value, from host -> name -> value."""
    found = {}
    for name in names:
        by_host = {host: known.get(name, "") for host, known in values.items()}
        if len(set(by_host.values())) > 1:
            found[name] = _groups(by_host)
    return found


def _versions(found: Findings, all_facts: Sequence[Facts]) -> None:
    names = dict.fromkeys(name for facts in all_facts for name in facts.versions)
    differing = _differences(names, {facts.host: facts.versions for facts in all_facts})
    remedy = "install the same everywhere: `make install` in equal checkouts, with one Python"
    for name, values in differing.items():
        complain = found.fail if name in _FATAL else found.warn
        complain(f"version of {name}", values, remedy)
    if not differing:
        found.ok("versions", f"{', '.join(names)} are the same on all hosts")


def _system(found: Findings, all_facts: Sequence[Facts]) -> None:
    systems = {facts.host: f"{facts.platform} {facts.system}".strip() for facts in all_facts}
    if len(set(systems.values())) == 1:
        found.ok("systems", f"{next(iter(systems.values()))} on all hosts")
    else:
        remedy = "bring all hosts to the same version of the operating system"
        found.warn("systems", _groups(systems), remedy)
    chips = {facts.host: facts.chip for facts in all_facts if facts.chip}
    if len(set(chips.values())) > 1:
        remedy = 'steps take as long as the slowest; world.synchronization must be "broadcast"'
        found.warn("chips", _groups(chips), remedy)


def _environment(found: Findings, all_facts: Sequence[Facts]) -> None:
    names = sorted({name for facts in all_facts for name in facts.environment})
    by_host = {facts.host: facts.environment for facts in all_facts}
    differing = _differences(filter(must_be_equal, names), by_host)
    for name, values in differing.items():
        complain = found.fail if changes_results(name) else found.warn
        complain(
            "environment",
            f"{name} is {values}",
            f"set {name} to the same on all hosts, or on none, also in LaunchDaemons and units",
        )
    if not differing:
        found.ok("environment", "the same on all hosts")


def _models(found: Findings, all_facts: Sequence[Facts]) -> None:
    ranked = [facts for facts in all_facts if facts.ranks]
    digests = {facts.host: facts.model_digest for facts in ranked}
    if len(ranked) < 2 or not all(digests.values()):
        missing = [host for host, digest in digests.items() if not digest]
        if missing and any(digests.values()):
            found.warn(
                "models",
                f"the model is not on {' and '.join(missing)}",
                "copy it from the other host: `rsync -a MODEL_FOLDER HOST:`",
            )
        return
    mlx = {tuple(facts.versions.get(name, "") for name in ("mlx", "mlx-lm")) for facts in ranked}
    if len(set(digests.values())) == 1:
        found.ok("models", "the same headers and config on all hosts with ranks")
    elif len(mlx) > 1:
        found.cannot_check(
            "models", "cannot be compared while versions of MLX differ", "make these equal first"
        )
    else:
        found.fail(
            "models",
            f"different checkpoints: {_groups(digests)}",
            "copy the model from one host to the others: `rsync -a --checksum MODEL_FOLDER HOST:`",
        )


def _keys(
    found: Findings, all_facts: Sequence[Facts], scheduler: str, flags: Mapping[str, str]
) -> None:
    hub = next((facts for facts in all_facts if facts.host == scheduler), None)
    if hub is None or not hub.listens_on_tcp:
        return
    complaints = len(found.all)
    without = [facts.host for facts in all_facts if not facts.public_key]
    if without:
        found.cannot_check(
            "keys",
            f"allowed keys cannot be compared: no key pair on {' and '.join(without)}",
            "first, "
            + ", ".join(f"on {host}: `lockstep keys new{flags.get(host, '')}`" for host in without),
        )
    for facts in all_facts:
        if facts is hub:
            continue
        wanted = ["rank"] if facts.ranks else []
        wanted += ["gateway"] if "gateway" in facts.roles else []
        _allowed(found, hub, facts, wanted, flags.get(hub.host, ""))
        _allowed(found, facts, hub, ["scheduler"], flags.get(facts.host, ""))
    if len(found.all) == complaints:
        found.ok("keys", "the scheduler's host and the others allow each other")


def _allowed(found: Findings, here: Facts, other: Facts, roles: Sequence[str], flags: str) -> None:
    """Check that `here` allows the key of `other` for these roles."""
    if not other.public_key:
        # The host itself reports that it has no keys.
        return
    has = here.allowed.get(other.public_key, [])
    missing = [role for role in roles if role not in has]
    if missing:
        flags += "".join(f" --role {role}" for role in dict.fromkeys([*has, *missing]))
        known = "does not allow" if not has else f"allows only as {', '.join(has)}"
        found.fail(
            "keys",
            f"{here.host} {known} {other.host}, which needs {', '.join(missing)}",
            # A key may begin with a hyphen.
            f"on {here.host}: `lockstep keys allow{flags} -- '{other.public_key}' {other.host}`",
        )


def _cables(
    found: Findings,
    all_facts: Sequence[Facts],
    rdma: Mapping[str, Mapping[str, Sequence[str]]],
) -> None:
    macs = [facts for facts in all_facts if facts.platform == "macOS" and facts.ports]
    if len(macs) < 2:
        return
    owner = {port.uuid: (facts, port) for facts in macs for port in facts.ports}
    linked: set[frozenset[str]] = set()
    for facts in macs:
        for port in facts.ports:
            if not port.peer_uuid:
                continue
            place = f"port {port.receptacle} ({port.interface}) of {facts.host}"
            if port.peer_uuid not in owner:
                found.warn(
                    "cables",
                    f"{place} leads to {port.peer_name or 'a computer'}, which is not a host of "
                    "the inventory",
                    "move the cable, or add that host to the inventory",
                )
                continue
            peer, other = owner[port.peer_uuid]
            if peer is facts:
                found.fail("cables", f"{place} leads back to {facts.host}", "move one end of it")
            elif other.peer_uuid != port.uuid:
                found.fail(
                    "cables",
                    f"{place} sees port {other.receptacle} of {peer.host}, which does not see it",
                    "plug this cable again at both ends; if it stays so, use another cable",
                )
            else:
                linked.add(frozenset((facts.host, peer.host)))
    _missing(found, macs, linked)
    for facts in macs:
        for peer_name, devices in rdma.get(facts.host, {}).items():
            for device in devices:
                _device(found, facts, peer_name, device, owner)


def _missing(found: Findings, macs: Sequence[Facts], linked: set[frozenset[str]]) -> None:
    """Add a finding for pairs without a cable, unless the cables form a ring."""
    pairs = [frozenset(pair) for pair in itertools.combinations([one.host for one in macs], 2)]
    missing = [" and ".join(sorted(pair)) for pair in pairs if pair not in linked]
    if not missing:
        found.ok("cables", f"each of {len(macs)} Macs is linked to each other, from both ends")
        return
    counts = [sum(one.host in pair for pair in linked) for one in macs]
    if len(macs) > 2 and all(count == 2 for count in counts) and _is_connected(macs, linked):
        found.ok("cables", f"{len(macs)} Macs in a ring, from both ends")
        return
    needs = any(one.backend == "jaccl" for one in macs)
    complain = found.fail if needs else found.warn
    complain(
        "cables",
        f"no working cable between {', '.join(missing)}",
        "JACCL needs a cable between every two Macs, or a ring of cables: plug one in, or look at "
        "the findings about its ends",
    )


def _is_connected(macs: Sequence[Facts], linked: set[frozenset[str]]) -> bool:
    reached = {macs[0].host}
    for _ in macs:
        reached |= {name for pair in linked if pair & reached for name in pair}
    return len(reached) == len(macs)


def _device(
    found: Findings,
    facts: Facts,
    peer_name: str,
    device: str,
    owner: Mapping[str, tuple[Facts, object]],
) -> None:
    """Check that a device leads to the peer that the inventory names."""
    remedy = (
        f"correct `rdma` of {facts.host} in the inventory: names of interfaces change with ports"
    )
    port = next((one for one in facts.ports if f"rdma_{one.interface}" == device), None)
    if port is None:
        known = ", ".join(facts.rdma_devices) or "none"
        found.fail("rdma table", f"{facts.host} has no {device}, only {known}", remedy)
        return
    peer = owner[port.peer_uuid][0].host if port.peer_uuid in owner else "no host"
    if peer != peer_name:
        leads = f"{device} of {facts.host} leads to {peer}, not to {peer_name}"
        found.fail("rdma table", leads, remedy)
