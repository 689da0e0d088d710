"""Estimation and optimisation with sparse rows and gradients ("Differentially Private Optimization with Sparse Gradients")."""

from sparsedp.convex.feasible import Box, FeasibleSet, L1Ball, L2Ball, WholeSpace
from sparsedp.convex.projections import project
from sparsedp.convex.statement import ReleaseStatement

__all__ = ["Box", "FeasibleSet", "L1Ball", "L2Ball", "ReleaseStatement", "WholeSpace", "project"]
