"""Comparison of several hosts: versions, settings, keys, cables, clocks and missing answers."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from services.commands.doctor.comparing import check_clock, compare
from services.commands.doctor.facts import (
    Examination,
    Facts,
    Finding,
    Findings,
    HostReport,
    ThunderboltPort,
)
from services.commands.doctor.remote import DEFAULT_COMMAND, ask_all, command_for, read_answer
from services.commands.doctor.system_commands import CommandOutcome
from shared.configuration.inventory import HostEntry
from shared.errors import UsageError
from tests.unit.commands.doctor.recorded import A1, A2, B1, B2

VERSIONS = {"Python": "3.12.4", "lockstep": "0.1.0", "mlx": "0.32.4", "mlx-lm": "0.32.2"}


def _port(uuid: str, peer: str, interface: str, receptacle: str = "1") -> ThunderboltPort:
    return ThunderboltPort(
        receptacle=receptacle, uuid=uuid, speed_gbps=80, connected=bool(peer), peer_uuid=peer,
        peer_name="a Mac", interface=interface,
    )  # fmt: skip


def _facts(host: str, **changes: Any) -> Facts:
    uuids, peers = ((A1, A2), (B1, "")) if host == "a" else ((B1, B2), (A1, ""))
    facts = Facts(
        host=host, platform="macOS", system="26.4.1 (25E253)", chip="Apple M3 Ultra",
        versions=VERSIONS, public_key=f"key-{host}", listens_on_tcp=True,
        allowed={"key-b": ["rank", "gateway"]} if host == "a" else {"key-a": ["scheduler"]},
        model_digest="0123", ranks=1, backend="jaccl", roles=["gateway"],
        ports=[_port(uuids[0], peers[0], "en5"), _port(uuids[1], peers[1], "en2", "2")],
        rdma_devices=["rdma_en2", "rdma_en5"],
    )  # fmt: skip
    return msgspec.structs.replace(facts, **changes)


def _faults(
    facts: Sequence[Facts], rdma: dict[str, dict[str, list[str]]] | None = None
) -> list[Finding]:
    """Return the findings of a comparison that are not OK."""
    return [one for one in compare(facts, rdma or {}, "a").all if one.verdict != "OK"]


def test_doctor_reports_only_ok_when_compared_hosts_are_equal() -> None:
    """Equal hosts have one finding for each comparison, and all findings are OK."""
    found = compare([_facts("a"), _facts("b")], {"a": {"b": ["rdma_en5"]}}, "a").all

    assert {one.verdict for one in found} == {"OK"}
    assert {one.check for one in found} >= {
        "versions", "systems", "environment", "models", "keys", "cables",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "check", "verdict", "cause"),
    [
        ({"versions": {**VERSIONS, "mlx": "0.32.5"}}, "version of mlx", "FAIL", "0.32.5 on b"),
        (
            {"versions": {**VERSIONS, "Python": "3.11.7"}},
            "version of Python",
            "WARN",
            "3.11.7 on b",
        ),
        ({"system": "26.5 (25F80)"}, "systems", "WARN", "macOS 26.5 (25F80) on b"),
        ({"chip": "Apple M4 Max"}, "chips", "WARN", "Apple M4 Max on b"),
        (
            {"environment": {"MLX_METAL_FAST_SYNCH": "1"}},
            "environment",
            "FAIL",
            "none on a, 1 on b",
        ),
        ({"environment": {"LOCKSTEP_LOG_LEVEL": "debug"}}, "environment", "WARN", "debug on b"),
        ({"model_digest": "9999"}, "models", "FAIL", "9999 on b"),
        ({"model_digest": ""}, "models", "WARN", "not on b"),
        ({"public_key": "key-new"}, "keys", "FAIL", "a does not allow b, which needs rank"),
        ({"allowed": {"key-a": ["status"]}}, "keys", "FAIL", "b allows only as status a"),
    ],
)
def test_doctor_reports_difference_between_hosts_with_value_and_remedy(
    changes: dict[str, Any], check: str, verdict: str, cause: str
) -> None:
    """The finding has the check, the host's value and a remedy."""
    found = _faults([_facts("a"), _facts("b", **changes)])

    assert [(one.check, one.verdict) for one in found] == [(check, verdict)]
    assert cause in found[0].detail
    assert found[0].remedy


def test_doctor_ignores_different_folders_and_addresses_of_hosts() -> None:
    """A host's own folders and addresses are not compared."""
    other = _facts("b", environment={"LOCKSTEP_PATHS_RUN_DIR": "/tmp/x"})

    assert _faults([_facts("a"), other]) == []


