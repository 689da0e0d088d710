"""What a trained model gives away, measured: exposure of canaries, and lower bounds on epsilon from scores."""

from sparsedp.audit.bounds import epsilon_lower_bound
from sparsedp.audit.canaries import CanaryPlan, MakesCanaries, make_canaries
from sparsedp.audit.exposures import ReferenceFit, exposure, fit_references
from sparsedp.audit.inserted import WithCanaries
from sparsedp.audit.one_run import one_run_p_value
from sparsedp.audit.secret_sharer import SecretSharer, secret_sharer

__all__ = [
    "CanaryPlan",
    "MakesCanaries",
    "ReferenceFit",
    "SecretSharer",
    "WithCanaries",
    "epsilon_lower_bound",
    "exposure",
    "fit_references",
    "make_canaries",
    "one_run_p_value",
    "secret_sharer",
]
