"""Harbor, as far as the trial host knows it: the names, phases and records of Harbor 0.26, with processes of this machine for containers.

What each part does is copied from Harbor's own order of events (`trial/single_step.py` and `trial/trial.py` of Harbor 0.26.0); a name
that Harbor does not have is refused, so that the trial host cannot use one.
"""

from harbor.models.trial.config import TrialConfig
from harbor.trial.trial import Trial, TrialEvent

__all__ = ["Trial", "TrialConfig", "TrialEvent"]
