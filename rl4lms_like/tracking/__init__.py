"""Recording of runs and reports. Imports neither torch nor a tracking service."""

from __future__ import annotations

from rl4lms_like.tracking.base import Tracker
from rl4lms_like.tracking.report import write_report
from rl4lms_like.tracking.sink import RunDescription, Sink

__all__ = ["RunDescription", "Sink", "Tracker", "write_report"]
