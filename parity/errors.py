"""The errors that are the user's to mend, not the program's: one paragraph and exit code 2."""

from parity.family import FamilyError
from parity.profiles import ProfileError
from parity.scenario import ScenarioError
from reimpl.checkpoint import CheckpointError
from reimpl.config import ConfigError


class ReportError(OSError):
    """A report that cannot be written."""


BAD_INPUT = (FamilyError, ScenarioError, CheckpointError, ConfigError, ProfileError, ReportError)
