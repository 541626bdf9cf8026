"""Turn regions into pixels: plans, the executor and its backends, caches, levels and batches."""
