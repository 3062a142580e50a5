"""The names of steps, as a person may write them: ours, TransformerLens's, and patterns of either."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from types import MappingProxyType

from openbook.files.errors import printable
from openbook.infer.sample import RequestError
from openbook.spec.model import ModelSpec
from openbook.trace.flow import first_stream, last_of_layer

Only = Callable[[str], bool]
"""Says by a step's full name whether to keep it."""

Selection = str | Iterable[str] | Only | None
"""Which steps to keep: names or patterns ('layers.3.attn.*'), or what says so of a name; None: all."""

_LONGEST = 200


class UnknownStepError(RequestError, KeyError):
    """A name that no step of this run has, or of a step that was not kept."""

    def __str__(self) -> str:
        return self.args[0]


# --- TransformerLens ----------------------------------------------------------------------------

_BEFORE, _AFTER = "the stream before the layer", "the stream after the layer"

OUTER: dict[str, tuple[str, ...]] = {
    "hook_embed": ("embed",),
    "hook_pos_embed": ("positions",),  # theirs: the vectors [B T D] alone; ours: with the embedding added
    "ln_final": ("final_norm",),
    "ln_final.hook_normalized": ("final_norm",),
    "unembed": ("head",),
}

BLOCK: dict[str, tuple[str, ...]] = {
    "hook_resid_pre": (_BEFORE,),
    "hook_resid_mid": ("attn_add",),
    "hook_resid_post": (_AFTER,),
    "hook_attn_out": ("attn_out_norm", "attn.o"),
    "hook_mlp_out": ("mlp_out_norm", "mlp.shared_add", "mlp.experts.sum", "mlp.down"),
    # Theirs of an RMSNorm is the quotient before the weight, ours the result.
    "ln1": ("attn_norm",),
    "ln1.hook_normalized": ("attn_norm",),
    "ln1_post": ("attn_out_norm",),
    "ln1_post.hook_normalized": ("attn_out_norm",),
    "ln2": ("mlp_norm",),
    "ln2.hook_normalized": ("mlp_norm",),
    "ln2_post": ("mlp_out_norm",),
    "ln2_post.hook_normalized": ("mlp_out_norm",),
    "attn.hook_q": ("attn.q", "attn.q_up"),  # theirs [B T H K], ours [B T H·K]; before its norm in both
    "attn.hook_k": ("attn.k",),  # theirs [B T G K], ours [B T G·K]
    "attn.hook_v": ("attn.v",),  # theirs [B T G K], ours [B T G·K]
    "attn.hook_rot_q": ("attn.q_rope",),  # theirs [B T H K], ours [B H T K]
    "attn.hook_rot_k": ("attn.k_rope",),  # theirs [B T G K], ours [B G T K]
    "attn.hook_attn_scores": ("attn.masked",),  # both with -∞ where a query may not look
    "attn.hook_pattern": ("attn.probs",),
    "attn.hook_z": ("attn.v_absorb", "attn.mix"),  # theirs [B T H K], ours [B H T K]
    "mlp.hook_pre": ("mlp.gate", "mlp.up"),
    "mlp.hook_pre_linear": ("mlp.up",),
    "mlp.hook_post": ("mlp.act",),
    "mlp.hook_expert_weights": ("mlp.chosen",),
}
"""TransformerLens's name within `blocks.N.` → ours within `layers.N.`: the first of them that the model has.

The tensor is ours in any case, in our shape. Where it differs from theirs a comment says how. Theirs are,
moreover, those of weights that its loader has changed (norms folded into matrices, means removed), unless
it was told not to (`from_pretrained_no_processing`).
"""


@lru_cache(maxsize=16)
def aliases(spec: ModelSpec, steps: frozenset[str]) -> Mapping[str, str]:
    """Every name of TransformerLens's that means one of `steps`, and the step."""
    found = {}
    for theirs, ours in OUTER.items():
        found[theirs] = next((name for name in ours if name in steps), None)
    for layer in range(spec.n_layers):
        where = f"layers.{layer}."
        streams = {
            _BEFORE: last_of_layer(spec, layer - 1) if layer else first_stream(spec),
            _AFTER: last_of_layer(spec, layer),
        }
        for theirs, ours in BLOCK.items():
            names = (streams.get(name, where + name) for name in ours)
            found[f"blocks.{layer}.{theirs}"] = next((name for name in names if name in steps), None)
    return MappingProxyType({theirs: name for theirs, name in found.items() if name is not None})


# --- what a person writes -----------------------------------------------------------------------


def canonical(spec: ModelSpec, name: str, steps: Collection[str], param: str = "name") -> str:
    """The step among `steps` that `name` means: its own name, or TransformerLens's.

    Raises `UnknownStepError`, with the names near it; `param` is the argument it came by.
    """
    if name in steps:
        return name
    known = aliases(spec, frozenset(steps))
    if name in known:
        return known[name]
    raise UnknownStepError(param, f"no step '{printable(name, 80)}' in this run; {_near(name, steps, known)}")


def selected(spec: ModelSpec, only: Selection, steps: Collection[str]) -> Only | None:
    """What says of each of `steps` whether the selection has it. Raises `UnknownStepError` for a name or
    pattern that no step has."""
    if only is None or callable(only):
        return only
    patterns = [only] if isinstance(only, str) else list(only)
    wanted: set[str] = set()
    for pattern in patterns:
        wanted |= _matching(spec, pattern, steps)
    return wanted.__contains__


def _matching(spec: ModelSpec, pattern: str, steps: Collection[str]) -> set[str]:
    if len(pattern) > _LONGEST:
        raise UnknownStepError("only", f"a pattern has at most {_LONGEST} characters, found {len(pattern):,}")
    if not set(pattern) & set("*?["):
        return {canonical(spec, pattern, steps, "only")}
    found = {name for name in steps if fnmatchcase(name, pattern)}
    known = aliases(spec, frozenset(steps))
    found |= {name for theirs, name in known.items() if fnmatchcase(theirs, pattern)}
    if not found:
        near = _near(pattern.replace("*", ""), steps, known)
        raise UnknownStepError("only", f"no step matches '{printable(pattern, 80)}'; {near}")
    return found


def _near(name: str, steps: Iterable[str], known: Mapping[str, str]) -> str:
    """'near it: layers.3.attn.q, layers.3.attn.q_rope', or what there is at all."""
    pool = [*known, *steps] if name.startswith(("blocks.", "hook_")) else [*steps, *known]
    close = difflib.get_close_matches(name[:_LONGEST], pool[:20_000], n=3, cutoff=0.5)
    return f"near it: {', '.join(close)}" if close else f"there are {', '.join(list(steps)[:3])}, ..."
