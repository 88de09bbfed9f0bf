"""The flags of `lockstep plan`; reading them loads nothing else."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `lockstep plan` its flags."""
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings for every role")
    parser.add_argument("--inventory", metavar="FILE", help="TOML file of several hosts")
    parser.add_argument("--model", metavar="PATH_OR_HF_ID", help="a folder, a downloaded id, demo")
    parser.add_argument("--draft-model", metavar="PATH_OR_HF_ID", help="every rank runs it whole")
    parser.add_argument(
        "--memory", metavar="SIZES", help="of each host, like 512GB,192GB (default: this machine)"
    )
    parser.add_argument(
        "--usable", metavar="PART", type=float, help="part of it that a GPU may use, 0 to 1"
    )
    parser.add_argument("--ranks", metavar="N", type=int, help="with one size: so many such hosts")
    parser.add_argument(
        "--device",
        choices=("metal", "cuda", "cpu"),
        help="what ranks compute on (default: metal with --memory, else as here)",
    )
    parser.add_argument("--context", metavar="TOKENS", type=int, help="length that is to fit")
    parser.add_argument("--sequences", metavar="N", type=int, help="so many at once")
    parser.add_argument("--kv-bits", choices=("0", "4", "8"), help="how KV is kept")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
