"""How much a run tries: Hypothesis profiles `dev`, `ci`, `thorough`, chosen by the variable HYPOTHESIS_PROFILE."""

import os

from hypothesis import settings


class ProfileError(ValueError):
    """A profile that there is not."""


EXAMPLES = {"dev": 16, "ci": 24, "thorough": 1000}
"""Examples per property, layer and dtype."""


def load_profile() -> str:
    """Register all profiles, load the chosen one (`ci` where the variable CI is set, else `dev`) and return its name.

    No profile has a deadline: a first example pays for imports and is slow without being wrong. `ci` draws the same
    examples every time, so that a red run is the submission's fault; the others find new ones.
    """
    for name, examples in EXAMPLES.items():
        repeatable = name == "ci"
        settings.register_profile(
            name, max_examples=examples, deadline=None, derandomize=repeatable, print_blob=not repeatable
        )
    name = os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev")
    if name not in EXAMPLES:
        raise ProfileError(f"HYPOTHESIS_PROFILE is {name!r}, but must be one of {', '.join(EXAMPLES)}")
    settings.load_profile(name)
    return name
