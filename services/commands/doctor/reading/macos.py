"""Parsers of commands of macOS: version, memory, energy, interfaces, ports. Pure."""

import dataclasses
import re

_PAGE = re.compile(r"page size of (\d{1,9}) bytes")
_WIRED = re.compile(r"^Pages wired down:\s+(\d{1,15})\.?", re.MULTILINE)
_FREE = re.compile(r"free percentage:\s*(\d{1,3})\s*%")
_ENERGY = re.compile(r"^\s*([A-Za-z]\w*)\s+(\d{1,6})\b(.*)$")
_INTERFACE = re.compile(r"^([A-Za-z][\w.]*): flags=\w+<([^>]*)>")


@dataclasses.dataclass(frozen=True, slots=True)
class Interface:
    """One network interface, as `ifconfig` shows it."""

    name: str
    addresses: tuple[str, ...] = ()
    """IPv4 addresses."""
    members: tuple[str, ...] = ()
    """Names of the interfaces in it, if it is a bridge."""
    up: bool = False
    """Whether it is switched on."""


def read_sw_vers(text: str) -> tuple[str, str] | None:
    """Return (product version, build) from `sw_vers`, or None."""
    fields = {
        key.strip(): value.strip()
        for key, _, value in (line.partition(":") for line in text.splitlines())
    }
    version, build = fields.get("ProductVersion", ""), fields.get("BuildVersion", "")
    return (version, build) if re.fullmatch(r"\d{1,3}(\.\d{1,3}){0,3}", version) else None


def version_numbers(version: str) -> tuple[int, ...]:
    """Split a version into its numbers, "26.2" into (26, 2), up to a part that is no number."""
    numbers = []
    for part in version.split("."):
        match = re.match(r"\d{1,6}", part)
        if match is None:
            break
        numbers.append(int(match[0]))
    return tuple(numbers)


def read_wired(text: str) -> int | None:
    """Return the bytes of wired memory from the output of `vm_stat`; None: not found."""
    page, wired = _PAGE.search(text), _WIRED.search(text)
    return int(page[1]) * int(wired[1]) if page and wired else None


def read_free_share(text: str) -> float | None:
    """Return the free share of memory, 0 to 1, from `memory_pressure -Q`, or None."""
    match = _FREE.search(text)
    return min(1.0, int(match[1]) / 100) if match else None


def read_number(text: str) -> int | None:
    """Return the number that `sysctl -n` prints, or None."""
    word = text.strip()
    return int(word) if word.isascii() and word.isdecimal() and len(word) < 20 else None


def read_power(text: str) -> dict[str, int]:
    """Parse the output of `pmset -g`: name of the energy setting -> value; {} without settings."""
    return {match[1]: int(match[2]) for match in map(_ENERGY.match, text.splitlines()) if match}


def read_interfaces(text: str) -> dict[str, Interface]:
    """Parse the output of `ifconfig -a`: name of the interface -> interface."""
    found: dict[str, Interface] = {}
    name = ""
    for line in text.splitlines():
        head = _INTERFACE.match(line)
        if head:
            name = head[1]
            found[name] = Interface(name, up="UP" in head[2].split(","))
            continue
        words = line.split()
        if not name or len(words) < 2:
            continue
        one = found[name]
        if words[0] == "inet":
            found[name] = dataclasses.replace(one, addresses=(*one.addresses, words[1]))
        elif words[0] == "member:":
            found[name] = dataclasses.replace(one, members=(*one.members, words[1]))
    return found


def read_lsof(text: str) -> list[tuple[str, int]]:
    """Parse the output of `lsof -Fpc`: (command, process id) of each listening process."""
    found: list[tuple[str, int]] = []
    pid = 0
    for line in text.splitlines():
        if line[:1] == "p" and line[1:].isascii() and line[1:11].isdecimal():
            pid = int(line[1:11])
        elif line[:1] == "c" and pid:
            found.append((line[1:65], pid))
            pid = 0
    return found
