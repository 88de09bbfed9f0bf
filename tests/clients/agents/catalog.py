"""Coding agents: how each is started, and the tools by which it reads, edits and runs.

Owns what differs between clients; their configuration is that of `lockstep launch`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.clients.model.script import Call

Words = Callable[[str], Sequence[str]]
"""Returns the words of a command line for a message of the user."""


@dataclass(frozen=True)
class Tools:
    """A client's calls for what agents do."""

    read: Callable[[Path], Call]
    edit: Callable[[Path, str, str], Call]
    """Puts one text in the place of another."""
    run: Callable[[str], Call]


@dataclass(frozen=True)
class Agent:
    """A client that works with files and commands."""

    name: str
    """What `lockstep launch` calls it."""
    program: str
    """Its console command."""
    binaries: Sequence[str]
    """Where its package has the program, as patterns; the first that is found is taken."""
    begin: Words
    """Starts a session with a message."""
    go_on: Words
    """Sends one more message in the last session."""
    tools: Tools | None = None
    """None: it has no tools and reads changes of files from the model's text."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables beside those of `lockstep launch`."""


def _patch(path: Path, old: str, new: str) -> Call:
    lines = ["*** Begin Patch", f"*** Update File: {path.name}", "@@", f"-{old}", f"+{new}"]
    return Call("apply_patch", {"input": "\n".join([*lines, "*** End Patch"])})


CLAUDE = Agent(
    name="claude",
    program="claude",
    binaries=("node_modules/@anthropic-ai/claude-code-*/claude",),
    begin=lambda text: ("-p", text, "--allowedTools", "Read,Edit,Bash"),
    go_on=lambda text: ("-c", "-p", text, "--allowedTools", "Read,Edit,Bash"),
    tools=Tools(
        read=lambda path: Call("Read", {"file_path": str(path)}),
        edit=lambda path, old, new: Call(
            "Edit", {"file_path": str(path), "old_string": old, "new_string": new}
        ),
        run=lambda line: Call("Bash", {"command": line, "description": "Look at the file"}),
    ),
    variables={"DISABLE_AUTOUPDATER": "1", "DISABLE_TELEMETRY": "1"},
)
_CODEX_OPTIONS = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
CODEX = Agent(
    name="codex",
    program="codex",
    binaries=("node_modules/.bin/codex",),
    begin=lambda text: ("exec", *_CODEX_OPTIONS, text),
    go_on=lambda text: ("exec", "resume", "--last", *_CODEX_OPTIONS, text),
    tools=Tools(
        read=lambda path: Call("exec_command", {"cmd": f"cat {path}"}),
        edit=_patch,
        run=lambda line: Call("exec_command", {"cmd": line}),
    ),
)
OPENCODE = Agent(
    name="opencode",
    program="opencode",
    binaries=("node_modules/opencode-*-baseline/bin/*", "node_modules/opencode-*-*/bin/*"),
    begin=lambda text: ("run", "--auto", text),
    go_on=lambda text: ("run", "--auto", "--continue", text),
    tools=Tools(
        read=lambda path: Call("read", {"filePath": str(path)}),
        edit=lambda path, old, new: Call(
            "edit", {"filePath": str(path), "oldString": old, "newString": new}
        ),
        run=lambda line: Call("bash", {"command": line, "description": "Looks at the file"}),
    ),
    variables={"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
)
CLINE = Agent(
    name="cline",
    program="cline",
    binaries=("node_modules/.bin/cline",),
    begin=lambda text: (text,),
    # Without a terminal it resumes no session: this is a new one with the same instructions.
    go_on=lambda text: (text,),
    tools=Tools(
        read=lambda path: Call("read_files", {"file_paths": [str(path)]}),
        edit=lambda path, old, new: Call(
            "editor",
            {"command": "str_replace", "path": str(path), "old_text": old, "new_text": new},
        ),
        run=lambda line: Call("run_commands", {"commands": [line]}),
    ),
)
CONTINUE = Agent(
    name="continue",
    program="cn",
    binaries=("node_modules/.bin/cn",),
    begin=lambda text: ("--auto", "-p", text),
    go_on=lambda text: ("--auto", "--resume", "-p", text),
    tools=Tools(
        read=lambda path: Call("Read", {"filepath": str(path)}),
        edit=lambda path, old, new: Call(
            "Edit", {"file_path": str(path), "old_string": old, "new_string": new}
        ),
        run=lambda line: Call("Bash", {"command": line}),
    ),
    variables={"CONTINUE_TELEMETRY_ENABLED": "0"},
)

_AIDER_OPTIONS = (
    *("--yes-always", "--no-git", "--no-check-update", "--no-show-release-notes"),
    *("--analytics-disable", "--no-detect-urls", "--no-pretty", "--edit-format", "diff"),
    # It shows the model what a failing command prints.
    *("--auto-test", "--test-cmd", "tr a-z A-Z < fruit.txt; exit 1", "fruit.txt"),
)
AIDER = Agent(
    name="aider",
    program="aider",
    binaries=("python/bin/aider",),
    begin=lambda text: ("--message", text, *_AIDER_OPTIONS),
    go_on=lambda text: ("--restore-chat-history", "--message", text, *_AIDER_OPTIONS),
)

AGENTS = (AIDER, CLAUDE, CODEX, OPENCODE, CLINE, CONTINUE)
