"""Every step of a real run under its one name: `record` keeps them, `diff` compares two runs."""

from openbook.trace.diff import Difference, Report, diff
from openbook.trace.record import record
from openbook.trace.schema import Statistics, Step, Trace

__all__ = ["Difference", "Report", "Statistics", "Step", "Trace", "diff", "record"]
