"""What a trained model gives away, measured: exposure, lower bounds on epsilon, audits that train, neighbour replay."""

from sparsedp.audit.bounds import epsilon_lower_bound
from sparsedp.audit.canaries import CanaryPlan, MakesCanaries, make_canaries
from sparsedp.audit.epsilon_audit import EpsilonAudit, audit_scores
from sparsedp.audit.exposures import ReferenceFit, exposure, fit_references
from sparsedp.audit.inserted import WithCanaries
from sparsedp.audit.one_run import one_run_p_value
from sparsedp.audit.replays import Replay, UnitReplay, replay
from sparsedp.audit.secret_sharers import SecretSharer, planned_repetitions, secret_sharer
from sparsedp.audit.white_box import AuditedTraining, audit_many_runs, audit_one_run

__all__ = [
    "AuditedTraining",
    "CanaryPlan",
    "EpsilonAudit",
    "MakesCanaries",
    "ReferenceFit",
    "Replay",
    "SecretSharer",
    "UnitReplay",
    "WithCanaries",
    "audit_many_runs",
    "audit_one_run",
    "audit_scores",
    "epsilon_lower_bound",
    "exposure",
    "fit_references",
    "make_canaries",
    "one_run_p_value",
    "planned_repetitions",
    "replay",
    "secret_sharer",
]
