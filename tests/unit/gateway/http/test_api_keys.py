"""API keys: stored as digests, reloaded when the file changes, checked line by line."""

import contextlib
import hashlib
import hmac
import io
import os
import stat
import threading
from pathlib import Path

import pytest

from services.commands.cli import click_support
from services.commands.keys import api_key
from services.commands.main import lockstep
from services.gateway.http import api_keys
from services.gateway.http.api_keys import ApiKeys
from shared.clock import ManualClock
from shared.configuration.settings import GatewayConfig
from shared.errors import ConfigError, UsageError
from shared.os import private_files

_LONG = "a-key-from-the-environment"


def _new(path: Path, name: str) -> str:
    return api_key.new(path, name).split()[0]


def _name_of(keys: ApiKeys, sent: bytes) -> str | None:
    """Return the name of the key that a client sent."""
    found = keys.find(sent)
    return found.name if found is not None else None


def _keys(path: Path, clock: ManualClock, given: str = "") -> ApiKeys:
    return ApiKeys(GatewayConfig(api_keys_file=str(path)), given, clock)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Path of the key file."""
    return tmp_path / "keys" / "api-keys"


@pytest.fixture
def clock() -> ManualClock:
    """A clock that the test moves."""
    return ManualClock(100.0)


def test_gateway_requires_no_api_key_when_none_is_configured() -> None:
    """Without file and variable no key is required and none is valid."""
    keys = ApiKeys(GatewayConfig(), "", ManualClock())

    assert not keys.are_required
    assert keys.find(b"x") is None


def test_api_key_file_stores_only_salted_digest_of_key(path: Path, clock: ManualClock) -> None:
    """The file is private and holds no key; the same key has a different digest each time."""
    secret = _new(path, "alice")

    text = path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret not in text
    assert hashlib.blake2b(secret.encode(), digest_size=32).hexdigest() not in text
    assert api_keys.ApiKey.of("a", secret).digest != api_keys.ApiKey.of("a", secret).digest
    assert _name_of(_keys(path, clock), secret.encode()) == "alice"


def test_new_api_keys_have_256_random_bits(path: Path) -> None:
    """With 256 random bits one round of a fast hash is enough; all keys differ."""
    secrets = {_new(path, f"key-{number}") for number in range(20)}

    assert len(secrets) == 20
    assert all(len(secret) == len(api_keys.PREFIX) + 43 for secret in secrets)
    assert api_keys.KEY_BYTES == 32


@pytest.mark.parametrize(
    "presented", [b"", b"wrong", b"k\xc3\xa9y", b"\xff\xfe", b"a\x00b", b"x" * 8_000]
)
def test_api_key_of_arbitrary_bytes_is_refused_without_exception(
    path: Path, clock: ManualClock, presented: bytes
) -> None:
    """Any bytes from a client give no name and raise no exception."""
    secret = _new(path, "alice")
    keys = _keys(path, clock)

    assert keys.find(presented) is None
    assert keys.find(secret.encode() + b" ") is None
    assert keys.find(secret.encode()[:-1]) is None


def test_api_key_check_compares_all_digests_in_constant_time(
    path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each presented key is compared with all digests in constant time."""
    secrets = [_new(path, f"key-{number}") for number in range(5)]
    keys = _keys(path, clock, f"env={_LONG}")
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def counting(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    for presented in (secrets[0], secrets[-1], _LONG, "wrong", "", "x" * 8_000):
        compared.clear()
        keys.find(presented.encode())
        assert compared == [(32, 32)] * 6


def test_change_of_api_key_file_takes_effect_after_reload_interval(
    path: Path, clock: ManualClock
) -> None:
    """Added and removed keys count after RELOAD_INTERVAL_S, also when no key is left."""
    alice = _new(path, "alice").encode()
    keys = _keys(path, clock)
    bob = _new(path, "bob").encode()

    assert keys.find(bob) is None
    clock.advance(api_keys.RELOAD_INTERVAL_S)
    assert _name_of(keys, bob) == "bob"
    api_key.remove(path, "alice")
    api_key.remove(path, "bob")
    clock.advance(api_keys.RELOAD_INTERVAL_S)
    assert keys.find(alice) is None
    assert keys.find(bob) is None
    assert keys.are_required


@pytest.mark.parametrize("fault", ["garbage", "mode", "gone", "long"])
def test_invalid_api_key_file_keeps_old_keys_and_is_logged_once(
    path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """A broken file, or one that others can read, changes nothing until it is valid again."""
    secret = _new(path, "alice").encode()
    keys = _keys(path, clock)
    valid = path.read_text()
    if fault == "garbage":
        path.write_text(f"alice {secret.decode()}\n")
    elif fault == "mode":
        path.chmod(0o644)
    elif fault == "gone":
        path.unlink()
    else:
        path.write_text("#" * (private_files.FILE_BYTES_MAX + 1))
    for _ in range(5):
        clock.advance(api_keys.RELOAD_INTERVAL_S)
        assert _name_of(keys, secret) == "alice"
    logged = [record for record in caplog.records if record.message == "api_keys_unreadable"]
    assert len(logged) == 1
    assert secret.decode() not in str(logged[0].__dict__)
    path.unlink(missing_ok=True)
    path.touch(0o600)
    path.write_text(valid.replace("alice", "bob"))
    clock.advance(api_keys.RELOAD_INTERVAL_S)
    assert _name_of(keys, secret) == "bob"


_SALT, _DIGEST = "0" * 32, "0" * 64


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("alice", "line 2, is not"),
        (f"alice {_SALT}", "line 2, is not"),
        (f"alice {_SALT} {_DIGEST} more", "line 2, is not"),
        (f"alice {_SALT} {_DIGEST[:-1]}", "line 2, is not"),
        (f"alice {_SALT} {_DIGEST[:-1]}g", "line 2, is not"),
        (f"../alice {_SALT} {_DIGEST}", "line 2, is not"),
        (f"{'a' * 65} {_SALT} {_DIGEST}", "line 2, is not"),
        (f"a/b {_SALT} {_DIGEST}", "line 2, is not"),
        (f"a {_SALT} {_DIGEST}\na {_SALT} {_DIGEST}", "line 3, has the same name"),
        (f"a {_SALT} {_DIGEST} 0", "line 2, has a weight that is not a number from 0.01 to 100"),
        (f"a {_SALT} {_DIGEST} 1.2.3", "line 2, has a weight"),
        (f"a {_SALT} {_DIGEST} 101", "line 2, has a weight"),
        ("\n".join(f"k{n} {_SALT} {_DIGEST}" for n in range(1_001)), "more than 1,000"),
    ],
)
def test_error_for_invalid_api_key_line_has_its_number_but_not_text(
    path: Path, line: str, cause: str
) -> None:
    """The error has file and line and not the line's text, which may be a key."""
    with pytest.raises(ConfigError, match=cause) as refused:
        api_keys.parse_file(f"# comment\n{line}\n", path)

    assert _SALT not in str(refused.value)


