"""Structured log of every process: its lines, their text form, and the files that keep them."""

from shared.log.logger import Log as Log
from shared.log.logger import bind as bind
from shared.log.logger import report as report
from shared.log.logger import set_up as set_up
