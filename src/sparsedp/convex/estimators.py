"""Linear models with scikit-learn's interface, differentially private.

What is public: the number of rows and of columns, the classes, and every parameter. Nothing is taken from the data to scale or
weigh them: rows are clipped to `bound`, targets of `Ridge` to `target_bound`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from numbers import Integral
from typing import Any, Literal

import numpy as np
from scipy.sparse import csr_array, hstack
from scipy.special import expit

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise ImportError(
        "sparsedp.convex's estimators need scikit-learn: pip install 'sparsedp[convex]' (in a checkout: pip install "
        "-c constraints.txt -e '.[convex]'). sparsedp.convex.output_perturbation does without."
    ) from error

from sparsedp.accounting.events import require_count, require_number
from sparsedp.convex.bias_reduced import BiasReducedSGD, linear_gradients
from sparsedp.convex.feasible import L2Ball, WholeSpace
from sparsedp.convex.losses import Logistic, Loss, SmoothedHinge, Squared
from sparsedp.convex.output import Regularisation, admitted_targets, make_plan, perturb, read_rows
from sparsedp.convex.output_plan import OutputPlan
from sparsedp.convex.release import Neighbours, Releases, require_choice
from sparsedp.convex.rows import RowBounds
from sparsedp.convex.sgd import SGDPlan, train
from sparsedp.convex.statement import ReleaseStatement
from sparsedp.errors import UnsupportedError
from sparsedp.noise import RandomKey
from sparsedp.plan import default_delta

Method = Literal["output", "sgd", "bias_reduced", "auto"]


class _PrivateLinearModel(BaseEstimator, ABC):
    """What the estimators share. The parameters are those of `LogisticRegression`."""

    epsilon: float
    delta: float | None
    method: Method
    bound: float
    sparsity: float | None
    regularisation: Regularisation
    model_norm: float
    fit_intercept: bool
    intercept_scaling: float
    neighbours: Neighbours
    steps: int
    batch_size: int | None
    learning_rate: float | None
    random_state: Any

    statement_: ReleaseStatement
    coef_: np.ndarray
    intercept_: np.ndarray | float

    @abstractmethod
    def _loss(self) -> Loss:
        """Of one row."""

    def _fit(self, rows: csr_array, targets: np.ndarray) -> np.ndarray:
        """Weights (k, d + 1), the last of each that of the constant column, for targets (n, k)."""
        n, d = rows.shape
        loss = self._loss()
        bound = require_number("bound", self.bound, low=1e-100, high=1e100)
        sparsity = float(d) if self.sparsity is None else require_number("sparsity", self.sparsity, low=1.0)
        sparsity = min(float(d), sparsity)
        constant = 0.0
        if self.fit_intercept:
            constant = require_number("intercept_scaling", self.intercept_scaling, low=0.0, low_open=True)
        norm = math.hypot(bound, constant)
        delta = default_delta(n) if self.delta is None else self.delta
        planned = make_plan(
            loss,
            shape=(n, d + 1, targets.shape[1]),
            epsilon=self.epsilon,
            delta=delta,
            bound=norm,
            sparsity=((bound * math.sqrt(sparsity) + constant) / norm) ** 2,
            feasible=None,
            regularisation=self.regularisation,
            model_norm=self.model_norm,
            neighbours=self.neighbours,
        )
        RowBounds(bound, bound * math.sqrt(sparsity)).clip(rows)
        # A column of zeros where there is no intercept: its weight is nothing but noise, and is thrown away.
        wide = csr_array(hstack([rows, csr_array(np.full((n, 1), constant))], format="csr"))
        wide.eliminate_zeros()
        seed = self._seed()
        chosen = self._choose(planned)
        key = RandomKey.from_os() if seed is None else RandomKey.from_seed(seed)
        if isinstance(chosen, SGDPlan):
            self.method_ = "sgd"
            weights, self.statement_ = train(chosen, wide, admitted_targets(loss, targets), key)
        elif isinstance(chosen, BiasReducedSGD):
            self.method_ = "bias_reduced"
            reduced = chosen.minimise(linear_gradients(loss, wide, admitted_targets(loss, targets)))
            weights, self.statement_ = reduced.weights.reshape(targets.shape[1], -1).T, reduced.statement
        else:
            self.method_, self.regularisation_ = "output", chosen.bounds.regularisation
            result = perturb(chosen, wide, targets, WholeSpace(), Releases(key))
            weights, self.statement_ = result.weights, result.statement
        weights = weights.T * 1.0
        weights[:, -1] *= constant
        return weights

    def _choose(self, planned: OutputPlan) -> OutputPlan | SGDPlan | BiasReducedSGD:
        """The method, by what is known before the data are looked at."""
        require_choice("method", self.method, Method)
        if self.method == "bias_reduced":
            return self._bias_reduced_plan(planned)
        if self.method == "output" or (self.method == "auto" and planned.delta == 0):
            return planned
        if planned.delta == 0:
            raise UnsupportedError("method='sgd' has Gaussian noise and needs a delta above 0: take method='output'.")
        return self._sgd_plan(planned)

    def _bias_reduced_plan(self, planned: OutputPlan) -> BiasReducedSGD:
        bounds, models = planned.bounds, planned.models
        if bounds.rows < 2:  # scikit-learn's checks look for a ValueError with "1 sample"
            raise ValueError("method='bias_reduced' takes halves of rows: it needs two at least, and X has 1 sample.")
        slope = bounds.loss.largest_slope(bounds.row_norm * self.model_norm)
        radius = self.model_norm * math.sqrt(models)
        return BiasReducedSGD(
            epsilon=planned.epsilon,
            delta=planned.delta,
            bound=slope * bounds.row_norm * math.sqrt(models),
            sparsity=max(1.0, planned.sparsity * models),
            rows=bounds.rows,
            columns=bounds.columns * models,
            model_norm=radius,
            step_size=self.learning_rate,
            feasible=L2Ball(radius),
            accounting="composition" if planned.neighbours == "add_remove" else "filter",
            seed=self._seed(),
        )

    def _sgd_plan(self, planned: OutputPlan) -> SGDPlan:
        bounds = planned.bounds
        batch, rate = self.batch_size, self.learning_rate
        return SGDPlan(
            loss=bounds.loss,
            rows=bounds.rows,
            columns=bounds.columns,
            models=planned.models,
            row_norm=bounds.row_norm,
            epsilon=planned.epsilon,
            delta=planned.delta,
            neighbours=planned.neighbours,
            steps=require_count("steps", self.steps, low=1),
            batch_size=None if batch is None else require_count("batch_size", batch, low=1),
            model_norm=self.model_norm,
            regularisation=None if self.regularisation == "auto" else bounds.regularisation,
            learning_rate=None if rate is None else require_number("learning_rate", rate, low=0.0, low_open=True),
        )

    def _seed(self) -> int | None:
        """None for a key from the operating system; a number makes the noise known, and the statement says so."""
        if self.random_state is None:
            return None
        if isinstance(self.random_state, Integral):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _margins(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False)
        return np.asarray(X @ np.atleast_2d(self.coef_).T) + self.intercept_

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


class _PrivateClassifier(ClassifierMixin, _PrivateLinearModel):
    """One model for two classes, and one against the rest for each of several; all are released together."""

    classes: Any

    def fit(self, X: Any, y: Any) -> Any:
        """X (n, d), sparse or dense; y (n,) of class labels. Each fit spends epsilon and delta anew."""
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64)
        check_classification_targets(y)
        self.classes_ = np.unique(y) if self.classes is None else np.unique(np.asarray(self.classes))
        if len(self.classes_) < 2:
            raise ValueError(f"A classifier needs at least two classes, and there is one class: {self.classes_[0]!r}.")
        places = np.searchsorted(self.classes_, y)
        if (self.classes_[np.minimum(places, len(self.classes_) - 1)] != y).any():
            raise ValueError("y holds a label that is none of `classes`: nothing was released.")
        models = 1 if len(self.classes_) == 2 else len(self.classes_)
        positive = np.array([1]) if models == 1 else np.arange(models)
        targets = np.where(places[:, None] == positive, 1.0, -1.0)
        weights = self._fit(read_rows(X), targets)
        self.coef_, self.intercept_ = weights[:, :-1], weights[:, -1]
        self.statement_ = _with_classes(self.statement_, self.classes_, given=self.classes is not None)
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """Margins, (n,) for two classes, above 0 for the second; (n, k) for several."""
        margins = self._margins(X)
        return margins[:, 0] if len(self.classes_) == 2 else margins

    def predict(self, X: Any) -> np.ndarray:
        margins = self.decision_function(X)
        places = (margins > 0).astype(int) if margins.ndim == 1 else margins.argmax(axis=1)
        return self.classes_[places]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        # On the few hundred rows that scikit-learn's checks have, noise for epsilon = 1 leaves little else.
        tags.classifier_tags.poor_score = True
        return tags


class LogisticRegression(_PrivateClassifier):
    """Logistic regression, (epsilon, delta)-differentially private.

    epsilon, delta: the budget of one fit. delta None: 0.1 / n rounded down to one digit; 0: Laplace noise, not for "sgd".
    method: "output" (minimise, then noise), "sgd" (noise in every step of gradient descent), "bias_reduced" (`BiasReducedSGD`),
        or "auto": "sgd", and "output" where delta = 0. The fitted `method_` says which.
    bound, sparsity: rows are scaled down to l2 norm `bound` and l1 norm bound * sqrt(sparsity). Choose them without the data.
    regularisation: lambda of method "output", or "auto" or "paper", which choose it for models of norm `model_norm`. Of method
        "sgd" it is 1 / (learning rate * steps), which shrinks models as much.
    fit_intercept, intercept_scaling: rows get a constant column of this value, regularised like all others.
    classes: the labels there can be, which is public. None takes those in y: then the set of them is not protected.
    neighbours: "add_remove", or "replace_one"; method "bias_reduced" has the paper's accounting for that.
    steps, batch_size, learning_rate: of method "sgd". batch_size None: all rows in every step; otherwise Poisson samples of so
        many. learning_rate None: by `regularisation`, with momentum; of "bias_reduced" by the paper's formula.
    random_state: None for noise that nobody knows. Anything else is for tests, and the statement says that.

    Fitted: `coef_`, `intercept_`, `classes_`, `statement_`, `method_`, `n_features_in_`.
    """

    def __init__(
        self, *, epsilon: float = 1.0, delta: float | None = None, method: Method = "auto", bound: float = 1.0,
        sparsity: float | None = None, regularisation: Regularisation = "auto", model_norm: float = 20.0,
        fit_intercept: bool = True, intercept_scaling: float = 0.3, classes: Any = None,
        neighbours: Neighbours = "add_remove", steps: int = 200, batch_size: int | None = None,
        learning_rate: float | None = None, random_state: Any = None,
    ) -> None:  # fmt: skip
        self.epsilon = epsilon
        self.delta = delta
        self.method = method
        self.bound = bound
        self.sparsity = sparsity
        self.regularisation = regularisation
        self.model_norm = model_norm
        self.fit_intercept = fit_intercept
        self.intercept_scaling = intercept_scaling
        self.classes = classes
        self.neighbours = neighbours
        self.steps = steps
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.random_state = random_state

    def _loss(self) -> Loss:
        return Logistic()

    def predict_proba(self, X: Any) -> np.ndarray:
        """(n, k): for several classes, each one's probability against the rest, scaled to sum to one."""
        margins = self.decision_function(X)
        if margins.ndim == 1:
            return np.stack([expit(-margins), expit(margins)], axis=1)
        shares = expit(margins)
        total = shares.sum(axis=1, keepdims=True)
        return np.where(total > 0, shares / np.where(total > 0, total, 1.0), 1 / shares.shape[1])

    def predict_log_proba(self, X: Any) -> np.ndarray:
        return np.log(self.predict_proba(X))


