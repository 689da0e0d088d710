"""The errors and warnings that SparseDP raises."""


class SparseDPError(Exception):
    """Base of every error that SparseDP raises on purpose."""


class UnsupportedError(SparseDPError):
    """A module, operation or setting whose privacy cannot be accounted for, refused by name."""


class UnitsMixedError(SparseDPError):
    """One unit's loss depends on another unit, so that clipping would bound nothing."""


class NonFiniteGradientError(SparseDPError):
    """A unit's gradient is NaN or infinite; the step was not taken."""


class ConfigError(SparseDPError):
    """A configuration has an unknown key, a wrong type or an impossible value."""


class DataError(SparseDPError):
    """A data file is malformed beyond the stated tolerance."""


class CheckpointError(SparseDPError):
    """A checkpoint is damaged, foreign, or belongs to another plan."""


class SparseDPWarning(UserWarning):
    """Something that weakens a guarantee or is probably not intended."""
