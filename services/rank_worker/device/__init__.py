"""The device of a rank, and the settings of MLX and the operating system for it."""
