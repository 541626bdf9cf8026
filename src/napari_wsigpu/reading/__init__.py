"""From regions to pixels: plans, what carries them out, caches, levels and batches."""
