"""Layers of any form, as mlx-lm computes them, whose decodes attend by kernels."""
