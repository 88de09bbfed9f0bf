"""Loading of the configuration from file, environment and flags."""

import socket
import stat
import tomllib
from pathlib import Path
from typing import Any

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


def test_example_config_file_has_every_setting_with_its_default() -> None:
    """The example file contains all settings and loads to the defaults."""
    tree = tomllib.loads(EXAMPLE.read_text(encoding="utf-8"))

    assert load_config(str(EXAMPLE)) == Config()
    assert tree == msgspec.to_builtins(Config())


def test_example_config_file_equals_output_generated_from_code() -> None:
    """Comments, units and ranges in the example come from the code (`make generated`)."""
    assert EXAMPLE.read_text(encoding="utf-8") == write_example_config.render()


def test_flag_overrides_environment_variable_which_overrides_config_file(tmp_path: Path) -> None:
    """The order of precedence is flags, environment, file, defaults."""
    file = _file(tmp_path, "[gateway]\nport = 1001\nhost = '::1'\n[world]\nsize = 3\n")
    environment = {"LOCKSTEP_GATEWAY_PORT": "1002", "LOCKSTEP_WORLD_SIZE": "4", "HOME": "/x"}

    loaded = load_config(file, {"gateway.port": "1003", "model.path": None}, environment)

    assert loaded.gateway.port == 1003
    assert loaded.world.size == 4
    assert loaded.gateway.host == "::1"
    assert loaded.model.path == "demo"


@pytest.mark.parametrize(
    ("text", "setting"),
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
def test_invalid_setting_is_refused_with_its_name(tmp_path: Path, text: str, setting: str) -> None:
    """An unknown key, a wrong value or type, or a contradiction gives an error with the setting."""
    with pytest.raises(ConfigError) as refused:
        load_config(_file(tmp_path, text))

    assert setting in str(refused.value)
    assert str(refused.value).endswith(".")


@pytest.mark.parametrize(
    ("environment", "setting"),
    [
        ({"LOCKSTEP_GATEWAY_PROT": "1"}, "LOCKSTEP_GATEWAY_PROT"),
        ({"LOCKSTEP_GATEWAY_PORT": "http"}, "gateway.port"),
        ({"LOCKSTEP_WORLD_SIZE": "0"}, "world.size"),
    ],
)
def test_invalid_environment_variable_is_refused_with_its_name(
    environment: dict[str, str], setting: str
) -> None:
    """Variables are checked as keys are."""
    with pytest.raises(ConfigError, match=setting):
        load_config(environment=environment)


def test_environment_variables_that_name_no_setting_are_ignored() -> None:
    """Internal variables of Lockstep and those of other programs are ignored."""
    assert load_config(environment={"LOCKSTEP_LIFELINE_FD": "7", "PATH": "/bin"}) == Config()


@pytest.mark.parametrize(
    ("content", "cause"), [(b"[gateway\n", "not valid TOML"), (b"\xff\xfe", "not valid TOML")]
)
def test_config_file_with_invalid_toml_raises_one_sentence_error(
    tmp_path: Path, content: bytes, cause: str
) -> None:
    """The error is one sentence, not a traceback."""
    path = tmp_path / "broken.toml"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=cause):
        load_config(str(path))


def test_missing_config_file_error_names_file_and_reason() -> None:
    """The error names the file and the reason."""
    with pytest.raises(ConfigError, match=r"nowhere\.toml: No such file"):
        load_config("nowhere.toml")


def test_defaults_of_backend_addresses_and_model_name_change_with_ranks_port_and_model() -> None:
    """The run folder, the addresses, the backend and the model name depend on ranks, port and
    model."""
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
def test_served_model_name_is_last_folder_of_model_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, name: str
) -> None:
    """A relative path to a model never gives an empty served name."""
    folder = tmp_path / "outer" / "inner"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)

    assert load_config(flags={"model.path": path}).served_name == name


_PUBLIC_HOSTS = ["0.0.0.0", "::", "192.168.1.5", "example.com", "127.0.0.1.example.com"]


