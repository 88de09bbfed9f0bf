"""One folder per process, plus the console script that starts them."""
