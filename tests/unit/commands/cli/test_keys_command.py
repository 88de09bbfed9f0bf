"""Command `lockstep keys`: its files and output, repeated calls, and secrecy of the private key."""

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
def keys_folder(tmp_path: Path) -> Path:
    """Return a folder that `lockstep keys new` has made."""
    host_keys.new(tmp_path / "made" / "keys")
    return tmp_path / "made" / "keys"


def _run(keys_folder: Path, *arguments: str) -> str:
    """Run `lockstep keys` and return its output."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setenv("LOCKSTEP_PATHS_KEYS_DIR", str(keys_folder))
        click_support.run(lockstep, ["keys", *arguments])
    return printed.getvalue()


def _secret(keys_folder: Path) -> str:
    return (keys_folder / "secret").read_text().strip()


def test_keys_new_makes_files_that_only_their_user_can_read(keys_folder: Path) -> None:
    """The folder has mode 0700, the files 0600; the host's own key has every role on this host."""
    assert stat.S_IMODE(keys_folder.stat().st_mode) == 0o700
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in keys_folder.iterdir()} == {
        "secret": 0o600,
        "public": 0o600,
        "allowed": 0o600,
    }
    (own,) = keys.read_allowed(keys_folder).values()
    assert own.name == host_keys.OWN_NAME
    assert own.roles == set(keys.ROLES)
    assert sockets.load_keys(keys_folder) is not None


def test_keys_new_replaces_existing_key_pair_only_with_force(keys_folder: Path) -> None:
    """A second `new` is refused; with --force the pair is new and other peers stay allowed."""
    host_keys.allow(keys_folder, KEY, "mac-2", ["rank"])
    before = _secret(keys_folder)

    with pytest.raises(ConfigError, match="--force"):
        _run(keys_folder, "new")
    assert _secret(keys_folder) == before
    printed = _run(keys_folder, "new", "--force")

    own = sockets.load_keys(keys_folder)
    assert own is not None
    assert own.secret != before
    assert own.public in printed
    assert {peer.name: peer.public_key for peer in keys.read_allowed(keys_folder).values()} == {
        "mac-2": KEY,
        host_keys.OWN_NAME: own.public,
    }


def test_keys_new_with_force_replaces_malformed_or_exposed_secret(keys_folder: Path) -> None:
    """`new --force` replaces a secret that is malformed or readable by other users."""
    (keys_folder / "secret").write_text("broken")
    (keys_folder / "secret").chmod(0o644)

    _run(keys_folder, "new", "--force")

    assert sockets.load_keys(keys_folder) is not None
    assert stat.S_IMODE((keys_folder / "secret").stat().st_mode) == 0o600


def test_no_keys_command_prints_the_secret_key(keys_folder: Path) -> None:
    """Neither text, JSON nor error messages contain the secret key."""
    texts = [_run(keys_folder, "show"), _run(keys_folder, "show", "--json")]
    texts += [
        _run(keys_folder, "allow", KEY, "mac-2", "--role", "rank"),
        _run(keys_folder, "remove", "mac-2"),
    ]
    with pytest.raises(UsageError, match="secret") as refusal:
        _run(keys_folder, "allow", "--role", "rank", "--", _secret(keys_folder), "mac-2")
    texts += [str(refusal.value), _run(keys_folder, "new", "--force")]

    assert _secret(keys_folder) not in "".join(texts)
    assert "mac-2" not in (keys_folder / "allowed").read_text()


def test_keys_show_prints_allow_command_that_succeeds_on_other_hosts(keys_folder: Path) -> None:
    """The printed command works on another host when a shell reads it."""
    other = keys_folder.parent / "other"
    host_keys.new(other)
    (line,) = [line for line in _run(keys_folder, "show").splitlines() if "keys allow" in line]

    words = shlex.split(line[line.index("lockstep keys") :])
    _run(other, *[{"NAME": "mac-1", "ROLE": "gateway"}.get(word, word) for word in words[2:]])

    facts = json.loads(_run(other, "show", "--json"))
    public = json.loads(_run(keys_folder, "show", "--json"))["public_key"]
    assert {"public_key": public, "name": "mac-1", "roles": ["gateway"]} in facts["allowed"]
    assert "mac-1" in _run(other, "show")


