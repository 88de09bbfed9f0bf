"""The command line: click with lazy commands, setting flags and shell completion."""