class LinearSVC(_PrivateClassifier):
    """A linear support vector machine, differentially private: the hinge loss with its corner rounded over 2 * `hinge_width`.

    Parameters otherwise as `LogisticRegression`.
    """

    def __init__(
        self, *, epsilon: float = 1.0, delta: float | None = None, method: Method = "auto", bound: float = 1.0,
        sparsity: float | None = None, regularisation: Regularisation = "auto", model_norm: float = 20.0,
        fit_intercept: bool = True, intercept_scaling: float = 0.3, hinge_width: float = 0.5, classes: Any = None,
        neighbours: Neighbours = "add_remove", steps: int = 200, batch_size: int | None = None,
        learning_rate: float | None = None, random_state: Any = None,
    ) -> None:  # fmt: skip
        self.epsilon = epsilon
        self.delta = delta
        self.method = method
        self.bound = bound
        self.sparsity = sparsity
        self.regularisation = regularisation
        self.model_norm = model_norm
        self.fit_intercept = fit_intercept
        self.intercept_scaling = intercept_scaling
        self.hinge_width = hinge_width
        self.classes = classes
        self.neighbours = neighbours
        self.steps = steps
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.random_state = random_state

    def _loss(self) -> Loss:
        return SmoothedHinge(self.hinge_width)


class Ridge(RegressorMixin, _PrivateLinearModel):
    """Ridge regression, differentially private. Targets are clipped to [-target_bound, target_bound], which is public.

    Parameters otherwise as `LogisticRegression`; `model_norm` is the norm of weights that predict such targets.
    """

    def __init__(
        self, *, epsilon: float = 1.0, delta: float | None = None, method: Method = "auto", bound: float = 1.0,
        target_bound: float = 1.0, sparsity: float | None = None, regularisation: Regularisation = "auto",
        model_norm: float = 1.0, fit_intercept: bool = True, intercept_scaling: float = 1.0,
        neighbours: Neighbours = "add_remove", steps: int = 200, batch_size: int | None = None,
        learning_rate: float | None = None, random_state: Any = None,
    ) -> None:  # fmt: skip
        self.epsilon = epsilon
        self.delta = delta
        self.method = method
        self.bound = bound
        self.target_bound = target_bound
        self.sparsity = sparsity
        self.regularisation = regularisation
        self.model_norm = model_norm
        self.fit_intercept = fit_intercept
        self.intercept_scaling = intercept_scaling
        self.neighbours = neighbours
        self.steps = steps
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.random_state = random_state

    def _loss(self) -> Loss:
        return Squared(self.target_bound)

    def fit(self, X: Any, y: Any) -> Ridge:
        """X (n, d), sparse or dense; y (n,) of numbers. Each fit spends epsilon and delta anew."""
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64, y_numeric=True)
        weights = self._fit(read_rows(X), np.asarray(y, np.float64)[:, None])
        self.coef_, self.intercept_ = weights[0, :-1], float(weights[0, -1])
        return self

    def predict(self, X: Any) -> np.ndarray:
        return self._margins(X)[:, 0]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True  # as of classifiers
        return tags


def _with_classes(statement: ReleaseStatement, classes: np.ndarray, given: bool) -> ReleaseStatement:
    """The statement with the word on where the classes come from."""
    shown = ", ".join(map(str, classes[:10])) + (", ..." if len(classes) > 10 else "")
    source = "they were given" if given else "they were taken from the labels, of which the set is not protected"
    return replace(statement, assumptions=(*statement.assumptions, f"The classes ({shown}) are public: {source}."))
