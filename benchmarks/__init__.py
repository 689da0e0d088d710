"""What measures the library, and is not part of it: `speed`, by `python -m benchmarks`; and sweeps of the papers' experiments."""
