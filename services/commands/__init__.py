"""The operator's commands: the command line, and the tools that look at a system from outside."""