def _resolved(host: str, *_: object, **__: object) -> list[Any]:
    """Resolve names below example.com to an address, `home` to a loopback address, others never."""
    if host == "home":
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    if host.endswith("example.com"):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))]
    if host[0].isdigit() or ":" in host:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0))]
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@pytest.mark.parametrize("host", _PUBLIC_HOSTS)
def test_config_is_refused_when_public_gateway_host_has_no_api_keys(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says how to create an API key."""
    monkeypatch.setattr(socket, "getaddrinfo", _resolved)
    with pytest.raises(ConfigError, match=r"gateway\.host .* API keys.*lockstep api-key new"):
        load_config(flags={"gateway.host": host})


@pytest.mark.parametrize("host", _PUBLIC_HOSTS)
def test_config_is_accepted_when_public_gateway_host_has_api_keys(host: str) -> None:
    """Keys may be in a file or in the environment; an empty variable does not count."""
    flags = {"gateway.host": host}

    assert load_config(flags={**flags, "gateway.api_keys_file": "keys"}).gateway.host == host
    named = load_config(flags=flags, environment={loading.API_KEYS_VARIABLE: "a=b"})
    assert named.gateway.host == host
    with pytest.raises(ConfigError):
        load_config(flags=flags, environment={loading.API_KEYS_VARIABLE: ""})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
def test_config_without_api_keys_is_accepted_when_gateway_host_is_loopback(host: str) -> None:
    """An address that only this machine reaches needs no API keys."""
    assert load_config(flags={"gateway.host": host}).gateway.host == host


def test_gateway_host_that_does_not_resolve_is_reported_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A misspelt name is no address that other machines can reach; one of loopback is accepted."""
    monkeypatch.setattr(socket, "getaddrinfo", _resolved)
    with pytest.raises(ConfigError, match=r"gateway\.host is loclhost, .* does not resolve"):
        load_config(flags={"gateway.host": "loclhost"})
    assert load_config(flags={"gateway.host": "home"}).gateway.host == "home"


def test_gateway_host_that_no_name_can_be_is_a_sentence() -> None:
    """A label of more than 63 characters cannot even be asked for."""
    with pytest.raises(ConfigError, match="does not resolve"):
        load_config(flags={"gateway.host": "a" * 255})


def test_list_setting_is_comma_separated_in_environment(tmp_path: Path) -> None:
    """A list is a TOML list in the file and comma-separated in the environment."""
    file = _file(tmp_path, "[gateway]\nallowed_hosts = ['a.example', 'b.example']\n")
    variables = {"LOCKSTEP_GATEWAY_ALLOWED_ORIGINS": "https://a.example,app://b"}

    loaded = load_config(file, environment=variables)

    assert loaded.gateway.allowed_hosts == ["a.example", "b.example"]
    assert loaded.gateway.allowed_origins == ["https://a.example", "app://b"]


def test_run_folder_is_created_with_mode_0700(tmp_path: Path) -> None:
    """The folder and its missing parents are created, accessible to this user only."""
    folder = tmp_path / "deep" / "run"
    loaded = load_config(flags={"paths.run_dir": str(folder)})

    assert loading.prepare_run_dir(loaded) == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_run_folder_with_too_long_path_for_sockets_is_refused(tmp_path: Path) -> None:
    """The error comes before any process starts, and names the socket and the setting."""
    loaded = load_config(flags={"paths.run_dir": str(tmp_path / ("long" * 30))})

    with pytest.raises(ConfigError, match=r"gateways\.sock is longer .* set paths\.run_dir"):
        loading.prepare_run_dir(loaded)


def test_error_names_setting_when_run_folder_cannot_be_created(tmp_path: Path) -> None:
    """A path below a file cannot be a folder; the error names the path and the setting."""
    (tmp_path / "file").write_text("")
    loaded = load_config(flags={"paths.run_dir": str(tmp_path / "file" / "run")})

    with pytest.raises(ConfigError, match=r"file/run as paths\.run_dir"):
        loading.prepare_run_dir(loaded)


def _as_variable(value: object) -> str:
    if isinstance(value, list):
        return ",".join(value)
    return str(value).lower()


def test_every_setting_can_be_set_by_its_environment_variable() -> None:
    """Every key has an environment variable of the documented name."""
    environment = {
        loading.environment_name(section, key): _as_variable(value)
        for section, values in msgspec.to_builtins(Config()).items()
        for key, value in values.items()
    }

    assert load_config(environment=environment) == Config()


def test_environment_variable_of_a_list_is_separated_by_commas() -> None:
    """Aliases of the model are such a list, which has a limit of its length."""
    environment = {"LOCKSTEP_MODEL_ALIASES": "claude-*,gpt-5"}

    assert load_config(environment=environment).model.aliases == ["claude-*", "gpt-5"]
