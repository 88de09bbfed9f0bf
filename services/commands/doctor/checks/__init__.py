"""Checks of one host. Each adds findings from facts or from output of system commands."""
