"""The number of examples that hypothesis draws for a law.

Every run of the suite draws other examples, so the laws are searched on with each run. The profile "thorough", which
`make test-slow` runs all laws with, draws as many as it takes to trust one run alone.
"""

from hypothesis import settings

QUICK, THOROUGH = "quick", "thorough"
SHARE = 8  # one example of this number is drawn in a quick run

UNSAID = 100  # examples of a law that names no number, in a run with the profile THOROUGH

# No test is one of time: the machine may be busy.
settings.register_profile(QUICK, deadline=None, max_examples=UNSAID // SHARE)
settings.register_profile(THOROUGH, deadline=None, max_examples=UNSAID)


def is_quick() -> bool:
    """Whether this run draws few examples."""
    return settings.get_current_profile_name() != THOROUGH


def examples(thorough: int) -> int:
    """Examples of a law in this run; thorough: in one with the profile of this name."""
    return -(-thorough // SHARE) if is_quick() else thorough
