"""What a trained model gives away, measured: exposure of canaries, and lower bounds on epsilon from scores."""

from sparsedp.audit.bounds import epsilon_lower_bound
from sparsedp.audit.exposures import ReferenceFit, exposure, fit_references
from sparsedp.audit.one_run import one_run_p_value

__all__ = ["ReferenceFit", "epsilon_lower_bound", "exposure", "fit_references", "one_run_p_value"]
