"""Key files, lists of allowed keys, identities with roles, and link addresses."""

import os
import stat
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.transport import keys, sockets
from shared.transport.addresses import check_address
from shared.transport.authentication import AllowList
from tests.unit.shared.transport.authentication.keyed_hosts import make_host

KEY = "tqX:O&gQe>8a^ZzgwUjpc@/2]dV?5HG9mx#eTXOF"
OTHER = "9E1HVulsKMgk^aJf1n]1*.Uv[a83@#L:hIAI$qi("
"""Two public keys. They are constants, so that tests have the same ids in every process."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a key pair."""
    make_host(tmp_path / "keys")
    return tmp_path / "keys"


def test_load_keys_returns_none_without_secret_file_and_else_the_key_pair(
    tmp_path: Path, folder: Path
) -> None:
    """A missing folder or secret gives None; otherwise the pair is loaded, and its files have the
    right modes."""
    assert sockets.load_keys(tmp_path / "nowhere") is None
    assert sockets.load_keys(tmp_path) is None

    own = sockets.load_keys(folder)

    assert own is not None
    assert keys.is_key(own.public)
    assert (folder / "public").read_text().strip() == own.public
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "secret").stat().st_mode) == 0o600


def test_repr_of_keys_omits_secret_key(folder: Path) -> None:
    """Printing keys never shows the secret key."""
    own = sockets.load_keys(folder)
    assert own is not None

    assert own.secret not in f"{own} {own!r} {[own]}"


@pytest.mark.parametrize(
    ("name", "mode", "expected"),
    [
        ("secret", 0o640, "chmod 600"),
        ("secret", 0o604, "chmod 600"),
        ("secret", 0o660, "chmod 600"),
        ("", 0o750, "chmod 700"),
        ("", 0o707, "chmod 700"),
        ("public", 0o666, "chmod 644"),
    ],
)
def test_key_files_accessible_to_others_are_refused_with_chmod_command(
    folder: Path, name: str, mode: int, expected: str
) -> None:
    """A mode that gives others access is an error with the command that repairs it."""
    path = folder / name if name else folder
    secret = (folder / "secret").read_text().strip()
    path.chmod(mode)

    with pytest.raises(ConfigError, match=expected) as refusal:
        sockets.load_keys(folder)

    assert str(path) in str(refusal.value)
    assert secret not in str(refusal.value)


def test_key_files_owned_by_another_user_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user who owns a key file could replace the key; root could do so in any case."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr("shared.os.private_files._ROOT", os.getuid() + 2)

    with pytest.raises(ConfigError, match="another user"):
        sockets.load_keys(folder)


@pytest.mark.parametrize(
    "content", [b"", b"short", b"\xff" * 40, b"#" * 40, KEY.encode()[:-1], b"x" * (2 << 20)]
)
def test_invalid_secret_key_file_is_refused_without_quoting_its_content(
    folder: Path, content: bytes
) -> None:
    """A partial key, other bytes or a huge file give one sentence that does not contain them."""
    (folder / "secret").write_bytes(content)

    with pytest.raises(ConfigError) as refusal:
        sockets.load_keys(folder)

    assert len(str(refusal.value)) < 400
    assert KEY[:-1] not in str(refusal.value)


def test_public_key_file_that_does_not_match_secret_is_refused(folder: Path) -> None:
    """Other hosts would allow a public key that does not belong to the secret one."""
    (folder / "public").write_text(KEY)

    with pytest.raises(ConfigError, match="does not belong"):
        sockets.load_keys(folder)


def test_allowed_list_is_read_as_one_peer_per_line(tmp_path: Path) -> None:
    """Comments and blank lines are skipped; a line has a key, a name and roles."""
    text = f"# hosts\n\n  {KEY}  mac-1 rank,store-client \n\t# more\n{OTHER} mac-2 gateway\n"

    peers = keys.parse_allowed(text, tmp_path)

    assert {peer.name: set(peer.roles) for peer in peers.values()} == {
        "mac-1": {"rank", "store-client"},
        "mac-2": {"gateway"},
    }
    assert peers[KEY].line() == f"{KEY} mac-1 rank,store-client"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"{KEY} mac", "2 fields"),
        (f"{KEY} mac rank gateway", "4 fields"),
        (f"{KEY[:-1]} mac rank", "no public key"),
        (f"{KEY[:-1]}~ mac rank", "no public key"),
        ("%%%%%" * 8 + " mac rank", "no public key"),
        (f"{KEY} ../mac rank", "a name"),
        (f"{KEY} mac king", "unknown role 'king'"),
        (f"{KEY} mac ,", "no role"),
        (f"{OTHER} mac rank", "same key as first"),
        (f"{KEY} first rank", "same name as line 2"),
    ],
)
def test_malformed_line_of_allowed_list_is_refused_with_line_number(
    tmp_path: Path, line: str, expected: str
) -> None:
    """The error has file, line and cause, and quotes no key."""
    text = f"# one\n{OTHER} first rank\n{line}\n"

    with pytest.raises(ConfigError, match=expected) as refusal:
        keys.parse_allowed(text, tmp_path / "allowed")

    assert f"{tmp_path}/allowed, line 3, " in str(refusal.value)
    assert KEY[:-1] not in str(refusal.value)


