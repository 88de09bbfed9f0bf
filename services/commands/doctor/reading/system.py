"""Versions of the operating system: `sw_vers`, and what Linux calls itself."""

import re


def read_sw_vers(text: str) -> tuple[str, str] | None:
    """Return (product version, build) of macOS, from `sw_vers`."""
    fields = {
        key.strip(): value.strip()
        for key, _, value in (line.partition(":") for line in text.splitlines())
    }
    version, build = fields.get("ProductVersion", ""), fields.get("BuildVersion", "")
    return (version, build) if re.fullmatch(r"\d{1,3}(\.\d{1,3}){0,3}", version) else None


def version_numbers(version: str) -> tuple[int, ...]:
    """Return 26.2 as (26, 2); what is no number ends it."""
    numbers = []
    for part in version.split("."):
        match = re.match(r"\d{1,6}", part)
        if match is None:
            break
        numbers.append(int(match[0]))
    return tuple(numbers)


def read_os_release(text: str) -> str:
    """Return the pretty name of a Linux distribution; "": it has none."""
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "PRETTY_NAME":
            return value.strip().strip("\"'")[:100]
    return ""
