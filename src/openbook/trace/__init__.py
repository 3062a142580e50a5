"""Every step of a real run under its one name: `record` keeps them, `diff` compares two runs."""

from openbook.trace.diff import Difference, Report, diff
from openbook.trace.heads import attention_entropy, head_groups, sink_share
from openbook.trace.lens import LogitLens, UpdateNorms, logit_lens, update_norms
from openbook.trace.names import UnknownStepError
from openbook.trace.record import record
from openbook.trace.rows import trace_bytes
from openbook.trace.schema import Step, Trace, load
from openbook.trace.tensors import Statistics

__all__ = [
    "Difference", "LogitLens", "Report", "Statistics", "Step", "Trace", "UnknownStepError", "UpdateNorms",
    "attention_entropy", "diff", "head_groups", "load", "logit_lens", "record", "sink_share", "trace_bytes",
    "update_norms",
]  # fmt: skip
