"""Attention by kernels: of heads, of latents, and where the rows of a forward are."""
