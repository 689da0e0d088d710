"""Benchmarks behind `sparsedp bench`: always ratios of interleaved repeats in one run."""