def test_doctor_reports_different_variables_of_hosts_except_api_keys() -> None:
    """Clients' keys are a host's own; a setting that counts tokens is compared."""
    secrets = {"LOCKSTEP_API_KEY": "digest 1", "LOCKSTEP_API_KEYS": "digest 2"}
    counts = {"LOCKSTEP_MODEL_CONTEXT_TOKENS_MAX": "digest 3"}

    assert _faults([_facts("a"), _facts("b", environment=secrets)]) == []
    assert len(_faults([_facts("a"), _facts("b", environment=counts)])) == 1


def test_doctor_cannot_check_model_digests_when_mlx_lm_versions_differ() -> None:
    """The digest covers the version of mlx-lm, so with different ones it is CANNOT CHECK."""
    other = _facts("b", model_digest="9", versions={**VERSIONS, "mlx-lm": "0.33.0"})

    assert [(one.check, one.verdict) for one in _faults([_facts("a"), other])] == [
        ("version of mlx-lm", "FAIL"),
        ("models", "CANNOT CHECK"),
    ]


def test_doctor_cannot_check_keys_of_host_without_public_key() -> None:
    """A host without a public key gives CANNOT CHECK, and not OK."""
    found = compare([_facts("a", public_key=""), _facts("b")], {}, "a").all

    assert [one.verdict for one in found if one.check == "keys"] == ["CANNOT CHECK"]


def test_doctor_remedy_for_keys_lists_present_and_missing_roles() -> None:
    """The remedy is a command with the roles that are already allowed and the missing ones."""
    found = _faults([_facts("a", allowed={"key-b": ["gateway"]}), _facts("b")])

    command = "lockstep keys allow --role gateway --role rank -- 'key-b' b"
    assert found[0].remedy == f"on a: `{command}`"


def test_doctor_remedy_for_keys_has_inventory_and_host_flags() -> None:
    """Each host's keys folder depends on its inventory, so the command needs both flags."""
    flags = {"a": " --inventory /etc/c.toml --host a", "b": " --inventory ~/c.toml --host b"}
    changed_key, no_key = _facts("b", public_key="key-new"), _facts("b", public_key="")

    (allow,) = [
        one
        for one in compare([_facts("a"), changed_key], {}, "a", flags).all
        if one.verdict != "OK"
    ]
    new = [one for one in compare([_facts("a"), no_key], {}, "a", flags).all if one.check == "keys"]

    assert "`lockstep keys allow --inventory /etc/c.toml --host a --role rank " in allow.remedy
    assert new[0].remedy == "first, on b: `lockstep keys new --inventory ~/c.toml --host b`"


def test_doctor_remedy_for_different_lockstep_versions_installs_from_checkout() -> None:
    """The package index has another project of this name."""
    found = _faults([_facts("a"), _facts("b", versions={**VERSIONS, "lockstep": "0.0.9"})])

    assert "make install" in found[0].remedy
    assert "pip install" not in found[0].remedy


def test_doctor_fails_cable_that_only_one_mac_sees() -> None:
    """The finding names both ends of the cable, and the pair counts as not linked."""
    unlinked = _facts("b", ports=[_port(B1, "", "en5")])

    found = _faults([_facts("a"), unlinked])

    assert "port 1 (en5) of a sees port 1 of b, which does not see it" in found[0].detail
    assert "no working cable between a and b" in found[1].detail


def test_doctor_fails_missing_cable_with_jaccl_and_warns_with_ring() -> None:
    """A missing cable is a fault with jaccl, and a warning for a ring over the network."""
    hosts = [_facts(h, ports=[_port(u, "", "en5")]) for h, u in (("a", A1), ("b", B1))]
    rings = [msgspec.structs.replace(one, backend="ring") for one in hosts]

    assert [(one.check, one.verdict) for one in _faults(hosts)] == [("cables", "FAIL")]
    assert [(one.check, one.verdict) for one in _faults(rings)] == [("cables", "WARN")]


def test_doctor_names_unknown_mac_at_other_end_of_cable() -> None:
    """A cable to a Mac outside the inventory is reported with the name of that Mac."""
    found = _faults(
        [_facts("a", ports=[_port(A1, B1, "en5"), _port(A2, "FFFF", "en2", "2")]), _facts("b")]
    )

    assert (
        "port 2 (en2) of a leads to a Mac, which is not a host of the inventory" in found[0].detail
    )


def test_doctor_fails_four_macs_whose_cables_form_no_closed_ring() -> None:
    """With one cable out the ring is open, which is a fault."""

    def ring(names: str, cut: bool) -> list[Facts]:
        size = len(names)
        found = []
        for index, name in enumerate(names):
            before, after = names[index - 1], names[(index + 1) % size]
            out = "" if cut and index == 0 else f"{after}-in"
            into = "" if cut and index == 1 else f"{before}-out"
            ports = [_port(f"{name}-out", out, "en2"), _port(f"{name}-in", into, "en5")]
            found.append(_facts(name, ports=ports, listens_on_tcp=False))
        return found

    assert _faults(ring("abcd", cut=False)) == []
    assert [one.check for one in _faults(ring("abcd", cut=True))] == ["cables"]


