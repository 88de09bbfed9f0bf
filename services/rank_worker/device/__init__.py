"""The device of a rank, and the settings of MLX and the system that it needs."""
