"""`lockstep keys`: what it writes and says, that it can be repeated, that it tells no secret."""

import contextlib
import io
import json
import shlex
import stat
import threading
from pathlib import Path

import pytest

from services.commands.cli import click_support
from services.commands.keys import host_keys
from services.commands.main import lockstep
from shared.errors import ConfigError, LockstepError, UsageError
from shared.transport import keys, sockets

KEY, OTHER = (sockets.new_key_pair()[0] for _ in range(2))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a key pair, made from nothing."""
    host_keys.new(tmp_path / "made" / "keys")
    return tmp_path / "made" / "keys"


def _run(folder: Path, *arguments: str) -> str:
    """Return what the command prints."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setenv("LOCKSTEP_PATHS_KEYS_DIR", str(folder))
        click_support.run(lockstep, ["keys", *arguments])
    return printed.getvalue()


def _secret(folder: Path) -> str:
    return (folder / "secret").read_text().strip()


def test_new_makes_files_that_only_this_user_reads(folder: Path) -> None:
    """Folder 0700, files 0600; the host's own key may do everything on its own host."""
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {
        "secret": 0o600,
        "public": 0o600,
        "allowed": 0o600,
    }
    (own,) = keys.read_allowed(folder).values()
    assert own.name == host_keys.OWN_NAME
    assert own.roles == set(keys.ROLES)
    assert sockets.load_keys(folder) is not None


def test_new_replaces_a_pair_only_by_force(folder: Path) -> None:
    """A second `new` is refused; with --force the pair is new and other peers stay allowed."""
    host_keys.allow(folder, KEY, "mac-2", ["rank"])
    before = _secret(folder)

    with pytest.raises(ConfigError, match="--force"):
        _run(folder, "new")
    assert _secret(folder) == before
    said = _run(folder, "new", "--force")

    own = sockets.load_keys(folder)
    assert own is not None
    assert own.secret != before
    assert own.public in said
    assert {peer.name: peer.public_key for peer in keys.read_allowed(folder).values()} == {
        "mac-2": KEY,
        host_keys.OWN_NAME: own.public,
    }


def test_force_repairs_what_new_has_made(folder: Path) -> None:
    """A broken secret, or one that others could read, can be replaced."""
    (folder / "secret").write_text("broken")
    (folder / "secret").chmod(0o644)

    _run(folder, "new", "--force")

    assert sockets.load_keys(folder) is not None
    assert stat.S_IMODE((folder / "secret").stat().st_mode) == 0o600


def test_no_action_tells_the_secret(folder: Path) -> None:
    """Whatever is printed, as text or JSON, or raised, holds no secret key."""
    said = [_run(folder, "show"), _run(folder, "show", "--json")]
    said += [_run(folder, "allow", KEY, "mac-2", "--role", "rank"), _run(folder, "remove", "mac-2")]
    with pytest.raises(UsageError, match="secret") as refusal:
        _run(folder, "allow", "--role", "rank", "--", _secret(folder), "mac-2")
    said += [str(refusal.value), _run(folder, "new", "--force")]

    assert _secret(folder) not in "".join(said)
    assert "mac-2" not in (folder / "allowed").read_text()


def test_show_says_what_other_hosts_need(folder: Path) -> None:
    """The command that it prints works on another host, as a shell reads it."""
    other = folder.parent / "other"
    host_keys.new(other)
    (line,) = [line for line in _run(folder, "show").splitlines() if "keys allow" in line]

    words = shlex.split(line[line.index("lockstep keys") :])
    _run(other, *[{"NAME": "mac-1", "ROLE": "gateway"}.get(word, word) for word in words[2:]])

    facts = json.loads(_run(other, "show", "--json"))
    public = json.loads(_run(folder, "show", "--json"))["public_key"]
    assert {"public_key": public, "name": "mac-1", "roles": ["gateway"]} in facts["allowed"]
    assert "mac-1" in _run(other, "show")


def test_show_without_keys_names_the_remedy(tmp_path: Path) -> None:
    """No keys: it says where they would be and how to make them."""
    with pytest.raises(ConfigError, match="lockstep keys new"):
        _run(tmp_path, "show")


def test_allow_can_be_repeated_and_adds_roles(folder: Path) -> None:
    """The same again changes nothing, not even the file; another role is added."""
    text = _run(folder, "allow", KEY, "mac-2", "--role", "rank")
    before = keys.signature(folder)

    assert _run(folder, "allow", KEY, "mac-2", "--role", "rank") == text
    assert keys.signature(folder) == before
    _run(folder, "allow", KEY, "mac-2", "--role", "store-client", "--role", "rank")

    assert keys.read_allowed(folder)[KEY].roles == {"rank", "store-client"}


def test_comments_survive(folder: Path) -> None:
    """What an operator has written into the list stays there."""
    path = folder / "allowed"
    path.write_text(f"# the rack on the left\n\n{KEY} mac-2 rank\n# the end\n")

    _run(folder, "allow", OTHER, "mac-3", "--role", "gateway")
    _run(folder, "remove", "mac-2")

    assert path.read_text() == f"# the rack on the left\n\n# the end\n{OTHER} mac-3 gateway\n"


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        (("allow", "short", "mac-3", "--role", "rank"), UsageError, "no public key"),
        (("allow", OTHER, "mac 3", "--role", "rank"), UsageError, "a name"),
        (("allow", OTHER, "mac-3", "--role", "king"), UsageError, "king"),
        (("allow", OTHER, "mac-2", "--role", "rank"), ConfigError, "another key"),
        (("allow", KEY, "mac-3", "--role", "rank"), ConfigError, "as mac-2"),
        (("remove", "mac-3"), ConfigError, "No key is allowed"),
    ],
)
def test_a_mistake_changes_nothing(
    folder: Path, arguments: tuple[str, ...], kind: type[LockstepError], says: str
) -> None:
    """A name or key that is none, or is taken, is refused in a sentence; the list stays."""
    host_keys.allow(folder, KEY, "mac-2", ["rank"])
    before = (folder / "allowed").read_text()

    with pytest.raises(kind, match=says):
        _run(folder, *arguments)

    assert (folder / "allowed").read_text() == before
    assert sorted(path.name for path in folder.iterdir()) == ["allowed", "public", "secret"]


def test_a_malformed_list_is_never_overwritten(folder: Path) -> None:
    """A list that cannot be read is named, and left for its owner to repair."""
    (folder / "allowed").write_text("half a line\n")

    for arguments in (("allow", KEY, "mac-2", "--role", "rank"), ("remove", "mac-2"), ("show",)):
        with pytest.raises(ConfigError, match="line 1"):
            _run(folder, *arguments)

    assert (folder / "allowed").read_text() == "half a line\n"


def test_a_folder_that_others_enter_is_refused(tmp_path: Path) -> None:
    """Keys are not written where others can reach them."""
    tmp_path.chmod(0o755)

    with pytest.raises(ConfigError, match="chmod 700"):
        host_keys.new(tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    """A file in the way is named."""
    (tmp_path / "keys").write_text("")

    with pytest.raises(ConfigError, match="Cannot use"):
        host_keys.new(tmp_path / "keys")


def test_two_at_once_lose_nothing(folder: Path) -> None:
    """Eight hosts allowed at the same moment are all allowed."""
    publics = [sockets.new_key_pair()[0] for _ in range(8)]
    threads = [
        threading.Thread(target=host_keys.allow, args=(folder, public, f"mac-{number}", ["rank"]))
        for number, public in enumerate(publics)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert set(publics) < set(keys.read_allowed(folder))
