"""Kernels of ours for CUDA, compiled here where MLX finds them, at this start and at later ones."""