def test_doctor_fails_rdma_table_that_disagrees_with_cables() -> None:
    """A device that leads elsewhere or does not exist is a fault."""
    wrong = {"a": {"b": ["rdma_en2"]}, "b": {"a": ["rdma_en9"]}}

    found = _faults([_facts("a"), _facts("b")], wrong)

    assert [one.detail for one in found] == [
        "rdma_en2 of a leads to no host, not to b",
        "b has no rdma_en9, only rdma_en2, rdma_en5",
    ]


@pytest.mark.parametrize(
    ("reported_s", "expected"),
    [(1_000.0, None), (1_030.0, None), (1_100.0, "70 s ahead"), (900.0, "100 s behind")],
)
def test_doctor_reports_clock_of_other_host_that_differs_beyond_request_time(
    reported_s: float, expected: str | None
) -> None:
    """The other host's time must lie between the local times before and after the request."""
    found = Findings("b")

    check_clock(found, "b", reported_s, before_s=1_000.0, after_s=1_030.0)

    assert len(found.all) == (expected is not None)
    assert expected is None or expected in found.all[0].detail


def _answer(host: str = "elsewhere") -> str:
    report = HostReport(
        facts=msgspec.structs.replace(_facts("b"), host=host),
        findings=[Finding(host=host, check="sleep", verdict="FAIL", detail="sleeps")],
    )
    return msgspec.json.encode(Examination(hosts=[report], findings=[])).decode()


def test_doctor_reads_remote_report_that_follows_login_text() -> None:
    """Login scripts print lines, and the exit code is 1 when there are findings."""
    report = read_answer(CommandOutcome(f"Welcome to b!\n{_answer()}", code=1))

    assert report is not None
    assert report.findings[0].detail == "sleeps"


def test_doctor_reports_cause_when_remote_host_does_not_answer() -> None:
    """An unreachable, slow or differently installed host has a finding with the cause."""
    outcomes = {
        "far": CommandOutcome(problem="ssh did not answer within 5 s"),
        "bare": CommandOutcome(errors="zsh: command not found: lockstep", code=127),
        "old": CommandOutcome('{"hosts": [{"facts": {}}], "findings": []}'),
        "fine": CommandOutcome(_answer("another-name")),
    }

    answers = ask_all(
        {name: [name] for name in outcomes}, 5.0, lambda command, _: outcomes[command[0]]
    )

    assert [name for name, one in answers.items() if one.report is None] == ["far", "bare", "old"]
    assert "within 5 s" in answers["far"].findings.all[0].detail
    assert "command not found: lockstep" in answers["bare"].findings.all[0].detail
    fine = answers["fine"].report
    assert fine is not None
    assert (fine.facts.host, fine.findings[0].host) == ("fine", "fine")


def test_doctor_remote_command_uses_login_and_executable_from_inventory() -> None:
    """Login and executable come from the host's table, with defaults."""
    plain = HostEntry(name="b", address="10.0.0.2")
    own = HostEntry(name="b", address="10.0.0.2", ssh="me@b.local", executable="/opt/lockstep")

    assert command_for(DEFAULT_COMMAND, plain, "/etc/c.toml")[5:] == [
        "10.0.0.2", "lockstep", "doctor", "--json", "--alone", "--inventory", "/etc/c.toml",
        "--host", "b",
    ]  # fmt: skip
    assert command_for(DEFAULT_COMMAND, own, "/etc/c.toml")[5:7] == ["me@b.local", "/opt/lockstep"]


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/opt/a b/$(id)", "'/opt/a b/$(id)'"),
        ("~/lock step", "~/'lock step'"),
        ("~me/x", "~me/x"),
        ("~;id/x", "'~;id/x'"),
        ("~", "~"),
    ],
)
def test_doctor_quotes_remote_paths_only_when_command_runs_over_ssh(path: str, word: str) -> None:
    """Blanks and shell characters stay in the word; a leading ~ stays a home folder."""
    host = HostEntry(name="b", address="10.0.0.2", executable=path, inventory=path)

    by_ssh = command_for(DEFAULT_COMMAND, host, "x")
    by_hand = command_for("env {executable} {inventory}", host, "x")

    assert (by_ssh[6], by_ssh[11]) == (word, word)
    assert by_hand == ["env", path, path]


@pytest.mark.parametrize("template", ["ssh {unknown}", "'", "", "{", "{0}"])
def test_doctor_refuses_malformed_remote_command_template(template: str) -> None:
    """The error for a malformed template names `--remote`."""
    with pytest.raises(UsageError, match="--remote"):
        command_for(template, HostEntry(name="b"), "x")
