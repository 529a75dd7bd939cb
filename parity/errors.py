"""The errors that are the user's to mend, not the program's: one paragraph and exit code 2."""

from parity.family import FamilyError
from parity.profiles import ProfileError
from parity.scenario import ScenarioError
from reimpl.checkpoint import CheckpointError
from reimpl.config import ConfigError


class InputError(ValueError):
    """Something of the user's that cannot be found, read or built."""


class ReportError(OSError):
    """A report that cannot be written."""


BAD_INPUT = (InputError, FamilyError, ScenarioError, CheckpointError, ConfigError, ProfileError, ReportError)
