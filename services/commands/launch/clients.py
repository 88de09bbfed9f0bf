"""Configurations of coding agents and chat clients. Owns which variables and files each one reads.

Every client gets the URL, the key and the model's name. As far as it has settings for them, it also
gets the context, the longest answer, and timeouts that outlast the prefill of a long prompt.
Nothing else of the user's configuration changes.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.commands.launch.served_model import ServedModel
from services.commands.launch.setup import KEY_VARIABLE, ClientSetup

IDLE_S = 1_800
"""Longest silence that clients accept, in seconds; Claude Code accepts no longer one. Lockstep
sends something every few seconds, but a proxy may hold it back."""

NO_KEY = "none"
"""Key for a server without keys: most clients do not start without one."""

WEBUI_PORT = 3_000
"""Port of Open WebUI, whose own default is the gateway's."""

MakeSetup = Callable[[ServedModel, Path], ClientSetup]


def claude(model: ServedModel, _folder: Path) -> ClientSetup:
    """Return the configuration of Claude Code."""
    aliases = ("OPUS", "SONNET", "HAIKU", "FABLE")
    idle_ms = str(IDLE_S * 1_000)
    return ClientSetup(
        title="Claude Code",
        program="claude",
        install="npm install -g @anthropic-ai/claude-code",
        variables={
            "ANTHROPIC_BASE_URL": model.url,
            "ANTHROPIC_AUTH_TOKEN": model.key or NO_KEY,
            # A key of Anthropic's would be sent too, and takes the place of the token.
            "ANTHROPIC_API_KEY": "",
            "ANTHROPIC_MODEL": model.name,
            **{f"ANTHROPIC_DEFAULT_{alias}_MODEL": model.name for alias in aliases},
            "CLAUDE_CODE_SUBAGENT_MODEL": model.name,
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(model.context_tokens),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(model.output_tokens),
            "API_TIMEOUT_MS": idle_ms,
            "CLAUDE_STREAM_IDLE_TIMEOUT_MS": idle_ms,
            "CLAUDE_BYTE_STREAM_IDLE_TIMEOUT_MS": idle_ms,
        },
    )


def codex(model: ServedModel, folder: Path) -> ClientSetup:
    """Return the configuration of Codex."""
    provider = {
        "name": "Lockstep",
        "base_url": f"{model.url}/v1",
        "wire_api": "responses",
        "stream_idle_timeout_ms": IDLE_S * 1_000,
        **({"env_key": KEY_VARIABLE} if model.key else {}),
    }
    catalog = "codex-models.json"
    settings = {
        "model": model.name,
        "model_provider": "lockstep",
        "model_context_window": model.context_tokens,
        "model_catalog_json": str(folder / catalog),
        # A search of OpenAI's servers.
        "web_search": "disabled",
        **{f"model_providers.lockstep.{name}": value for name, value in provider.items()},
    }
    return ClientSetup(
        title="Codex",
        program="codex",
        install="npm install -g @openai/codex",
        # JSON's texts and numbers are TOML's too.
        arguments=[
            word
            for name, value in settings.items()
            for word in ("-c", f"{name}={json.dumps(value, ensure_ascii=False)}")
        ],
        variables={KEY_VARIABLE: model.key} if model.key else {},
        files={catalog: _json(model.codex_catalog)},
    )


def opencode(model: ServedModel, folder: Path) -> ClientSetup:
    """Return the configuration of opencode."""
    limits = {"context": model.context_tokens, "output": model.output_tokens}
    described = {"name": model.name, "tool_call": True, "reasoning": True, "limit": limits}
    config = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"lockstep/{model.name}",
        "small_model": f"lockstep/{model.name}",
        "provider": {
            "lockstep": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Lockstep",
                "options": {
                    "baseURL": f"{model.url}/v1",
                    "apiKey": f"{{env:{KEY_VARIABLE}}}",
                    "timeout": IDLE_S * 1_000,
                },
                "models": {model.name: described},
            }
        },
    }
    name = "opencode.json"
    return ClientSetup(
        title="opencode",
        program="opencode",
        install="npm install -g opencode-ai",
        variables={
            "OPENCODE_CONFIG": str(folder / name),
            KEY_VARIABLE: model.key or NO_KEY,
        },
        files={name: _json(config)},
    )


