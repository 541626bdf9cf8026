"""The benchmarks of ``python -m benchmarks``: reading and writing, beside other libraries."""
