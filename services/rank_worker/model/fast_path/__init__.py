"""The fast path: forwards in fewer operations than mlx-lm's code.

Layers of a known form are computed by our own code, in those of any other form kernels attend.
mlx-lm's modules stay as they are and keep the weights; the fast path reads them, and is proven
equal to mlx-lm's code before it serves.
"""
