"""Model catalog of Codex: how Codex should use the served model. Owns its facts and its texts.

Codex asks `GET /v1/models?client_version=...` for it. Without a catalog it knows neither the
model's context nor that the model may write patches as text.
"""

from typing import Any

from services.gateway.endpoints.completion_service import CompletionService

CONTEXT_PERCENT = 90
"""Part of the context that Codex may fill before it makes a summary; the rest is for the answer."""
TOOL_OUTPUT_TOKENS = 10_000
"""Longest result of one tool that Codex sends in full."""

_LEVELS = (
    ("low", "Short reasoning"),
    ("medium", "Balanced reasoning"),
    ("high", "Long reasoning"),
)

INSTRUCTIONS = """\
You are a coding agent that works in a terminal on the user's computer. The user gives you a \
task in a code base; you do it with the tools that you have, and then report.

# How to work
- Keep going until the task is done. Ask the user only if you cannot find something out yourself.
- Look before you change: search with `rg` and read the files that matter. Do not guess names, \
paths or contents.
- Fix the cause, not the symptom, with the smallest change that does the task. Keep the style of \
the code around it. Leave unrelated code, names and bugs alone; mention such bugs in your \
report.
- Never undo or overwrite changes that you did not make. Do not commit or create branches unless \
the user asks for it.
- After a change, check it: run the tests, the build or the program, the narrowest check first. \
If something cannot be checked, say so.
- Read AGENTS.md files that apply to the files you change, and follow them. What the user says \
directly comes first.

# Tools
- Use the shell tool for commands. Give paths relative to the working folder, and do not print \
large files whole.
- Change files with `apply_patch` if you have it. A patch looks like this:

*** Begin Patch
*** Update File: path/to/file.py
@@ def name_of_the_place():
 a line that stays
-a line that goes
+a line that comes
*** Add File: path/to/new.txt
+every line of a new file begins with a plus
*** Delete File: path/to/old.txt
*** End Patch

  Give about three unchanged lines before and after each change, exactly as they are in the \
file. Send the patch alone, without quotes or code fences around it.
- For a task of several steps keep a plan with `update_plan` if you have it: one step in \
progress at a time.
- Commands may need the user's approval or may be limited by a sandbox, as the environment \
describes. If a command fails because of that, ask for approval or choose another way.
- A call uses the exact name and the arguments of the tool's description. Tools that are not \
described do not exist.

# Answers
- Before a group of calls, say in one short sentence what you are about to do.
- At the end report briefly: the change, where it is (`path/to/file.py:12`), how you checked it, \
and what is left. Do not repeat whole files that you have written.
- Write plain Markdown: short paragraphs, lists where they help, code and paths in backticks.
"""
"""Base instructions, which Codex sends as the model's own; a catalog must have some."""


def entries(service: CompletionService) -> list[dict[str, Any]]:
    """Return one entry for each name of the served model."""
    return [_entry(service, name, place) for place, name in enumerate(service.model_names.listed)]


def _entry(service: CompletionService, name: str, place: int) -> dict[str, Any]:
    context = service.status.context_tokens_max or None
    return {
        "slug": name,
        "display_name": name,
        "description": "Served by Lockstep.",
        "default_reasoning_level": "medium",
        "supported_reasoning_levels": [
            {"effort": effort, "description": text} for effort, text in _LEVELS
        ],
        "shell_type": "unified_exec",
        "visibility": "list",
        "supported_in_api": True,
        "priority": place,
        "availability_nux": None,
        "upgrade": None,
        "base_instructions": INSTRUCTIONS,
        "supports_reasoning_summaries": True,
        "default_reasoning_summary": "auto",
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": "freeform",
        "web_search_tool_type": "text",
        "truncation_policy": {"mode": "tokens", "limit": TOOL_OUTPUT_TOKENS},
        "supports_parallel_tool_calls": True,
        "supports_image_detail_original": False,
        "context_window": context,
        "max_context_window": context,
        "auto_compact_token_limit": None,
        "effective_context_window_percent": CONTEXT_PERCENT,
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
        "supports_search_tool": False,
        "use_responses_lite": False,
    }
