"""A run's numbers as the server sends them, against the Python trace's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

import served
import variants
from openbook.infer import sample
from openbook.infer.sample import Sampler, SamplingParams
from openbook.lm import LanguageModel, load
from openbook.serve import books
from openbook.serve.explorer import Explorer
from openbook.spec.model import LatentAttention
from openbook.trace import Trace, attention_entropy, logit_lens, sink_share, trace_bytes, update_norms
from openbook.weights.save import save_own
from served import good, refused

TEXT = "Über 世界, und so"
MakeRun = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def lm(folder: Path) -> LanguageModel:
    return load(folder, native=False)


@pytest.fixture(scope="module")
def trace(lm: LanguageModel) -> Trace:
    return lm.trace(TEXT)


def numbers(response: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """What a binary answer holds, and what it says of itself."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/octet-stream"
    meta = json.loads(response.headers["x-openbook-meta"])
    return torch.frombuffer(bytearray(response.content), dtype=torch.float32).view(meta["shape"]), meta


# --- the run ---


def test_every_step_of_the_trace_is_told_with_its_numbers(run: MakeRun, trace: Trace):
    found = run(text=TEXT)
    assert found["ids"] == trace.ids[0].tolist()
    assert [row["name"] for row in found["steps"]] == [step.name for step in trace.steps]
    for row, step in zip(found["steps"], trace.steps, strict=True):
        assert row["shape"] == list(step.shape)
        assert row["axes"] == list(step.axes)
        assert row["dtype"] == step.dtype
        assert row["layer"] == step.layer
        for name, value in row["stats"].items():
            assert value == pytest.approx(getattr(step.statistics, name), rel=1e-12)
        ledger = trace.rows[step.name]
        assert (row["flops"], row["bytes"], row["weight_bytes"]) == (
            ledger.flops,
            ledger.activation_bytes,
            ledger.weight_bytes,
        )
        assert set(row["inputs"]) <= {"embed", *trace.tensors}
    assert any(row["seconds"] for row in found["steps"])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_run_takes_the_bytes_that_the_ledger_says(tmp_path: Path, dtype: str):
    decoder = variants.noisy_decoder(served.SPEC, {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    save_own(decoder, tmp_path / "m")
    explorer = Explorer(served.STORE)
    model = explorer.open(str(tmp_path / "m"))
    assert model.dtype == dtype
    run = explorer.start_run(model, explorer.prompt(model, ids=[5, 3, 90, 2, 17])).result(60)
    mask = 5 * 5  # shared by all layers, since five tokens fill no window
    assert run.nbytes == trace_bytes(served.SPEC, dtype, 1, 5) + mask == explorer.store.nbytes


def test_the_same_prompt_is_the_same_run_however_it_is_given(run: MakeRun, explorer: Explorer):
    first = run(text=TEXT)
    assert run(text=TEXT)["id"] == run(ids=list(TEXT.encode()))["id"] == first["id"]
    assert run(text=TEXT + ".")["id"] != first["id"]
    assert run(text=TEXT, ablate=[[0, 1]])["id"] != first["id"]
    assert (
        run(text=TEXT, ablate=[[1, 0], [0, 1], [1, 0]])["id"] == run(text=TEXT, ablate=[[0, 1], [1, 0]])["id"]
    )


def test_an_ablated_head_is_zero_and_the_run_goes_on_without_it(
    client: TestClient, run: MakeRun, lm: LanguageModel
):
    found = run(text=TEXT, ablate=[[1, 3]])
    expected = lm.trace(TEXT, ablate=[(1, 3)])
    mix, _ = numbers(client.get(f"/api/runs/{found['id']}/tensors/layers.1.attn.mix", params={"at": "0,3"}))
    assert not mix.any()
    logits, _ = numbers(client.get(f"/api/runs/{found['id']}/tensors/head", params={"at": "0", "max": 1024}))
    assert torch.equal(logits, expected.tensor("head")[0])
    assert [row["name"] for row in found["steps"] if row["edited"]] == ["layers.1.attn.mix"]


@pytest.mark.parametrize(
    "ablate", [[[3, 0]], [[0, 8]], [[0]], [[0, 1, 2]], [0], "x", [[0, -1]], [["0", "1"]]]
)
def test_a_head_that_is_not_there_cannot_be_ablated(client: TestClient, model: dict[str, Any], ablate: Any):
    refused(client.post(f"/api/models/{model['id']}/runs", json={"text": "abc", "ablate": ablate}), 400)


def test_a_removed_run_is_gone_and_comes_again_under_its_name(client: TestClient, run: MakeRun):
    found = run(text="gone")
    assert client.delete(f"/api/runs/{found['id']}").status_code == 204
    refused(client.get(f"/api/runs/{found['id']}"), 404)
    refused(client.delete(f"/api/runs/{found['id']}"), 404)
    assert run(text="gone")["id"] == found["id"]


# --- tensors ---


def test_slices_of_every_step_are_the_traces(client: TestClient, run: MakeRun, trace: Trace):
    found = run(text=TEXT)
    for step in trace.steps:
        expected = trace.tensor(step.name)
        at = ["0", *("1" for _ in step.shape[1:-2])] if len(step.shape) > 2 else []
        values, meta = numbers(
            client.get(
                f"/api/runs/{found['id']}/tensors/{step.name}",
                params={"at": ",".join(at), "max": 1024, "reduce": "none"},
            )
        )
        assert torch.equal(values, expected[tuple(map(int, at))].float())
        assert meta["full_shape"] == list(step.shape)
        assert meta["full_axes"] == list(step.axes)
        assert meta["axes"] == list(step.axes[-2:])
        assert meta["low"] == values[values.isfinite()].min()


def test_what_a_query_may_not_see_is_minus_infinity_in_the_bytes_and_null_in_json(
    client: TestClient, run: MakeRun
):
    found, name = run(text=TEXT), "layers.0.attn.masked"
    values, _ = numbers(client.get(f"/api/runs/{found['id']}/tensors/{name}", params={"at": "0,2"}))
    exact = good(client.get(f"/api/runs/{found['id']}/tensors/{name}.json", params={"at": "0,2"}))
    assert values[0, 1] == -torch.inf
    assert exact["values"][0][1] is None
    assert values[9, 3] == -torch.inf  # beyond the window of 5
    assert torch.equal(
        values.nan_to_num(neginf=0.0), torch.tensor([[x or 0.0 for x in r] for r in exact["values"]])
    )


def test_a_long_axis_comes_in_blocks(client: TestClient, run: MakeRun, trace: Trace):
    found = run(text=TEXT)
    values, meta = numbers(
        client.get(
            f"/api/runs/{found['id']}/tensors/head", params={"at": "0,3:5", "max": 100, "reduce": "mean"}
        )
    )
    assert meta["block"] == [1, 3]
    assert meta["slice_shape"] == [2, 272]
    assert meta["start"] == [3, 0]
    torch.testing.assert_close(values[:, 0], trace.tensor("head")[0, 3:5, :3].mean(-1))
    assert values.shape == (2, 91)


@pytest.mark.parametrize(
    "query",
    [
        {"at": "1"}, {"at": "0,8"}, {"at": "0,0,0,99"}, {"at": "0"}, {"at": "0,0,-1"}, {"at": "nan"},
        {"at": "0,0", "max": 0}, {"at": "0,0", "max": 1025}, {"at": "0,0", "max": "9" * 100},
        {"at": "0,0", "reduce": "max"}, {"at": "0,0", "unknown": 1}, {"at": "0," * 150},
        {"at": "0,0", "max": 3, "reduce": "none"},
    ],
)  # fmt: skip
def test_a_slice_that_is_none_is_a_bad_request(client: TestClient, run: MakeRun, query: dict[str, Any]):
    found = run(text=TEXT)
    refused(client.get(f"/api/runs/{found['id']}/tensors/layers.1.attn.scores", params=query), 400)


def test_a_query_key_may_be_given_once(client: TestClient, run: MakeRun):
    found = run(text=TEXT)
    refused(client.get(f"/api/runs/{found['id']}/tensors/head?at=0&at=0,1"), 400)


@pytest.mark.parametrize(
    "name", ["layers.9.attn.q", "nothing", "..%2f..%2fetc", "head%00", "a" * 500, "<script>"]
)
def test_a_step_that_is_not_there_is_not_found(client: TestClient, run: MakeRun, name: str):
    found = run(text=TEXT)
    response = client.get(f"/api/runs/{found['id']}/tensors/{name}")
    assert "<script>" not in json.dumps(refused(response, 404))


def test_more_numbers_than_a_table_shows_are_refused(client: TestClient, run: MakeRun):
    found = run(text=TEXT)
    refused(client.get(f"/api/runs/{found['id']}/tensors/head.json", params={"at": "0"}), 400)
    assert (
        len(good(client.get(f"/api/runs/{found['id']}/tensors/head.json", params={"at": "0,1"}))["values"])
        == 272
    )


# --- attention and the residual stream ---


def test_thumbnails_are_the_largest_of_each_block(client: TestClient, run: MakeRun, trace: Trace):
    found = run(text=TEXT)
    response = client.get(f"/api/runs/{found['id']}/attention", params={"size": 5})
    meta = json.loads(response.headers["x-openbook-meta"])
    assert (meta["L"], meta["H"], meta["size"]) == (3, 8, 5)
    images = torch.frombuffer(bytearray(response.content), dtype=torch.uint8).view(3, 8, 5, 5)
    probs = trace.tensor("layers.2.attn.probs")[0, 6]
    T = len(probs)
    assert images[2, 6, 0, 0] == round(float(probs[: -(-T // 5), : -(-T // 5)].max()) * 255)
    assert images[2, 6, 0, 4] == 0  # what lies above the diagonal
    torch.testing.assert_close(torch.tensor(meta["entropy"]), attention_entropy(trace)[:, 0].mean(-1))
    torch.testing.assert_close(torch.tensor(meta["sink"]), sink_share(trace)[:, 0].mean(-1))
    assert meta["groups"] == [[0, 0, 0, 0, 1, 1, 1, 1]] * 3


def test_a_short_prompt_has_thumbnails_of_its_own_size(client: TestClient, run: MakeRun):
    found = run(text="abc")
    response = client.get(f"/api/runs/{found['id']}/attention", params={"size": 24})
    assert len(response.content) == 3 * 8 * 3 * 3
    assert response.content[0] == 255  # the first token sees itself alone


def test_the_lens_is_the_logit_lens(client: TestClient, run: MakeRun, trace: Trace, lm: LanguageModel):
    found = good(client.get(f"/api/runs/{run(text=TEXT)['id']}/lens"))
    expected, norms = logit_lens(trace, lm.decoder, top=1), update_norms(trace)
    assert found["layers"] == [f"layers.{i}.mlp_add" for i in range(3)]
    assert [[cell["id"] for cell in row] for row in found["top"]] == expected.ids[:, 0, :, 0].tolist()
    for name, values in (("entropy", expected.entropy), ("kl", expected.kl)):
        torch.testing.assert_close(torch.tensor(found[name]), values[:, 0], rtol=1e-4, atol=1e-5)
    for name in ("attn", "mlp", "block", "stream"):
        torch.testing.assert_close(torch.tensor(found["update"][name]), getattr(norms, name)[:, 0])


def test_the_lens_of_some_positions_is_a_part_of_the_whole(client: TestClient, run: MakeRun):
    url = f"/api/runs/{run(text=TEXT)['id']}/lens"
    whole, part = good(client.get(url)), good(client.get(url, params={"start": 4, "stop": 7}))
    assert (part["start"], part["positions"]) == (4, len(TEXT.encode()))
    assert [[cell["id"] for cell in row] for row in part["top"]] == [
        [cell["id"] for cell in row[4:7]] for row in whole["top"]
    ]
    assert part["update"] == whole["update"]  # at every position: it takes no head


def test_a_run_remembers_few_of_its_answers(client: TestClient, run: MakeRun, explorer: Explorer):
    name = run(text=TEXT)["id"]
    for start in range(12):
        good(client.get(f"/api/runs/{name}/lens", params={"start": start}))
    assert list(explorer.run(name).derived)[-2:] == ["lens 10 20", "lens 11 20"]
    assert len(explorer.run(name).derived) == 8


def test_after_the_last_layer_the_lens_shows_the_models_own_logits(
    client: TestClient, run: MakeRun, trace: Trace
):
    found = good(
        client.get(f"/api/runs/{run(text=TEXT)['id']}/lens", params={"row": 2, "position": 4, "n": 5})
    )
    best = trace.tensor("head")[0, 4].topk(5)
    assert [token["id"] for token in found["tokens"]] == best.indices.tolist()
    torch.testing.assert_close(torch.tensor([token["logit"] for token in found["tokens"]]), best.values)


@pytest.mark.parametrize(
    "query",
    [
        {"row": 3, "position": 0},
        {"row": 0},
        {"position": 0},
        {"row": 0, "position": 99},
        {"start": 5, "stop": 5},
        {"start": 99},
        {"stop": 99},
    ],
)
def test_a_cell_that_the_lens_has_not_is_a_bad_request(
    client: TestClient, run: MakeRun, query: dict[str, Any]
):
    refused(client.get(f"/api/runs/{run(text=TEXT)['id']}/lens", params=query), 400)


# --- the next token ---


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "seed": 5},
        {"temperature": 2.0, "seed": 11},
        {"top_p": 0.5, "seed": 2**40},
        {"temperature": 0},
        {"top_k": 1},
    ],
)
def test_the_token_that_is_drawn_is_the_samplers(
    client: TestClient, run: MakeRun, trace: Trace, asked: dict[str, Any]
):
    found = good(client.post(f"/api/runs/{run(text=TEXT)['id']}/next", json={"position": 6, **asked}))
    params = SamplingParams(**{"seed": 0, **asked})
    logits = trace.tensor("head")[0, 6, :258]
    assert found["drawn"]["id"] == Sampler(params, 258)(logits)
    expected = sample.distribution(logits, params)
    for row in found["stages"][-1]["rows"]:
        assert row["p"] == pytest.approx(float(expected[row["id"]]), abs=1e-6)
        assert row["kept"] == (row["p"] > 0)
    assert found["stages"][-1]["kept"] == int((expected > 0).sum())
    assert (found["uniform"] is None) == params.greedy


def test_the_drawn_number_points_at_the_drawn_token(client: TestClient, run: MakeRun):
    url = f"/api/runs/{run(text=TEXT)['id']}/next"
    for seed in range(20):
        found = good(client.post(url, json={"top_k": 15, "seed": seed, "n": 15}))
        last = found["stages"][-1]
        assert last["ordered"]
        begin = 0.0
        for row in last["rows"]:
            if row["id"] == found["drawn"]["id"]:
                assert begin - 1e-6 <= found["uniform"] <= begin + row["p"] + 1e-6
            begin += row["p"]


def test_the_token_that_really_follows_is_told_with_its_rank(client: TestClient, run: MakeRun, trace: Trace):
    url = f"/api/runs/{run(text=TEXT)['id']}/next"
    found = good(client.post(url, json={"position": 0}))["actual"]
    logprobs = trace.tensor("head")[0, 0, :258].log_softmax(-1)
    token = int(trace.ids[0, 1])
    assert found["id"] == token
    assert found["logprob"] == pytest.approx(float(logprobs[token]), abs=1e-6)
    assert found["rank"] == int((logprobs > logprobs[token]).sum()) + 1
    assert good(client.post(url, json={}))["actual"] is None


@pytest.mark.parametrize(
    "body",
    [
        {"position": 99}, {"position": -1}, {"temperature": -1}, {"top_p": 2}, {"seed": -1}, {"n": 0},
        {"n": 10**6}, {"temperature": "hot"}, {"top_k": 1.5}, {"x": 1}, [],
    ],
)  # fmt: skip
def test_sampling_that_makes_no_sense_is_a_bad_request(client: TestClient, run: MakeRun, body: Any):
    refused(client.post(f"/api/runs/{run(text=TEXT)['id']}/next", json=body), 400)


# --- two runs ---


def test_a_run_beside_itself_does_not_differ(client: TestClient, run: MakeRun):
    name = run(text=TEXT)["id"]
    found = good(client.post("/api/compare", json={"a": name, "b": name}))
    assert {(row["max_abs"], row["rel"], row["same_shape"]) for row in found["steps"]} == {(0.0, 0.0, True)}
    assert found["kl"] == 0
    assert all(row["p_a"] == row["p_b"] for row in found["next"])


def test_an_ablated_head_makes_a_difference_from_its_own_step_on(
    client: TestClient, run: MakeRun, trace: Trace, lm: LanguageModel
):
    other = lm.trace(TEXT, ablate=[(1, 3)])
    a, b = run(text=TEXT)["id"], run(text=TEXT, ablate=[[1, 3]])["id"]
    found = good(client.post("/api/compare", json={"a": a, "b": b}))
    by_name = {row["name"]: row for row in found["steps"]}
    names = list(by_name)
    first = names.index("layers.1.attn.mix")
    assert all(by_name[name]["max_abs"] == 0 for name in names[:first])
    x, y = trace.tensor("layers.2.mlp_add").double(), other.tensor("layers.2.mlp_add").double()
    row = by_name["layers.2.mlp_add"]
    assert row["max_abs"] == pytest.approx(float((x - y).abs().max()))
    assert row["rel"] == pytest.approx(float((y - x).norm() / x.norm()))
    assert row["cos"] == pytest.approx(float(torch.cosine_similarity(x.flatten(), y.flatten(), 0)))
    p, q = (t.tensor("head")[0, -1, :258].double().log_softmax(-1) for t in (trace, other))
    assert found["kl"] == pytest.approx(float((p.exp() * (p - q)).sum()))
    assert found["next"][0]["p_a"] == pytest.approx(float(p.exp()[found["next"][0]["id"]]))


def test_prompts_of_two_lengths_are_compared_at_their_last_tokens(client: TestClient, run: MakeRun):
    a, b = run(text="one")["id"], run(text="three")["id"]
    found = good(client.post("/api/compare", json={"a": a, "b": b}))
    by_name = {row["name"]: row for row in found["steps"]}
    assert not any(row["same_shape"] for row in found["steps"])
    assert by_name["embed"]["max_abs"] == 0  # both end in an e
    assert by_name["head"]["max_abs"] > 0
    assert by_name["layers.0.attn.scores"]["max_abs"] is None


def test_a_run_that_is_gone_cannot_be_compared(client: TestClient, run: MakeRun):
    refused(client.post("/api/compare", json={"a": run(text=TEXT)["id"], "b": "gone"}), 404)


# --- every kind of model ---


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_every_variant_can_be_looked_into(name: str, tmp_path: Path):
    """All answers about a run, for each choice that a spec can make."""
    spec = variants.VARIANTS[name]
    folder = served.write_model(tmp_path / "model", spec)
    with served.client_of(Explorer(served.STORE)) as client:
        opened = good(client.post("/api/models", json={"name": str(folder)}))
        found = good(client.post(f"/api/models/{opened['id']}/runs", json={"ids": [5, 3, 90, 2, 17, 4, 8]}))
        linear, squared = books.trace_growth(spec, "fp32")
        assert trace_bytes(spec, "fp32", 1, 7) < found["bytes"] <= 7 * linear + 49 * squared
        heads = [block.attn.n_heads for block in spec.layers]
        assert [row["n_heads"] for row in found["heads"]] == heads
        latent = isinstance(spec.layers[0].attn, LatentAttention)
        assert (found["heads"][0]["n_kv_heads"] == heads[0]) or not latent
        at = f"/api/runs/{found['id']}"
        for path in ("/attention", "/lens", "/tensors/layers.1.attn.probs?at=0,0", "/tensors/head?at=0"):
            assert client.get(at + path).status_code == 200
        good(client.post(at + "/next", json={}))
        good(client.get(f"/api/models/{opened['id']}/cache_whatif"))
        good(client.get(f"/api/models/{opened['id']}/ledger"))
        lines = client.post(f"/api/models/{opened['id']}/cache", json={"ids": [5, 3], "tokens": 2}).text
        assert [json.loads(line)["kind"] for line in lines.splitlines()] == ["prefill", "decode", "end"]
