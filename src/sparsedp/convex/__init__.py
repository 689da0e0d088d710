"""Estimation and optimisation with sparse rows and gradients ("Differentially Private Optimization with Sparse Gradients")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparsedp.convex.bias_reduced import BiasReducedResult, BiasReducedSGD, function_gradients, linear_gradients
from sparsedp.convex.boosting import boost
from sparsedp.convex.feasible import Box, FeasibleSet, L1Ball, L2Ball, WholeSpace
from sparsedp.convex.losses import Huber, Logistic, Loss, SmoothedHinge, Squared
from sparsedp.convex.mean import PrivateMean, Recovery, private_mean
from sparsedp.convex.minimiser import NotConvergedError
from sparsedp.convex.module_gradients import ModuleGradients
from sparsedp.convex.output import PrivateMinimiser, output_perturbation
from sparsedp.convex.projections import project
from sparsedp.convex.statement import ReleaseStatement
from sparsedp.convex.truncation import Truncation, truncated_share, weigh_truncation

if TYPE_CHECKING:
    from sparsedp.convex.estimators import LinearSVC, LogisticRegression, Ridge

__all__ = [
    "BiasReducedResult",
    "BiasReducedSGD",
    "Box",
    "FeasibleSet",
    "Huber",
    "L1Ball",
    "L2Ball",
    "LinearSVC",
    "Logistic",
    "LogisticRegression",
    "Loss",
    "ModuleGradients",
    "NotConvergedError",
    "PrivateMean",
    "PrivateMinimiser",
    "Recovery",
    "ReleaseStatement",
    "Ridge",
    "SmoothedHinge",
    "Squared",
    "Truncation",
    "WholeSpace",
    "boost",
    "function_gradients",
    "linear_gradients",
    "output_perturbation",
    "private_mean",
    "project",
    "truncated_share",
    "weigh_truncation",
]


def __getattr__(name: str) -> Any:
    # They need scikit-learn, which is an extra: the rest of the package does without.
    if name in ("LinearSVC", "LogisticRegression", "Ridge"):
        from sparsedp.convex import estimators

        return getattr(estimators, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