@given(st.text(max_size=200))
def test_allowed_list_parser_raises_only_config_error_for_any_text(text: str) -> None:
    """No text makes the parser raise anything but a ConfigError."""
    try:
        peers = keys.parse_allowed(text, Path("allowed"))
    except ConfigError:
        return
    assert all(keys.is_key(peer.public_key) for peer in peers.values())


def test_allowed_list_writable_by_others_is_refused(folder: Path) -> None:
    """Other users could otherwise allow their own keys."""
    (folder / "allowed").chmod(0o620)

    with pytest.raises(ConfigError, match="chmod 600"):
        keys.read_allowed(folder)


def test_current_allowed_peers_stay_when_list_file_is_incomplete(folder: Path) -> None:
    """An editor may empty the file before it writes; the current peers stay allowed meanwhile."""
    allowed = AllowList(folder)
    text = (folder / "allowed").read_text()
    before = allowed.peers

    (folder / "allowed").write_text("")
    assert not allowed.has_changed(1.0)
    (folder / "allowed").write_text(f"{text}{KEY} mac-2 rank\n")
    assert not allowed.has_changed(2.0)
    assert allowed.peers == before
    assert allowed.has_changed(3.0)

    assert [peer.name for peer in allowed.peers.values()] == ["this-host", "mac-2"]
    assert not allowed.has_changed(4.0)


@given(st.binary(min_size=32, max_size=32))
def test_any_32_bytes_in_z85_are_recognised_as_public_key(key: bytes) -> None:
    """Every key is recognised, and none begins with the sign of a comment."""
    encoded = "".join(_z85(key[start : start + 4]) for start in range(0, 32, 4))

    assert keys.is_key(encoded)
    assert encoded[0] != "#"


def test_new_public_key_begins_with_letter_or_digit() -> None:
    """A public key can be a command-line argument, because it does not look like an option."""
    for _ in range(300):
        public, secret = sockets.new_key_pair()
        assert public[0] in string.ascii_letters + string.digits
        assert keys.is_key(secret)


@pytest.mark.parametrize(
    ("identity", "role"),
    [
        (b"gateway-1f00d5eed", "gateway"),
        (b"rank-1f00d5eed", "rank"),
        (b"rank-3-1f00d5eed", "rank"),
        (b"store-client-ab", "store-client"),
        (b"status-0", "status"),
        (b"scheduler-1f", None),
        (b"store-1f", None),
        (b"king-1f", None),
        (b"rank", None),
        (b"rank-", None),
        (b"rank-xyz", None),
        (b"rank-1f\n", None),
        (b"rank-gateway-1f", None),
        (b"rank-12345678901234567", None),
        (b"\x00rank-1f", None),
        (b"", None),
    ],
)
def test_role_of_dialer_is_derived_from_its_identity(identity: bytes, role: str | None) -> None:
    """Only identities of Lockstep's diallers have a role; the role of a listener never dials."""
    assert keys.role_of(identity) == role


LOOPBACK = ["tcp://127.0.0.1:5555", "tcp://localhost:5555", "tcp://[::1]:5555", "ipc:///r/x.sock"]
ELSEWHERE = [
    "tcp://192.168.1.5:5555",
    "tcp://mac-2.local:5555",
    "tcp://127.evil.example:5555",
    "tcp://[fe80::1]:5555",
    "tcp://en0:5555",
]
WILDCARDS = ["tcp://*:5555", "tcp://0.0.0.0:5555", "tcp://[::]:5555"]
NO_ADDRESS = [
    "tcp://127.0.0.1:1;10.0.0.1:5555",
    "tcp://127.0.0.1",
    "tcp://127.0.0.1:http",
    "tcp://127.0.0.1:70000",
    "tcp://:5555",
    "tcp://a b:5555",
    "udp://127.0.0.1:5555",
    "inproc://x",
    "ipc://",
    "ipc:///" + "x" * 200,
    "",
]


@pytest.mark.parametrize("is_dialled", [False, True])
@pytest.mark.parametrize("has_keys", [False, True])
def test_link_address_off_loopback_is_allowed_only_with_keys(
    has_keys: bool, is_dialled: bool
) -> None:
    """Loopback and ipc are always allowed, other hosts with keys, wildcards with keys and to
    listen."""
    allowed = [*LOOPBACK, *(ELSEWHERE if has_keys else [])]
    allowed += WILDCARDS if has_keys and not is_dialled else []
    for address in [*LOOPBACK, *ELSEWHERE, *WILDCARDS, *NO_ADDRESS]:
        if address in allowed:
            check_address(address, has_keys=has_keys, is_dialled=is_dialled)
        else:
            with pytest.raises(ConfigError):
                check_address(address, has_keys=has_keys, is_dialled=is_dialled)


def test_error_for_remote_address_without_keys_names_commands_that_create_them() -> None:
    """The error has exit code 78 and the commands that create and allow keys."""
    with pytest.raises(ConfigError, match=r"lockstep keys new.*lockstep keys allow") as refusal:
        check_address("tcp://192.168.1.5:5555")

    assert refusal.value.exit_code == 78


def _z85(four: bytes) -> str:
    alphabet = keys._Z85
    number = int.from_bytes(four, "big")
    return "".join(alphabet[number // 85**power % 85] for power in (4, 3, 2, 1, 0))
