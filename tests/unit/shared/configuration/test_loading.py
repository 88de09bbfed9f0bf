"""Configuration: the example file is true, and a mistake is an error that names the setting."""

import stat
import tomllib
from pathlib import Path

import msgspec
import pytest

from shared.configuration import loading
from shared.configuration.loading import load_config
from shared.configuration.settings import Config
from shared.errors import ConfigError
from tools import write_example_config

ROOT = Path(__file__).resolve().parents[4]
EXAMPLE = ROOT / "lockstep.example.toml"


def _file(folder: Path, text: str) -> str:
    path = folder / "lockstep.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_the_example_shows_every_key_with_its_default() -> None:
    """Loading the example gives the defaults, and no key is left out."""
    tree = tomllib.loads(EXAMPLE.read_text(encoding="utf-8"))

    assert load_config(str(EXAMPLE)) == Config()
    assert tree == msgspec.to_builtins(Config())


def test_the_example_is_what_the_tool_writes() -> None:
    """Comments, units and ranges in the example come from the code (`make generated`)."""
    assert EXAMPLE.read_text(encoding="utf-8") == write_example_config.render()


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    """Order of precedence: flags, environment, file, defaults."""
    file = _file(tmp_path, "[gateway]\nport = 1001\nhost = '::1'\n[world]\nsize = 3\n")
    environment = {"LOCKSTEP_GATEWAY_PORT": "1002", "LOCKSTEP_WORLD_SIZE": "4", "HOME": "/x"}

    loaded = load_config(file, {"gateway.port": "1003", "model.path": None}, environment)

    assert loaded.gateway.port == 1003
    assert loaded.world.size == 4
    assert loaded.gateway.host == "::1"
    assert loaded.model.path == "demo"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[gateway]\nprot = 1\n", "gateway.prot"),
        ("[gatway]\nport = 1\n", "gatway"),
        ("[gateway]\nport = 0\n", "gateway.port"),
        ("[gateway]\nport = 70000\n", "gateway.port"),
        ("[gateway]\nport = 'http'\n", "gateway.port"),
        ("[gateway]\nkeepalive_s = 0.0\n", "gateway.keepalive_s"),
        ("[gateway]\nkeepalive_s = nan\n", "gateway.keepalive_s"),
        ("[gateway]\nkeepalive_s = inf\n", "gateway.keepalive_s"),
        ("[scheduler]\ndecode_stall_ms = 0.5\n", "scheduler.decode_stall_ms"),
        ("[world]\nsize = 1000\n", "world.size"),
        ("[world]\nbackend = 'mpi'\n", "world.backend"),
        ("[world]\nsize = [1]\n", "world.size"),
        ("[model]\npath = ''\n", "model.path"),
        ("[model]\ntrust_remote_code = 'perhaps'\n", "model.trust_remote_code"),
        ("[log]\nlevel = 'loud'\n", "log.level"),
        ("[gateway]\nallowed_hosts = ['http://a']\n", "gateway.allowed_hosts"),
        ("[gateway]\nallowed_hosts = 'a'\n", "gateway.allowed_hosts"),
        ("[gateway]\nallowed_origins = ['*']\n", "gateway.allowed_origins"),
        ("[gateway]\nallowed_origins = ['null']\n", "gateway.allowed_origins"),
        ("[gateway]\nallowed_origins = ['https://a/']\n", "gateway.allowed_origins"),
        ("world = 3\n", "world"),
        ("[world]\nsize = 2\nbackend = 'off'\n", "world.backend"),
        ("[world]\nsize = 2\nbackend = 'jaccl'\n", "world.jaccl_devices"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, text: str, names: str) -> None:
    """An unknown key, a value out of range, a wrong type, a contradiction: the error names it."""
    with pytest.raises(ConfigError) as refused:
        load_config(_file(tmp_path, text))

    assert names in str(refused.value)
    assert str(refused.value).endswith(".")


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ({"LOCKSTEP_GATEWAY_PROT": "1"}, "LOCKSTEP_GATEWAY_PROT"),
        ({"LOCKSTEP_GATEWAY_PORT": "http"}, "gateway.port"),
        ({"LOCKSTEP_WORLD_SIZE": "0"}, "world.size"),
    ],
)
def test_a_wrong_variable_is_named(environment: dict[str, str], names: str) -> None:
    """Variables are checked like keys; those of other programs are left alone."""
    with pytest.raises(ConfigError, match=names):
        load_config(environment=environment)


def test_variables_without_a_section_are_not_settings() -> None:
    """Lockstep's own plumbing in the environment is no setting."""
    assert load_config(environment={"LOCKSTEP_LIFELINE_FD": "7", "PATH": "/bin"}) == Config()