def test_api_key_path_is_refused_when_folder_pipe_or_binary_file(path: Path) -> None:
    """A folder, a pipe (which would block) and a file that is not text are errors."""
    path.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"not a regular file|Is a directory"):
        api_keys.read_file(path)
    pipe = path / "pipe"
    os.mkfifo(pipe, 0o600)
    with pytest.raises(ConfigError, match="not a regular file"):
        api_keys.read_file(pipe)
    (path / "bytes").write_bytes(b"\xff\xfe")
    (path / "bytes").chmod(0o600)
    with pytest.raises(ConfigError, match="is not text"):
        api_keys.read_file(path / "bytes")


def test_api_keys_in_environment_are_read_as_name_and_key(clock: ManualClock) -> None:
    """Entries are name=key; a key may have an equals sign, and entries may have spaces."""
    keys = ApiKeys(GatewayConfig(), f"a={_LONG}=, b={_LONG}2,", clock)

    assert keys.are_required
    assert _name_of(keys, f"{_LONG}=".encode()) == "a"
    assert _name_of(keys, f"{_LONG}2".encode()) == "b"
    assert keys.find(_LONG.encode()) is None


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        (_LONG, "Entry 1 .* is not name=key"),
        (f"={_LONG}", "Entry 1 .* is not name=key"),
        (f"a={_LONG},b=", "Entry 2 .* is not name=key"),
        (f"a/b={_LONG}", "Entry 1 .* is not name=key"),
        ("a=short", "Entry 1 .* 20 or more"),
        (f"a={_LONG}\xe9", "Entry 1 .* ASCII"),
        (f"a={_LONG},a={_LONG}2", "Entry 2 .* same name"),
    ],
)
def test_error_for_invalid_environment_api_key_has_its_number_but_not_key(
    given: str, cause: str
) -> None:
    """The error has the entry's number and not the key."""
    with pytest.raises(ConfigError, match=cause) as refused:
        api_keys.parse_environment(given)

    assert _LONG not in str(refused.value)
    assert "short" not in str(refused.value)


