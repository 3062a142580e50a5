"""What is told of a conversion is what the conversion does, tensor by tensor, and no value is read for it."""

from collections import Counter
from pathlib import Path

import pytest

from gguf_models import model_type_of, noisy, scaled, tiny
from openbook.ledger import ledger
from openbook.sources import resolve
from openbook.spec.gguf import ARCHITECTURES
from openbook.spec.model import LatentAttention, Llama3Scaling, ModelSpec
from openbook.weights.dialects.table import Place
from openbook.weights.dialects.transforms import (
    Chain,
    Grouped,
    Identity,
    Interleaved,
    RowsPermuted,
    Transposed,
)
from openbook.weights.dialects.words import loading, storing
from openbook.weights.explain import Format, Step, explain, pattern
from openbook.weights.save import save_hf
from openbook.weights.save_gguf import save_gguf
from openbook.weights.tensors import open_tensors


def saved(spec: ModelSpec, path: Path, model_type: str = "") -> Path:
    if path.suffix == ".gguf":
        save_gguf(noisy(spec), path, "F32", model_type=model_type)
    else:
        save_hf(noisy(spec), path, "fp32", model_type=model_type)
    return path


def patterns(path: Path) -> set[str]:
    return {pattern(name) for name in open_tensors(resolve(path)).stored}


def told(path: Path, target: Format) -> dict[tuple[str, str], str]:
    return {(step.ours, step.target): step.words for step in explain(resolve(path), target)}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_names_and_shapes_are_those_of_both_files(name: str, tmp_path: Path):
    spec = tiny(name)
    folder, file = (saved(spec, tmp_path / path, model_type_of(name)) for path in ("m", "m.gguf"))
    ways: tuple[tuple[Path, Path, Format], ...] = ((folder, file, "gguf"), (file, folder, "hf"))
    for source, other, target in ways:
        steps = explain(resolve(source), target)
        assert {part for step in steps for part in step.source.split(", ")} == patterns(source)
        stored = {(pattern(name), found.shape) for name, found in open_tensors(resolve(other)).stored.items()}
        assert {(step.target, step.shape) for step in steps} == stored


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_parameter_is_told_of_once_for_each_tensor_it_goes_into(name: str, tmp_path: Path):
    spec = tiny(name)
    parameters = Counter(pattern(row.name) for row in ledger(spec).tensors if row.tie is None)
    counted: Counter[tuple[str, str]] = Counter()
    for step in explain(resolve(saved(spec, tmp_path / "m.gguf", model_type_of(name))), "hf"):
        counted[step.ours, step.target] += step.times
    assert {(ours, times) for (ours, _), times in counted.items()} == set(parameters.items())


def test_rows_for_adjacent_pairs_are_permuted_there_and_back(tmp_path: Path):
    folder, file = saved(tiny("llama"), tmp_path / "m"), saved(tiny("llama"), tmp_path / "m.gguf")
    k = "layers.{n}.attn.k.weight"
    there, back = told(folder, "gguf"), told(file, "hf")
    assert there[k, "blk.{n}.attn_k.weight"] == "rows permuted for adjacent rotary pairs, 2 heads"
    expected = "rows permuted back from adjacent rotary pairs, 2 heads"
    assert back[k, "model.layers.{n}.self_attn.k_proj.weight"] == expected


def test_experts_are_stacked_or_taken_apart(tmp_path: Path):
    folder, file = saved(tiny("llama"), tmp_path / "m"), saved(tiny("llama"), tmp_path / "m.gguf")
    up = "layers.{n}.mlp.experts.up.weight"
    assert told(folder, "gguf")[up, "blk.{n}.ffn_up_exps.weight"] == "stacked from 5 experts"
    target = "model.layers.{n}.block_sparse_moe.experts.{i}.w3.weight"
    assert told(file, "hf")[up, target] == "5 experts taken apart"


def test_norms_have_1_added_or_taken_off(tmp_path: Path):
    folder, file = saved(tiny("gemma3"), tmp_path / "m"), saved(tiny("gemma3"), tmp_path / "m.gguf")
    norm = "layers.{n}.attn.q_norm.weight"
    assert told(folder, "gguf")[norm, "blk.{n}.attn_q_norm.weight"] == "1 added"
    assert told(file, "hf")[norm, "model.layers.{n}.self_attn.q_norm.weight"] == "1 taken off"


def test_what_is_joined_in_one_file_and_not_in_the_other_is_said(tmp_path: Path):
    folder, file = saved(tiny("phi2"), tmp_path / "m"), saved(tiny("gpt2"), tmp_path / "m.gguf")
    assert told(folder, "gguf")["layers.{n}.attn.q.weight", "blk.{n}.attn_q.weight"] == ""
    words = told(file, "hf")["layers.{n}.attn.v.weight", "transformer.h.{n}.attn.c_attn.weight"]
    assert words == "split into q, k and v, then q, k and v joined, then transposed"


def test_latent_keys_and_values_are_told_as_rows_of_each_head(tmp_path: Path):
    steps = told(saved(tiny("deepseek2"), tmp_path / "m"), "gguf")
    kv_up = "layers.{n}.attn.kv_up.weight"
    attn = tiny("deepseek2").layers[0].attn
    assert isinstance(attn, LatentAttention)
    n, u, heads = attn.nope_dim, attn.v_dim, attn.n_heads
    keys, values = (steps[kv_up, f"blk.{{n}}.attn_{letter}_b.weight"] for letter in "kv")
    assert keys == f"rows 0 to {n - 1} of each of {heads} heads taken, then transposed"
    assert values == f"rows {n} to {n + u - 1} of each of {heads} heads taken"


def test_tables_of_the_rotation_are_made_for_a_file(tmp_path: Path):
    spec = scaled("llama", Llama3Scaling(8.0, 1.0, 4.0, 32))
    steps = explain(resolve(saved(spec, tmp_path / "m")), "gguf")
    made = "made of the configuration's rotary scaling"
    assert steps[-1] == Step("", "", "rope_freqs.weight", (6,), made, 1)


def test_a_layer_and_an_expert_have_letters():
    name = "model.layers.31.mlp.experts.7.up_proj.weight"
    assert pattern(name) == "model.layers.{n}.mlp.experts.{i}.up_proj.weight"


@pytest.mark.parametrize(
    ("transform", "out", "back"),
    [
        (Identity(), "", ""),
        (Transposed(), "transposed", "transposed"),
        (Interleaved(), "interleaved", "interleaving undone"),
        (
            Chain((RowsPermuted(4), Transposed())),
            "rows permuted for adjacent rotary pairs, 4 heads, then transposed",
            "transposed, then rows permuted back from adjacent rotary pairs, 4 heads",
        ),
        (
            Grouped(8, 2),
            "rows ordered as 2 groups of queries, key and value",
            "rows ordered anew from 2 groups of queries, key and value",
        ),
    ],
)
def test_words_of_an_arrangement_say_the_way_out_and_the_way_back(transform, out, back):
    place = Place("stored", (8, 8), ("layers.0.attn.q.weight",), (8,), transform)
    assert (storing([place]), loading([place])) == (out, back)