@pytest.mark.parametrize(
    ("content", "cause"), [(b"[gateway\n", "not valid TOML"), (b"\xff\xfe", "not valid TOML")]
)
def test_a_file_that_is_no_toml_is_refused(tmp_path: Path, content: bytes, cause: str) -> None:
    """A broken file is one sentence, not a traceback."""
    path = tmp_path / "broken.toml"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=cause):
        load_config(str(path))


def test_a_missing_file_is_named() -> None:
    """A file that does not exist is named with the reason."""
    with pytest.raises(ConfigError, match=r"nowhere\.toml: No such file"):
        load_config("nowhere.toml")


def test_what_follows_from_settings() -> None:
    """Folder, addresses, backend and model name have defaults that follow from other settings."""
    alone = load_config()
    pair = load_config(flags={"world.size": "2", "gateway.port": "9000"})
    named = load_config(flags={"model.path": "mlx-community/Qwen3-4B-4bit"})

    assert (alone.backend, pair.backend) == ("off", "ring")
    assert alone.run_dir != pair.run_dir
    assert pair.gateway_address == f"ipc://{pair.run_dir}/gateways.sock"
    assert alone.served_name == "lockstep-demo"
    assert named.served_name == "mlx-community/Qwen3-4B-4bit"


@pytest.mark.parametrize(
    ("path", "name"), [(".", "inner"), ("..", "outer"), ("../inner/", "inner")]
)
def test_a_folder_gives_its_name_however_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, name: str
) -> None:
    """A model is never served under an empty name."""
    folder = tmp_path / "outer" / "inner"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)

    assert load_config(flags={"model.path": path}).served_name == name


_STRANGERS = ["0.0.0.0", "::", "192.168.1.5", "example.com", "127.0.0.1.example.com"]


@pytest.mark.parametrize("host", _STRANGERS)
def test_an_address_that_others_reach_needs_api_keys(host: str) -> None:
    """Without API keys nothing is started for others; the sentence says how to make one."""
    with pytest.raises(ConfigError, match=r"gateway\.host .* API keys.*lockstep api-key new"):
        load_config(flags={"gateway.host": host})


@pytest.mark.parametrize("host", _STRANGERS)
def test_with_api_keys_any_address_will_do(host: str) -> None:
    """Keys in a file or in the environment open the door; an empty variable is none."""
    flags = {"gateway.host": host}

    assert load_config(flags={**flags, "gateway.api_keys_file": "keys"}).gateway.host == host
    named = load_config(flags=flags, environment={loading.API_KEYS_VARIABLE: "a=b"})
    assert named.gateway.host == host
    with pytest.raises(ConfigError):
        load_config(flags=flags, environment={loading.API_KEYS_VARIABLE: ""})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
def test_loopback_needs_no_keys(host: str) -> None:
    """What only this machine reaches stays as easy as it was."""
    assert load_config(flags={"gateway.host": host}).gateway.host == host


def test_lists_are_written_as_lists_or_with_commas(tmp_path: Path) -> None:
    """A list in the file, commas in the environment."""
    file = _file(tmp_path, "[gateway]\nallowed_hosts = ['a.example', 'b.example']\n")
    variables = {"LOCKSTEP_GATEWAY_ALLOWED_ORIGINS": "https://a.example,app://b"}

    loaded = load_config(file, environment=variables)

    assert loaded.gateway.allowed_hosts == ["a.example", "b.example"]
    assert loaded.gateway.allowed_origins == ["https://a.example", "app://b"]


def test_the_run_folder_is_private(tmp_path: Path) -> None:
    """The folder of the sockets is made, or made private, with mode 0700."""
    folder = tmp_path / "deep" / "run"
    folder.mkdir(parents=True, mode=0o755)
    loaded = load_config(flags={"paths.run_dir": str(folder)})

    assert loading.prepare_run_dir(loaded) == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_run_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    """A path below a file can be no folder; the error names it and the setting."""
    (tmp_path / "file").write_text("")
    loaded = load_config(flags={"paths.run_dir": str(tmp_path / "file" / "run")})

    with pytest.raises(ConfigError, match=r"file/run as paths\.run_dir"):
        loading.prepare_run_dir(loaded)


def _as_variable(value: object) -> str:
    if isinstance(value, list):
        return ",".join(value)
    return str(value).lower()


def test_every_setting_has_its_variable() -> None:
    """Each key can be set from the environment under the name that the example promises."""
    environment = {
        loading.environment_name(section, key): _as_variable(value)
        for section, values in msgspec.to_builtins(Config()).items()
        for key, value in values.items()
    }

    assert load_config(environment=environment) == Config()
