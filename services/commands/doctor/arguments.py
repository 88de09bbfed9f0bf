"""The flags of `lockstep doctor`; reading them loads nothing else."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `lockstep doctor` its flags."""
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings for every role")
    parser.add_argument("--inventory", metavar="FILE", help="TOML file of several hosts: all")
    parser.add_argument("--host", metavar="H", help="with --inventory: which host this is")
    parser.add_argument("--alone", action="store_true", help="examine this host only")
    parser.add_argument(
        "--remote",
        metavar="COMMAND",
        help="how another host is asked; {ssh}, {name}, {address}, {executable} and {inventory} "
        "are filled in (default: ssh)",
    )
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=120.0, help="for each host's answer"
    )
    parser.add_argument("--json", action="store_true", help="as one JSON object")
