"""The benchmarks of the command ``wsigpu bench``; imported only by it and by ``benchmarks/``."""
