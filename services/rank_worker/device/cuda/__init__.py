"""What only NVIDIA GPUs have: the driver, variables of MLX for CUDA, and kernels kept on disk."""