def cline(model: ServedModel, folder: Path) -> ClientSetup:
    """Return the configuration of the Cline CLI."""
    provider = "openai-compatible"
    settings = {
        "provider": provider,
        "model": model.name,
        "baseUrl": f"{model.url}/v1",
        "contextWindow": model.context_tokens,
        "maxTokens": model.output_tokens,
        "timeout": IDLE_S * 1_000,
    }
    entry = {
        "settings": settings,
        "updatedAt": "2026-01-01T00:00:00.000Z",
        "tokenSource": "manual",
    }
    name = "cline-providers.json"
    return ClientSetup(
        title="Cline",
        program="cline",
        install="npm install -g cline",
        arguments=["--provider", provider, "--model", model.name],
        variables={
            "CLINE_PROVIDER_SETTINGS_PATH": str(folder / name),
            "OPENAI_API_KEY": model.key or NO_KEY,
        },
        files={
            name: _json(
                {
                    "version": 1,
                    "lastUsedProvider": provider,
                    "modes": {},
                    "providers": {provider: entry},
                }
            )
        },
    )


def continue_cli(model: ServedModel, folder: Path) -> ClientSetup:
    """Return the configuration of Continue's CLI."""
    described = {
        "name": model.name,
        "provider": "openai",
        "model": model.name,
        "apiBase": f"{model.url}/v1",
        "apiKey": f"${{{{ secrets.{KEY_VARIABLE} }}}}",
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use"],
        "defaultCompletionOptions": {
            "contextLength": model.context_tokens,
            "maxTokens": model.output_tokens,
        },
        # Milliseconds until headers come; Continue also takes them as seconds between bytes.
        "requestOptions": {"timeout": IDLE_S * 1_000},
    }
    name = "continue.yaml"
    return ClientSetup(
        title="Continue",
        program="cn",
        install="npm install -g @continuedev/cli",
        arguments=["--config", str(folder / name)],
        variables={KEY_VARIABLE: model.key or NO_KEY},
        # JSON is YAML too.
        files={
            name: _json(
                {
                    "name": "Lockstep",
                    "version": "1.0.0",
                    "schema": "v1",
                    "models": [described],
                }
            )
        },
    )


def aider(model: ServedModel, folder: Path) -> ClientSetup:
    """Return the configuration of aider."""
    name = f"openai/{model.name}"
    facts = {
        "max_tokens": model.output_tokens,
        "max_input_tokens": model.context_tokens,
        "max_output_tokens": model.output_tokens,
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
        "litellm_provider": "openai",
        "mode": "chat",
    }
    file = "aider-models.json"
    return ClientSetup(
        title="aider",
        program="aider",
        install="python -m pip install aider-chat",
        variables={
            "OPENAI_API_BASE": f"{model.url}/v1",
            "OPENAI_API_KEY": model.key or NO_KEY,
            "AIDER_MODEL": name,
            "AIDER_WEAK_MODEL": name,
            "AIDER_MODEL_METADATA_FILE": str(folder / file),
            "AIDER_TIMEOUT": str(IDLE_S),
        },
        files={file: _json({name: facts})},
    )


def open_webui(model: ServedModel, _folder: Path) -> ClientSetup:
    """Return the configuration of Open WebUI."""
    return ClientSetup(
        title="Open WebUI",
        program="open-webui",
        install="python -m pip install open-webui",
        arguments=["serve", "--port", str(WEBUI_PORT)],
        variables={
            "OPENAI_API_BASE_URL": f"{model.url}/v1",
            "OPENAI_API_KEY": model.key or NO_KEY,
            "DEFAULT_MODELS": model.name,
            "TASK_MODEL_EXTERNAL": model.name,
            "ENABLE_OLLAMA_API": "false",
            "AIOHTTP_CLIENT_TIMEOUT": str(IDLE_S),
            # Otherwise these variables count at the very first start only.
            "ENABLE_PERSISTENT_CONFIG": "false",
        },
    )


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


CLIENTS: dict[str, MakeSetup] = {
    "claude": claude,
    "codex": codex,
    "opencode": opencode,
    "cline": cline,
    "continue": continue_cli,
    "aider": aider,
    "open-webui": open_webui,
}
"""Name on the command line -> what makes the configuration from the model and the folder of its
files."""
