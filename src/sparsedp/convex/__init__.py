"""Estimation and optimisation with sparse rows and gradients ("Differentially Private Optimization with Sparse Gradients")."""

from sparsedp.convex.feasible import Box, FeasibleSet, L1Ball, L2Ball, WholeSpace
from sparsedp.convex.losses import Huber, Logistic, Loss, SmoothedHinge, Squared
from sparsedp.convex.mean import PrivateMean, Recovery, private_mean
from sparsedp.convex.minimiser import NotConvergedError
from sparsedp.convex.output import PrivateMinimiser, output_perturbation
from sparsedp.convex.projections import project
from sparsedp.convex.statement import ReleaseStatement

__all__ = [
    "Box",
    "FeasibleSet",
    "Huber",
    "L1Ball",
    "L2Ball",
    "Logistic",
    "Loss",
    "NotConvergedError",
    "PrivateMean",
    "PrivateMinimiser",
    "Recovery",
    "ReleaseStatement",
    "SmoothedHinge",
    "Squared",
    "WholeSpace",
    "output_perturbation",
    "private_mean",
    "project",
]
