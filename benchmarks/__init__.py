"""Benchmarks of napari-wsigpu, run from its checkout: ``python -m benchmarks`` and others."""
