"""Every case of the matrix, package by package."""

from model_matrix import hf

CASES = [*hf.CASES]
