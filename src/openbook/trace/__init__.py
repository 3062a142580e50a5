"""Every step of a real run under its one name: `record` keeps them."""

from openbook.trace.record import record
from openbook.trace.schema import Statistics, Step, Trace

__all__ = ["Statistics", "Step", "Trace", "record"]
