"""A device: its driver, kernels, worker, and the proof of its pixels."""