def test_api_key_name_that_is_in_both_file_and_environment_is_refused(
    path: Path, clock: ManualClock
) -> None:
    """Two keys with one name would share a cache by mistake."""
    _new(path, "alice")
    with pytest.raises(ConfigError, match="a key name in common"):
        _keys(path, clock, f"alice={_LONG}")


def _run(path: Path | None, *arguments: str) -> str:
    """Run the command, and return its output."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setenv("LOCKSTEP_GATEWAY_API_KEYS_FILE", str(path or ""))
        click_support.run(lockstep, ["api-key", *arguments])
    return printed.getvalue()


def test_api_key_command_creates_lists_and_removes_keys(path: Path, clock: ManualClock) -> None:
    """`lockstep api-key` prints a key once, and keeps comments in the file."""
    printed = _run(path, "new", "alice")
    path.write_text(f"# whose: Alice\n{path.read_text()}".rstrip("\n"))
    _run(path, "new", "bob")

    secret = printed.split()[0]
    assert _run(path, "list").split() == ["alice", "bob"]
    assert _name_of(_keys(path, clock), secret.encode()) == "alice"
    assert secret not in _run(path, "list")
    _run(path, "remove", "alice")
    assert _run(path, "list").split() == ["bob"]
    assert "# whose: Alice" in path.read_text()
    assert _keys(path, clock).find(secret.encode()) is None
    _run(path, "remove", "bob")
    assert _run(path, "list") == "There are no keys.\n"


def test_api_key_command_errors_name_a_remedy(path: Path) -> None:
    """A missing file, an invalid, taken or unknown name and a readable file are errors."""
    with pytest.raises(ConfigError, match=r"gateway\.api_keys_file is not set"):
        _run(None, "list")
    with pytest.raises(ConfigError, match="lockstep api-key new"):
        _run(path, "list")
    for name in ("", "a/b", "-a", "a b", "a" * 65, "\u00e9"):
        with pytest.raises(UsageError, match="1 to 64 letters"):
            _run(path, "new", "--", name)
    _run(path, "new", "alice")
    before = path.read_text()
    with pytest.raises(UsageError, match="A key named alice exists"):
        _run(path, "new", "alice")
    with pytest.raises(UsageError, match="No key has that name"):
        _run(path, "remove", "bob")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        _run(path, "new", "bob")
    assert path.read_text() == before


def test_concurrent_api_key_commands_lose_no_key(path: Path) -> None:
    """Commands wait for each other; a symbolic link to the file stays a link."""
    path.parent.mkdir()
    (path.parent / "real").touch(0o600)
    path.symlink_to(path.parent / "real")
    names = [f"key-{number}" for number in range(8)]
    threads = [threading.Thread(target=_new, args=(path, name)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(api_key.names(path).split()) == names
    assert path.is_symlink()
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["api-keys", "real"]


def test_weight_of_api_key_is_stored_listed_and_found(path: Path, clock: ManualClock) -> None:
    """A key made with a weight has it in the list and for its requests; other keys have 1."""
    heavy = _run(path, "new", "heavy", "--weight", "2.5").split()[0]
    light = _run(path, "new", "light").split()[0]

    keys = _keys(path, clock)
    assert [
        one.weight for one in (keys.find(heavy.encode()), keys.find(light.encode())) if one
    ] == [
        2.5,
        1.0,
    ]
    assert _run(path, "list").splitlines() == ["heavy (weight 2.5)", "light"]


def test_api_key_weight_out_of_range_is_usage_error(path: Path) -> None:
    """A weight of 0 is refused, and no key is made."""
    with pytest.raises(UsageError, match="weight"):
        _run(path, "new", "none", "--weight", "0")
    assert not path.exists()
