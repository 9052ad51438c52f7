"""What CUDA's kernels make and save, for planning on a GPU that is not in this computer: the CPU's fake tensors, led through CUDA's operations."""