def test_keys_show_without_keys_names_the_command_that_makes_them(tmp_path: Path) -> None:
    """The error says that `lockstep keys new` makes the keys."""
    with pytest.raises(ConfigError, match="lockstep keys new"):
        _run(tmp_path, "show")


def test_repeated_keys_allow_adds_new_roles_and_changes_nothing_else(keys_folder: Path) -> None:
    """The same call changes nothing, not even the file's time; another role is added."""
    text = _run(keys_folder, "allow", KEY, "mac-2", "--role", "rank")
    before = keys.signature(keys_folder)

    assert _run(keys_folder, "allow", KEY, "mac-2", "--role", "rank") == text
    assert keys.signature(keys_folder) == before
    _run(keys_folder, "allow", KEY, "mac-2", "--role", "store-client", "--role", "rank")

    assert keys.read_allowed(keys_folder)[KEY].roles == {"rank", "store-client"}


def test_keys_allow_and_remove_keep_comments_in_allowed_list(keys_folder: Path) -> None:
    """An operator's comments in the list of allowed keys are kept."""
    path = keys_folder / "allowed"
    path.write_text(f"# the rack on the left\n\n{KEY} mac-2 rank\n# the end\n")

    _run(keys_folder, "allow", OTHER, "mac-3", "--role", "gateway")
    _run(keys_folder, "remove", "mac-2")

    assert path.read_text() == f"# the rack on the left\n\n# the end\n{OTHER} mac-3 gateway\n"


@pytest.mark.parametrize(
    ("arguments", "kind", "expected"),
    [
        (("allow", "short", "mac-3", "--role", "rank"), UsageError, "no public key"),
        (("allow", OTHER, "mac 3", "--role", "rank"), UsageError, "a name"),
        (("allow", OTHER, "mac-3", "--role", "king"), UsageError, "king"),
        (("allow", OTHER, "mac-2", "--role", "rank"), ConfigError, "another key"),
        (("allow", KEY, "mac-3", "--role", "rank"), ConfigError, "as mac-2"),
        (("remove", "mac-3"), ConfigError, "No key is allowed"),
    ],
)
def test_refused_keys_command_leaves_allowed_list_unchanged(
    keys_folder: Path, arguments: tuple[str, ...], kind: type[LockstepError], expected: str
) -> None:
    """An invalid or duplicate name or key is refused, and no file changes."""
    host_keys.allow(keys_folder, KEY, "mac-2", ["rank"])
    before = (keys_folder / "allowed").read_text()

    with pytest.raises(kind, match=expected):
        _run(keys_folder, *arguments)

    assert (keys_folder / "allowed").read_text() == before
    assert sorted(path.name for path in keys_folder.iterdir()) == ["allowed", "public", "secret"]


def test_keys_allow_does_not_overwrite_malformed_allowed_list(keys_folder: Path) -> None:
    """The error names the line, and the file is left for its owner to repair."""
    (keys_folder / "allowed").write_text("half a line\n")

    for arguments in (("allow", KEY, "mac-2", "--role", "rank"), ("remove", "mac-2"), ("show",)):
        with pytest.raises(ConfigError, match="line 1"):
            _run(keys_folder, *arguments)

    assert (keys_folder / "allowed").read_text() == "half a line\n"


def test_keys_new_refuses_folder_that_other_users_can_enter(tmp_path: Path) -> None:
    """Keys are not written to a folder that other users can enter."""
    tmp_path.chmod(0o755)

    with pytest.raises(ConfigError, match="chmod 700"):
        host_keys.new(tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_keys_new_refuses_folder_path_that_is_a_file(tmp_path: Path) -> None:
    """The error names the file at the folder's path."""
    (tmp_path / "keys").write_text("")

    with pytest.raises(ConfigError, match="Cannot use"):
        host_keys.new(tmp_path / "keys")


def test_allowed_list_has_every_key_after_concurrent_keys_allow_commands(keys_folder: Path) -> None:
    """Eight keys that are allowed at the same time are all in the list."""
    publics = [sockets.new_key_pair()[0] for _ in range(8)]
    threads = [
        threading.Thread(
            target=host_keys.allow, args=(keys_folder, public, f"mac-{number}", ["rank"])
        )
        for number, public in enumerate(publics)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert set(publics) < set(keys.read_allowed(keys_folder))
