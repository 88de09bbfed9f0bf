"""The fast path: this project's own forward of decoder layers of a known form.

mlx-lm's modules stay as they are and keep the weights; the fast path reads them, and is proven
equal to mlx-lm's code before it serves.
"""
