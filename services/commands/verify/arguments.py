"""The command line of `lockstep verify`. Light: every command of Lockstep reads it."""

import argparse

KEY_VARIABLE = "LOCKSTEP_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `lockstep verify` its own flags."""
    parser.add_argument("--json", action="store_true", help="as one JSON object, at the end")
    parser.add_argument(
        "--api-key", metavar="KEY", default="", help=f"of this server (default: {KEY_VARIABLE})"
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="restart the ranks once, to run the canary anew and to see blocks restored from SSD: "
        "streams pause",
    )
    parser.add_argument(
        "--fast-synch",
        action="store_true",
        help="also tell whether Metal's fast synchronization is proven on this host",
    )
    parser.add_argument(
        "--shutdown",
        action="store_true",
        help="at the end stop `lockstep up` on this host, which ends the service",
    )
