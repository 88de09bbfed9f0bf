"""Lockstep's own CUDA kernels, kept on disk.

A rank compiles them into the folder where MLX looks for compiled kernels, so that later starts
compile none.
"""
