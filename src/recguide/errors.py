"""The tree of exceptions. Catch `RecGuideError` for all of them.

RecGuideError
├── ConfigError (ValueError)         an option's value is not allowed
├── UnsupportedError (ValueError)    generate() was asked for something the strategy cannot honour
├── InputError (ValueError)          a prompt that cannot be answered: empty, or longer than the context
├── CheckpointError (ValueError)     weights that are missing, left over, or of another shape
├── CalibrationError (ValueError)    a table that is missing, unreadable, or of another setup
├── MissingDependencyError (ImportError)   an extra is not installed
├── RankError (RuntimeError)         a process that a model is split over has ended, or is out of step
└── LosslessError (AssertionError)   an output or a counter contradicts plain decoding: a fault of ours, please report
"""


class RecGuideError(Exception):
    """Base of all errors raised on purpose by recguide."""


class ConfigError(RecGuideError, ValueError):
    """An option's value is not allowed; the message names the value and the choices."""


class UnsupportedError(RecGuideError, ValueError):
    """`generate()` was asked for something that the strategy cannot honour; raised before any forward."""


class InputError(RecGuideError, ValueError):
    """A prompt that cannot be answered, for example an empty one or one longer than the context."""


class CheckpointError(RecGuideError, ValueError):
    """Weights with missing, unexpected or misshapen keys; the message names them."""


class CalibrationError(RecGuideError, ValueError):
    """A calibration table or cost profile that is missing, unreadable, or was measured on another setup."""


class MissingDependencyError(RecGuideError, ImportError):
    """An optional package is not installed; the message names the install line."""


class RankError(RecGuideError, RuntimeError):
    """Of the processes that a model is split over one has ended, does not answer, or does something else than the others."""


class LosslessError(RecGuideError, AssertionError):
    """An output differs from plain decoding, or a counter breaks an identity: a fault of recguide's."""
