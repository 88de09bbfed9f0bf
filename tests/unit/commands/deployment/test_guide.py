"""Guides: their commands are accepted, and their outputs are real."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from shared import limits
from shared.configuration import host_share, inventory
from tests.unit.commands.command_lines import parse, run_merged

ROOT = Path(__file__).resolve().parents[4]
GUIDES = sorted((ROOT / "docs" / "guide").glob("*.md"))
EXAMPLE = ROOT / "docs" / "guide" / "cluster.example.toml"
HOME = "/opt/lockstep"
STEP_BY_STEP = ("production.md", "two-macs.md")
"""Guides that lead from nothing to a running Lockstep; the others explain one subject each."""
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(lockstep [^`\n]+)`")
_LINK = re.compile(r"\]\(([^)#\s]+)\)")


def _lockstep_commands(guide: Path) -> list[list[str]]:
    """Return the words after `lockstep` of every command, in blocks and in the text."""
    text = guide.read_text(encoding="utf-8")
    lines = [
        line
        for kind, block in _BLOCK.findall(text)
        if kind == "sh"
        for line in block.replace("\\\n", " ").splitlines()
    ]
    program = re.compile(rf"(?:sudo |[A-Z_]+=\S+ )?(?:{HOME}/\.venv/bin/)?lockstep (.*)")
    found = [program.fullmatch(line) for line in [*lines, *_INLINE.findall(_BLOCK.sub("", text))]]
    return [shlex.split(one[1], comments=True) for one in found if one is not None]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_console_script_accepts_every_command_in_guides(guide: Path) -> None:
    """The console script accepts each command, flag and role in a guide."""
    commands = _lockstep_commands(guide)

    assert len(commands) >= 10 or guide.name not in STEP_BY_STEP
    for words in commands:
        if words == ["--version"]:
            continue
        assert parse(words).command == words[0]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_every_relative_link_in_guides_leads_to_existing_file(guide: Path) -> None:
    """Every relative link of a guide is an existing file."""
    links = [one for one in _LINK.findall(guide.read_text("utf-8")) if "://" not in one]

    assert links or guide.name not in STEP_BY_STEP
    assert [one for one in links if not (guide.parent / one).exists()] == []


def test_guides_for_two_macs_and_for_production_exist() -> None:
    """The guides for two Macs and for production exist."""
    assert {guide.name for guide in GUIDES} >= set(STEP_BY_STEP)


def test_example_inventory_in_guide_is_valid_for_both_hosts() -> None:
    """The inventory of the guide is valid for both hosts, with RDMA and with the ring."""
    found = inventory.read(str(EXAMPLE))
    shares = [host_share.share_of_host(found, host) for host in found.hosts]

    assert [share.roles.ranks for share in shares] == [(0,), (1,)]
    assert {share.config.backend for share in shares} == {"jaccl"}
    assert list(shares[0].files.values()) == ['[[null, "rdma_en5"], ["rdma_en5", null]]']
    text = EXAMPLE.read_text(encoding="utf-8")
    without = re.sub(r"^rdma\..*\n|^jaccl_.*\n", "", text, flags=re.MULTILINE)
    tree = tomllib.loads(without.replace('"jaccl"', '"ring"'))
    found = inventory.parse(tree, "cluster.toml")
    assert host_share.share_of_host(found, found.hosts[0]).config.backend == "ring"


def _lockstep(*words: str) -> str:
    code, output = run_merged(*words)
    assert code == limits.EXIT_OK, (words, output)
    return output


def test_guide_commands_that_need_no_second_mac_succeed_with_outputs_of_guide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands that need no second Mac succeed as written, with the outputs of the guide."""
    guide = (ROOT / "docs" / "guide" / "two-macs.md").read_text(encoding="utf-8")
    text = EXAMPLE.read_text(encoding="utf-8")
    for number in (2, 1):
        # Each of the two Macs has its own folder.
        head, middle, tail = text.partition(f'name = "studio-{number}"')
        home = f'"{tmp_path}/studio-{number}'
        text = head + middle + re.sub(rf'"{HOME}/(?=run|keys)', f"{home}/", tail)
    text = text.replace(f'"{HOME}/api-keys"', f'"{tmp_path}/api-keys"')
    (tmp_path / "cluster.toml").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    offline = ("keys", "api-key", "launchd")
    commands = _lockstep_commands(ROOT / "docs" / "guide" / "two-macs.md")
    public: dict[str, str] = {}

    for words in commands:
        # Installation needs root, and commands without --host need the name of a Mac.
        if words[0] not in offline or "install" in words or "--host" not in words:
            continue
        host = words[words.index("--host") + 1]
        words_with_keys = [public.get(word[-len("STUDIO_1") :].lower(), word) for word in words]
        output = _lockstep(*words_with_keys)
        if words[:2] == ["keys", "new"]:
            match = re.search(r"This host's public key is (\S+)", output)
            assert match is not None
            public[host.replace("-", "_")] = match[1]
    assert len(public) == 2
    assert "This host's public key is ..." in guide
    shown = _lockstep("keys", "show", "--inventory", "cluster.toml", "--host", "studio-1")
    assert "Allowed here:" in shown
    assert re.search(r"^studio-2 +\S+ +rank, status$", shown, re.MULTILINE)
    assert (tmp_path / "api-keys").stat().st_mode & 0o777 == 0o600


def test_dry_run_output_begins_with_lines_shown_in_guide() -> None:
    """The guide's lines below `up --dry-run` are the first lines of the real output."""
    guide = (ROOT / "docs" / "guide" / "two-macs.md").read_text(encoding="utf-8")
    shown = next(block for kind, block in _BLOCK.findall(guide) if "Nothing is started" in block)

    output = _lockstep("up", "--inventory", str(EXAMPLE), "--host", "studio-1", "--dry-run")

    assert output.startswith(shown.rstrip("\n"))


@pytest.mark.parametrize(
    "sentence",
    [
        "this host has no keys",
        "this host's key is not allowed there",
        "This machine calls itself",
        "Cannot use world.data_host",
        "Waiting for ranks",
    ],
)
def test_every_error_in_guide_table_occurs_in_source(sentence: str) -> None:
    """Each error in the guide's table is a sentence of the program."""
    guide = (ROOT / "docs" / "guide" / "two-macs.md").read_text(encoding="utf-8")
    sources = [*(ROOT / "services").rglob("*.py"), *(ROOT / "shared").rglob("*.py")]

    assert f"| `{sentence}" in guide
    assert any(sentence in source.read_text(encoding="utf-8") for source in sources)
