"""Planted faults: each is found at the right step and for the right reason, against transformers and against
our own model without the fault."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from checkpoints import NEW, changed
from openbook.model import Decoder
from openbook.spec.model import (
    Block,
    Chunk,
    Experts,
    Learned,
    Llama3Scaling,
    ModelSpec,
    Norm,
    QueryTemperature,
)
from openbook.trace import diff, record
from openbook.trace.diff import depth, difference, tolerance_for
from openbook.trace.hf import load_transformers, record_transformers
from openbook.trace.reasons import explain
from variants import VARIANTS, attention, block, model, noisy_decoder, random_ids

Spec = Callable[[ModelSpec], ModelSpec]
Weights = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Fault:
    """What is done wrong to a model of `family`, at which step it shows first, and what is said of it.

    `told` is of a faulty A and a right B. `family` is one of `checkpoints.FAMILIES`.
    """

    name: str
    family: str
    step: str
    told: str
    spec: Spec | None = None
    weights: Weights | None = None

    def plant(self, decoder: Decoder) -> Decoder:
        return changed(decoder, self.spec and self.spec(decoder.spec), self.weights)


# --- ways to do wrong ---------------------------------------------------------------------------


def blocks(change: Callable[[Block], Block]) -> Spec:
    return lambda spec: spec.replace(layers=tuple(map(change, spec.layers)))


def attn(**changes: Any) -> Spec:
    return blocks(lambda b: replace(b, attn=replace(b.attn, **changes)))


def rope(**changes: Any) -> Spec:
    return blocks(lambda b: replace(b, attn=replace(b.attn, rope=replace(b.attn.rope, **changes))))


def norms(**changes: Any) -> Spec:
    return blocks(
        lambda b: replace(
            b, attn_norm=replace(b.attn_norm, **changes), mlp_norm=replace(b.mlp_norm, **changes)
        )
    )


def mlp(**changes: Any) -> Spec:
    return blocks(lambda b: replace(b, mlp=replace(b.mlp, **changes)))


def experts(change: Callable[[Experts], Experts]) -> Spec:
    return blocks(lambda b: replace(b, mlp=change(b.mlp)) if isinstance(b.mlp, Experts) else b)


def router(**changes: Any) -> Spec:
    return experts(lambda e: replace(e, router=replace(e.router, **changes)))


def attn_of(layer: int, **changes: Any) -> Spec:
    def change(spec: ModelSpec) -> ModelSpec:
        layers = list(spec.layers)
        layers[layer] = replace(layers[layer], attn=replace(layers[layer].attn, **changes))
        return spec.replace(layers=tuple(layers))

    return change


def head(**changes: Any) -> Spec:
    return lambda spec: spec.replace(head=replace(spec.head, **changes))


def rows_in_pairs(values: dict[str, Any]) -> None:
    """q and k as a llama's GGUF stores them: 0, K/2, 1, K/2 + 1, ... within each head of 10."""
    for name, rows in values.items():
        if name.rpartition(".")[0].endswith(("attn.q", "attn.k")):
            values[name] = rows.unflatten(0, (-1, 2, 5)).transpose(1, 2).reshape(rows.shape)


def exchange(one: str, other: str) -> Weights:
    def swap(values: dict[str, Any]) -> None:
        for suffix in (".weight", ".bias"):
            if one + suffix in values:
                values[one + suffix], values[other + suffix] = values[other + suffix], values[one + suffix]

    return swap


