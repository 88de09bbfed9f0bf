"""Key files: what is read, what is refused and how; identities and their roles; addresses."""

import os
import stat
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.log import Log
from shared.transport import keys, sockets
from shared.transport.addresses import check_address
from shared.transport.authentication import AllowList
from tests.unit.shared.transport.authentication.keyed_hosts import make_host

KEY = "tqX:O&gQe>8a^ZzgwUjpc@/2]dV?5HG9mx#eTXOF"
OTHER = "9E1HVulsKMgk^aJf1n]1*.Uv[a83@#L:hIAI$qi("
"""Public keys. Tests have the same names in every process."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a key pair."""
    make_host(tmp_path / "keys")
    return tmp_path / "keys"


def test_a_host_has_keys_or_not(tmp_path: Path, folder: Path) -> None:
    """No folder and no secret are no keys; a pair is found, whole, in files of the right modes."""
    assert sockets.load_keys(tmp_path / "nowhere") is None
    assert sockets.load_keys(tmp_path) is None

    own = sockets.load_keys(folder)

    assert own is not None
    assert keys.is_key(own.public)
    assert (folder / "public").read_text().strip() == own.public
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "secret").stat().st_mode) == 0o600


def test_a_secret_is_in_no_representation(folder: Path) -> None:
    """Printing keys, or what holds them, never shows the secret one."""
    own = sockets.load_keys(folder)
    assert own is not None

    assert own.secret not in f"{own} {own!r} {[own]}"


@pytest.mark.parametrize(
    ("name", "mode", "says"),
    [
        ("secret", 0o640, "chmod 600"),
        ("secret", 0o604, "chmod 600"),
        ("secret", 0o660, "chmod 600"),
        ("", 0o750, "chmod 700"),
        ("", 0o707, "chmod 700"),
        ("public", 0o666, "chmod 644"),
    ],
)
def test_a_secret_that_others_can_reach_is_refused(
    folder: Path, name: str, mode: int, says: str
) -> None:
    """A mode that lets others in is an error with the command that repairs it."""
    path = folder / name if name else folder
    secret = (folder / "secret").read_text().strip()
    path.chmod(mode)

    with pytest.raises(ConfigError, match=says) as refusal:
        sockets.load_keys(folder)

    assert str(path) in str(refusal.value)
    assert secret not in str(refusal.value)


def test_keys_of_another_user_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that somebody else owns is somebody else's to read and to change."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    with pytest.raises(ConfigError, match="another user"):
        sockets.load_keys(folder)


@pytest.mark.parametrize(
    "content", [b"", b"short", b"\xff" * 40, b"#" * 40, KEY.encode()[:-1], b"x" * (2 << 20)]
)
def test_a_secret_file_without_a_key_is_refused(folder: Path, content: bytes) -> None:
    """Half a key, other bytes or a huge file: one sentence that does not quote them."""
    (folder / "secret").write_bytes(content)

    with pytest.raises(ConfigError) as refusal:
        sockets.load_keys(folder)

    assert len(str(refusal.value)) < 400
    assert KEY[:-1] not in str(refusal.value)


def test_a_pair_that_does_not_match_is_refused(folder: Path) -> None:
    """A public key of another pair would be told to other hosts in vain."""
    (folder / "public").write_text(KEY)

    with pytest.raises(ConfigError, match="does not belong"):
        sockets.load_keys(folder)


def test_allowed_peers_are_read_line_by_line(tmp_path: Path) -> None:
    """Comments and blank lines are skipped; a line is a key, a name and roles."""
    text = f"# hosts\n\n  {KEY}  mac-1 rank,store-client \n\t# more\n{OTHER} mac-2 gateway\n"

    peers = keys.parse_allowed(text, tmp_path)

    assert {peer.name: set(peer.roles) for peer in peers.values()} == {
        "mac-1": {"rank", "store-client"},
        "mac-2": {"gateway"},
    }
    assert peers[KEY].line() == f"{KEY} mac-1 rank,store-client"


@pytest.mark.parametrize(
    ("line", "says"),
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
def test_a_malformed_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    """The error names file and line and what is wrong, and quotes no key."""
    text = f"# one\n{OTHER} first rank\n{line}\n"

    with pytest.raises(ConfigError, match=says) as refusal:
        keys.parse_allowed(text, tmp_path / "allowed")

    assert f"{tmp_path}/allowed, line 3, " in str(refusal.value)
    assert KEY[:-1] not in str(refusal.value)


@given(st.text(max_size=200))
def test_any_text_is_a_list_or_an_error(text: str) -> None:
    """No text makes the parser raise anything but a ConfigError."""
    try:
        peers = keys.parse_allowed(text, Path("allowed"))
    except ConfigError:
        return
    assert all(keys.is_key(peer.public_key) for peer in peers.values())


def test_who_can_write_the_list_is_checked(folder: Path) -> None:
    """A list that others can write would let them in."""
    (folder / "allowed").chmod(0o620)

    with pytest.raises(ConfigError, match="chmod 600"):
        keys.read_allowed(folder)


def test_a_list_that_is_being_written_is_not_taken(folder: Path) -> None:
    """An editor that empties the file before it writes takes nobody's permission."""
    allowed = AllowList(folder, Log("test"))
    text = (folder / "allowed").read_text()
    before = list(allowed.peers())

    (folder / "allowed").write_text("")
    assert not allowed.has_changed(1.0)
    (folder / "allowed").write_text(f"{text}{KEY} mac-2 rank\n")
    assert not allowed.has_changed(2.0)
    assert list(allowed.peers()) == before
    assert allowed.has_changed(3.0)

    assert [peer.name for peer in allowed.peers()] == ["this-host", "mac-2"]
    assert not allowed.has_changed(4.0)


@given(st.binary(min_size=32, max_size=32))
def test_every_key_is_known_as_one(key: bytes) -> None:
    """32 bytes in Z85 are a key; none begins with the sign of a comment."""
    number = "".join(_z85(key[start : start + 4]) for start in range(0, 32, 4))

    assert keys.is_key(number)
    assert number[0] != "#"


def test_new_keys_are_no_options_of_a_command_line() -> None:
    """A public key begins with a letter or a digit, so that it can be an argument."""
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
def test_an_identity_announces_a_role(identity: bytes, role: str | None) -> None:
    """Only what our diallers call themselves is a role; a listener's role never dials."""
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
def test_where_links_may_be(has_keys: bool, is_dialled: bool) -> None:
    """Loopback and ipc always; other hosts with keys; all interfaces only to listen, with keys."""
    allowed = [*LOOPBACK, *(ELSEWHERE if has_keys else [])]
    allowed += WILDCARDS if has_keys and not is_dialled else []
    for address in [*LOOPBACK, *ELSEWHERE, *WILDCARDS, *NO_ADDRESS]:
        if address in allowed:
            check_address(address, has_keys=has_keys, is_dialled=is_dialled)
        else:
            with pytest.raises(ConfigError):
                check_address(address, has_keys=has_keys, is_dialled=is_dialled)


def test_the_remedy_for_missing_keys_is_named() -> None:
    """Off loopback without keys: exit 78, and the commands to run."""
    with pytest.raises(ConfigError, match=r"lockstep keys new.*lockstep keys allow") as refusal:
        check_address("tcp://192.168.1.5:5555")

    assert refusal.value.exit_code == 78


def _z85(four: bytes) -> str:
    alphabet = keys._Z85
    number = int.from_bytes(four, "big")
    return "".join(alphabet[number // 85**power % 85] for power in (4, 3, 2, 1, 0))
