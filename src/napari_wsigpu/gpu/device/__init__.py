"""A CUDA device: its driver, kernels and worker, and the verification of its pixels."""