def edit(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Weights:
    return lambda values: values.update({name: change(values[name])})


def one_row(rows: torch.Tensor) -> torch.Tensor:
    rows = rows.clone()
    rows[3] *= 1.1
    return rows


# --- the faults ---------------------------------------------------------------------------------

FAULTS = [
    Fault("q/k rows not unpermuted", "llama", "layers.0.attn.q",
          "rows permuted within heads (adjacent rotary pairs in A): q/k were not unpermuted",
          weights=rows_in_pairs),
    Fault("norm offset dropped", "gemma3_text", "layers.0.attn_norm", "weight: w in A, 1 + w in B",
          norms(offset=0.0)),
    Fault("window W + 1", "mistral", "layers.0.attn.masked", "visible keys: the last 8 in A, the last 7 in B "
          "(query 7 sees keys 0 to 7 in A and keys 1 to 7 in B)", attn(window=8)),
    Fault("exact GELU for tanh", "gpt2", "layers.0.mlp.act", "activation: gelu in A, gelu_tanh in B",
          mlp(activation="gelu")),
    Fault("eps 1e-6 for 1e-5", "llama", "layers.0.attn_norm", "eps: 1e-06 in A, 1e-05 in B", norms(eps=1e-6)),
    Fault("o_proj bias dropped", "llama", "layers.0.attn.o", "bias: B adds layers.0.attn.o.bias, A does not",
          attn(o_bias=False)),
    Fault("RoPE interleaved for half-split", "llama", "layers.0.attn.q_rope",
          "RoPE layout: interleaved in A, half in B", rope(layout="interleaved")),
    Fault("top-k not renormalised", "qwen3_moe", "layers.0.mlp.chosen",
          "chosen weights: as scored in A, renormalised to sum to 1 in B", router(renormalise=False)),
    Fault("RoPE base 500,000 for 10,000", "llama", "layers.0.attn.q_rope",
          "RoPE base: 500,000 in A, 10,000 in B", rope(base=5e5)),
    Fault("embedding scale missing", "gemma3_text", "embed", "embedding scale: A is 0.1443 (1/√D) times B",
          lambda spec: spec.replace(embed_scale=1.0)),
]  # fmt: skip
"""The faults that users of every port have reported."""

MORE = [
    Fault("no window", "mistral", "layers.0.attn.masked", "visible keys: all 17 in A, the last 7 in B "
          "(query 7 sees keys 0 to 7 in A and keys 1 to 7 in B)", attn(window=None)),
    Fault("LayerNorm for RMSNorm", "llama", "layers.0.attn_norm", "norm: LayerNorm in A, RMSNorm in B",
          norms(kind="layer")),
    Fault("RMSNorm for LayerNorm", "gpt2", "layers.0.attn_norm", "norm: RMSNorm in A, LayerNorm in B",
          norms(kind="rms")),
    Fault("norm bias dropped", "gpt2", "layers.0.attn_norm", "bias: none in A, added in B",
          norms(bias=False)),
    Fault("eps of the q norm", "qwen3_moe", "layers.0.attn.q_norm", "eps: 0.01 in A, 1e-06 in B",
          blocks(lambda b: replace(b, attn=replace(b.attn, q_norm=replace(b.attn.q_norm, eps=1e-2))))),
    Fault("RoPE scaling", "llama", "layers.0.attn.q_rope",
          "RoPE scaling: frequencies ÷ 1.736 to 8 in A, none in B",
          rope(scaling=Llama3Scaling(8.0, 1.0, 4.0, 16))),
    Fault("half of a head rotated", "gpt_neox", "layers.0.attn.q_rope",
          "rotated elements: 8 in A, 2 in B", rope(dim=8)),
    Fault("scale of the scores", "llama", "layers.0.attn.scores", "scale: 0.5 in A, 0.3162 in B",
          attn(scale=0.5)),
    Fault("soft-cap of the scores", "llama", "layers.0.attn.scores", "soft-cap: 5 in A, none in B",
          attn(softcap=5.0)),
    Fault("ALiBi missing", "bloom", "layers.0.attn.scores", "bias by distance: none in A, ALiBi in B",
          attn(alibi=None)),
    Fault("clip missing", "olmo", "layers.0.attn.q", "clipped at ±0.8 in B alone", attn(clip_qkv=None)),
    Fault("SiLU for GELU", "gemma3_text", "layers.0.mlp.act", "activation: silu in A, gelu_tanh in B",
          mlp(activation="silu")),
    Fault("gate and up exchanged", "llama", "layers.1.mlp.gate", "exchanged: A's mlp.gate is B's mlp.up",
          weights=exchange("layers.1.mlp.gate", "layers.1.mlp.up")),
    Fault("square matrix not transposed", "gpt2", "layers.0.attn.o", "A's matrix is B's transposed",
          weights=edit("layers.0.attn.o.weight", lambda w: w.T)),
    Fault("rows of gate in another order", "llama", "layers.0.mlp.gate", "rows in another order",
          weights=lambda values: [edit(f"layers.0.mlp.gate.{p}", lambda w: w.flip(0))(values)
                                  for p in ("weight", "bias")] and None),
    Fault("one row of a matrix", "llama", "layers.1.mlp.up",
          "the weights differ: layers.1.mlp.up.weight by 1.3e-02 of its norm, in 1 of its 88 rows",
          weights=edit("layers.1.mlp.up.weight", one_row)),
    Fault("q scaled", "mistral", "layers.2.attn.q", "scaled: A is 3.162 (√K) times B",
          weights=edit("layers.2.attn.q.weight", lambda w: w * 10**0.5)),
    Fault("score of the router", "qwen3_moe", "layers.0.mlp.chosen", "score: sigmoid in A, softmax in B",
          router(score="sigmoid")),
    Fault("scale of the router", "deepseek_v3", "layers.1.mlp.chosen", "scale: 1 in A, 2.5 in B",
          router(scale=1.0)),
    Fault("groups of the router", "deepseek_v3", "layers.1.mlp.chosen", "6 of 17 tokens choose other experts",
          router(groups=None)),
    Fault("residual scale", "llama", "layers.0.attn_add", "residual scale: 0.7 in A, 1 in B",
          blocks(lambda b: replace(b, residual_scale=0.7))),
    Fault("soft-cap of the logits", "gemma3_text", "head", "soft-cap: 30 in A, none in B",
          head(softcap=30.0)),
    Fault("scale of the logits", "llama", "head", "scale: 0.0625 in A, 1 in B", head(scale=0.0625)),
    Fault("head not tied", "gpt2", "head", "B's head is its embedding's matrix, A's is not", head(tied=False),
          weights=edit("head.weight", lambda w: w.flip(0))),
    Fault("latent's rotation", "deepseek_v3", "layers.0.attn.q_rope",
          "RoPE layout: half in A, interleaved in B", rope(layout="half")),
]  # fmt: skip


OF_VARIANTS = [
    Fault("chunks", "chunks", "layers.0.attn.masked", "visible keys: those of a chunk of 4 in A, those of a "
          "chunk of 5 in B (query 4 sees key 4 in A and keys 0 to 4 in B)", attn_of(0, window=Chunk(4))),
    Fault("temperature", "chunks", "layers.1.attn.temperature", "temperature of the last query: 1.161 in A, "
          "2.127 in B", attn_of(1, temperature=QueryTemperature(0.1, 4))),
    Fault("sinks", "sinks", "layers.0.attn.probs", "sinks: none in A, one for each head in B",
          attn_of(0, sinks=False)),
    Fault("first row of the positions", "multipliers", "positions", "row of position 0: 0 in A, 2 in B",
          lambda spec: spec.replace(positions=Learned(66))),
    Fault("offset of up", "multipliers", "layers.0.mlp.act", "added to up: 0 in A, 1 in B",
          mlp(up_offset=0.0)),
    Fault("clamp", "multipliers", "layers.0.mlp.act", "clamp: none in A, ±0.4 in B", mlp(clamp=None)),
    Fault("gate of the shared expert", "experts", "layers.2.mlp.shared_add",
          "gate of the shared expert: none in A, its sigmoid in B",
          experts(lambda e: replace(e, shared=e.shared and replace(e.shared, gated=False)))),
    Fault("activation of the experts", "experts", "layers.1.mlp.experts.act",
          "activation: gelu in A, silu in B",
          experts(lambda e: replace(e, expert=replace(e.expert, activation="gelu")))),
    Fault("correction of the router", "routers", "layers.0.mlp.chosen",
          "17 of 17 tokens choose other experts", router(correction=False)),
    Fault("kv_norm", "latent", "layers.0.attn.kv_norm", "eps: 0.01 in A, 1e-05 in B",
          attn_of(0, kv_norm=Norm("rms", eps=1e-2))),
]  # fmt: skip
"""Of models that transformers does not have as a whole; `family` is one of `variants.VARIANTS`."""


@pytest.mark.parametrize("fault", FAULTS + MORE, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_against_transformers(checkpoint, fault: Fault):
    made = checkpoint(fault.family)
    report = diff(record(fault.plant(made.ours), made.ids), made.their_trace())
    check(report, fault.step, fault.told)


@pytest.mark.parametrize("fault", FAULTS + MORE, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_between_two_of_ours(checkpoint, fault: Fault):
    made = checkpoint(fault.family)
    report = diff(record(fault.plant(made.ours), made.ids), made.our_trace())
    check(report, fault.step, fault.told)


@pytest.mark.parametrize("fault", OF_VARIANTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_in_every_kind_of_model(fault: Fault):
    decoder = noisy_decoder(VARIANTS[fault.family])
    ids = random_ids(decoder.spec, 1, NEW)
    check(diff(record(fault.plant(decoder), ids), record(decoder, ids)), fault.step, fault.told)


def check(report, step: str, told: str) -> None:
    assert report.first is not None
    reason = report.reasons[report.first.name]
    assert (report.first.name, reason and reason.text) == (step, told)
    assert reason.advice


def test_every_fault_is_named_and_none_of_its_consequences(checkpoint):
    """q and k of a layer are wrong, and so are all steps that follow from them."""
    made = checkpoint("mistral")
    report = diff(record(changed(made.ours, weights=rows_in_pairs), made.ids), made.our_trace())
    assert list(report.reasons) == ["layers.0.attn.q", "layers.0.attn.k"]
    assert sum(not row.ok for row in report.rows) > 40


def test_the_sides_are_told_apart_whichever_is_wrong(checkpoint):
    made = checkpoint("llama")
    wrong = record(changed(made.ours, weights=rows_in_pairs), made.ids)
    told = diff(made.our_trace(), wrong).reasons["layers.0.attn.q"]
    assert told is not None
    assert told.text == "rows permuted within heads (adjacent rotary pairs in B): q/k were not unpermuted"


def test_a_single_key_heads_rotation_is_measured_too():
    """One head could be turned into anything, pair by pair, but not by a steady rotation."""
    spec = model(block(attn=attention(n_kv_heads=1)))
    decoder, ids = noisy_decoder(spec), random_ids(spec, 1, 9)
    report = diff(record(changed(decoder, rope(layout="interleaved")(spec)), ids), record(decoder, ids))
    told = [reason and reason.text for reason in report.reasons.values()]
    assert told == ["RoPE layout: interleaved in A, half in B"] * 2


def test_positions_that_begin_elsewhere_are_measured():
    decoder = noisy_decoder(VARIANTS["llama"])
    ids = random_ids(decoder.spec, 1, 9)
    report = diff(record(decoder, ids, torch.arange(2, 11)[None]), record(decoder, ids))
    told = report.reasons["layers.0.attn.q_rope"]
    assert told is not None
    assert told.text == "first position: 2 in A, 0 in B"


def test_where_a_norm_rounds_to_16_bits_is_told(checkpoint):
    """transformers rounds what is normalised before the weight multiplies it; we, after."""
    made = checkpoint("qwen3_moe")
    ours = changed(made.ours).to(torch.bfloat16)
    theirs = load_transformers(made.folder, torch.bfloat16)
    traces = record(ours, made.ids), record_transformers(theirs, made.ours.spec, made.ids)
    told = explain(*traces, "layers.0.attn.q_norm")
    assert told is not None
    assert told.text == "rounding: after the weight in A, before the weight in B"


def test_two_models_of_other_shapes_differ_in_shape():
    small, large = (
        noisy_decoder(VARIANTS[name].replace(d_model=width)) for name, width in (("llama", 52), ("llama", 56))
    )
    report = diff(*(record(decoder, random_ids(decoder.spec, 1, 4)) for decoder in (small, large)))
    assert report.first is not None
    assert report.first.shapes == ((1, 4, 52), (1, 4, 56))
    assert report.reasons["embed"].text == "the shapes differ: [1, 4, 52] and [1, 4, 56]"


def test_a_step_that_only_one_model_has_is_missing_and_the_two_are_not_equal():
    spec = VARIANTS["sandwich"]
    layer = replace(spec.layers[0], attn_out_norm=None)
    decoder = noisy_decoder(spec)
    other = changed(decoder, spec.replace(layers=(layer, spec.layers[1])))
    ids = random_ids(spec, 1, 4)
    report = diff(record(decoder, ids), record(other, ids))
    assert report.missing == ["layers.0.attn_out_norm"]
    assert not report.ok


def test_traces_of_other_ids_are_not_compared():
    decoder = noisy_decoder(VARIANTS["llama"])
    with pytest.raises(ValueError, match="different ids"):
        diff(record(decoder, torch.tensor([[1, 2]])), record(decoder, torch.tensor([[1, 3]])))


# --- the measure --------------------------------------------------------------------------------


def test_the_measure_is_the_worst_relative_error_of_a_tokens_vector():
    decoder = noisy_decoder(VARIANTS["llama"])
    ids = random_ids(decoder.spec, 1, 5)
    a, b = record(decoder, ids), record(decoder, ids)
    changed_step = b.tensor("layers.1.attn_add").clone()
    changed_step[0, 3] *= 1.25
    b = replace(b, tensors={**b.tensors, "layers.1.attn_add": changed_step})
    found = difference(a, b, "layers.1.attn_add")
    assert found.relative == pytest.approx(0.2)  # ‖x - 1.25 x‖ / ‖1.25 x‖
    assert found.at[:2] == (0, 3)
    assert found.max_abs == pytest.approx(abs(found.a - found.b))
    assert found.b == pytest.approx(1.25 * found.a)


def test_a_number_that_is_not_finite_on_one_side_alone_is_infinitely_far():
    decoder = noisy_decoder(VARIANTS["llama"])
    ids = random_ids(decoder.spec, 1, 5)
    for broken in (torch.nan, torch.inf):
        a, b = record(decoder, ids), record(decoder, ids)
        head = a.tensor("head").clone().index_fill_(1, torch.tensor(2), broken)
        a = replace(a, tensors={**a.tensors, "head": head})
        assert difference(a, b, "head").relative == torch.inf
        assert difference(a, a, "head").relative == 0


def test_scores_that_no_query_looks_at_are_not_compared(checkpoint):
    decoder = checkpoint("mistral").ours
    a, b = (record(decoder, checkpoint("mistral").ids) for _ in range(2))
    scores = b.tensor("layers.0.attn.scores").clone()
    scores.masked_fill_(b.tensor("layers.0.attn.masked").isinf(), 100.0)
    b = replace(b, tensors={**b.tensors, "layers.0.attn.scores": scores})
    assert difference(a, b, "layers.0.attn.scores").relative == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [n for n in VARIANTS if n not in ("experts", "routers")])
def test_rounding_to_16_bits_is_within_what_its_dtype_allows(name: str, dtype: torch.dtype):
    ids = random_ids(VARIANTS[name], 1, 9)
    a, b = (record(noisy_decoder(VARIANTS[name], to), ids) for to in (dtype, torch.float32))
    report = diff(a, b)
    assert report.first is None
    assert diff(a, b, tolerance=1e-5).first is not None


def test_a_near_tie_that_rounding_decides_is_said_to_be_one():
    ids = random_ids(VARIANTS["experts"], 1, 9)
    a, b = (record(noisy_decoder(VARIANTS["experts"], to), ids) for to in (torch.bfloat16, torch.float32))
    report = diff(a, b)
    assert report.first is not None
    told = report.reasons["layers.3.mlp.chosen"]
    assert told is not None
    assert told.text == "1 of 9 tokens choose other experts: near ties, which the logits' rounding decides"


def test_what_is_allowed_follows_the_coarser_dtype_and_grows_with_the_root_of_the_depth():
    spec = VARIANTS["llama"]
    assert (
        tolerance_for("fp32", "bf16") == tolerance_for("bf16") > tolerance_for("fp16") > tolerance_for("fp32")
    )
    assert tolerance_for("q4_k") > tolerance_for("q8_0") > tolerance_for("fp32")
    assert [depth(spec, name) for name in ("embed", "layers.0.attn.q", "layers.2.attn.q", "head")] == [
        1,
        1,
        3,
        3,
    ]
