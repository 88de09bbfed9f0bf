"""Parsers of system commands' output. Pure; malformed output gives no facts and no error."""
