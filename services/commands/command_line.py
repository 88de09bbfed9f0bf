"""A command line whose words end like all others: one sentence, our exit codes."""

import argparse
import sys
from typing import Any, NoReturn

from shared.errors import UsageError
from shared.os.standard_streams import print_line


class Parser(argparse.ArgumentParser):
    """argparse's, but what is wrong is an error of ours, and lost output is one too."""

    def error(self, message: str) -> NoReturn:
        """Refuse a command line as every other error: one sentence, our exit code."""
        raise UsageError(f"{message[:1].upper()}{message[1:]}. See `{self.prog} --help`.")

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse passes over what cannot be written, and the exit code would be 0.
        if message and file in (None, sys.stdout):
            print_line(message.removesuffix("\n"))
        else:
            super()._print_message(message, file)
