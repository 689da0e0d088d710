"""What a trained model gives away, measured: exposure of canaries, lower bounds on epsilon from scores, and audits that train."""

from sparsedp.audit.bounds import epsilon_lower_bound
from sparsedp.audit.epsilon_audit import EpsilonAudit
from sparsedp.audit.exposures import ReferenceFit, exposure, fit_references
from sparsedp.audit.one_run import one_run_p_value
from sparsedp.audit.white_box import AuditedTraining, audit_many_runs, audit_one_run

__all__ = [
    "AuditedTraining",
    "EpsilonAudit",
    "ReferenceFit",
    "audit_many_runs",
    "audit_one_run",
    "epsilon_lower_bound",
    "exposure",
    "fit_references",
    "one_run_p_value",
]
