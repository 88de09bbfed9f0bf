"""What commands of macOS and Linux say, as facts. Pure; what is broken is no answer, no error."""
