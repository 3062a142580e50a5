"""Models, their overview and ledger, and prompts as tokens, as the server tells them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

import served
import variants
from openbook.ledger import Ledger, Workload
from openbook.lm import load
from openbook.serve import books
from openbook.serve.app import Api
from openbook.serve.explorer import Explorer
from openbook.spec.presets import preset
from openbook.trace import trace_bytes
from served import good, refused


def url(model: dict[str, Any], rest: str = "") -> str:
    return f"/api/models/{model['id']}{rest}"


# --- models ---


def test_an_open_model_tells_what_its_spec_says(client: TestClient, model: dict[str, Any], folder: Path):
    assert model["name"] == str(folder)
    assert model["has_weights"]
    assert model["has_tokenizer"]
    assert model["has_chat"]
    assert model["dtype"] == "fp32"
    assert model["params"] == Ledger(served.SPEC).params.total
    numbers = {"layers": 3, "d_model": 52, "n_heads": 8, "n_kv_heads": 2, "head_dim": 6, "d_ff": 80}
    assert {name: model["spec"][name] for name in numbers} == numbers
    assert [(row["n_heads"], row["n_kv_heads"]) for row in model["heads"]] == [(8, 2)] * 3
    assert good(client.get(url(model))) == model


def test_opening_a_model_again_gives_the_same_one(client: TestClient, model: dict[str, Any], folder: Path):
    other = good(client.post("/api/models", json={"name": f"{folder}/../{folder.name}"}))
    assert other["id"] == model["id"]
    assert [row["id"] for row in good(client.get("/api/state"))["models"]].count(model["id"]) == 1


def test_a_file_that_has_changed_is_another_model(tmp_path: Path):
    explorer = Explorer(served.STORE)
    before = explorer.open(str(served.write_model(tmp_path / "a", served.SPEC)))
    (tmp_path / "a").rename(tmp_path / "old")
    after = explorer.open(str(served.write_model(tmp_path / "a", served.SPEC)))
    assert before.id != after.id


def test_a_preset_has_books_and_no_weights(client: TestClient):
    model = good(client.post("/api/models", json={"name": "gpt3-175b"}))
    assert model["params"] == Ledger(preset("gpt3-175b")).params.total
    assert not model["has_weights"]
    assert "no weights" in refused(client.post(url(model, "/runs"), json={"ids": [1, 2]}), 422)["what"]


@pytest.mark.parametrize("name", ["no-such-model", "/etc/passwd", "/no/such/folder", "", "a\0b", "~nobody/x"])
def test_what_is_no_model_is_an_error_of_one_line(client: TestClient, name: str):
    response = client.post("/api/models", json={"name": name})
    assert response.status_code in (404, 422)
    assert "\n" not in refused(response, response.status_code)["why"]


def test_a_model_whose_weights_do_not_fit_its_description_is_refused(client: TestClient, tmp_path: Path):
    wrong = served.write_model(tmp_path / "wrong", served.SPEC)
    config = wrong / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 272', '"vocab_size": 273'))
    assert "embed.weight" in refused(client.post("/api/models", json={"name": str(wrong)}), 422)["why"]


def test_the_oldest_model_is_closed_when_too_many_are_open(tmp_path: Path):
    explorer = Explorer(served.STORE)
    names = [str(served.write_model(tmp_path / str(i), served.SPEC)) for i in range(9)]
    opened = [explorer.open(name) for name in names]
    assert explorer.models() == opened[1:]
    with served.client_of(explorer) as client:
        refused(client.get(f"/api/models/{opened[0].id}"), 404)


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_what_a_run_may_take_is_its_trace_and_little_more(name: str):
    spec = variants.VARIANTS[name]
    linear, squared = books.trace_growth(spec, "fp32")
    for tokens in (1, 3, 50):
        promised = linear * tokens + squared * tokens**2
        assert trace_bytes(spec, "fp32", 1, tokens) < promised < 1.02 * trace_bytes(spec, "fp32", 1, tokens)
    most = books.longest_trace((linear, squared), 10**7)
    assert linear * most + squared * most**2 <= 10**7 < linear * (most + 1) + squared * (most + 1) ** 2


# --- the ledger ---


def test_the_overview_is_the_ledger(client: TestClient, model: dict[str, Any]):
    found = good(client.get(url(model, "/overview"), params={"tokens": 9}))
    book = Ledger(served.SPEC, "fp32")
    workload = Workload("prefill", new=9, last_only=False)
    rows = {row.name: row for row in book.ops(workload)}
    assert [stage["id"] for stage in found["stages"]] == [
        "embed",
        "layers.0",
        "layers.1-2",
        "final_norm",
        "head",
    ]
    assert [stage["count"] for stage in found["stages"]] == [1, 1, 2, 1, 1]
    for stage in found["stages"]:
        for step in stage["steps"]:
            row = rows[step["name"]]
            assert (tuple(step["shape"]), step["flops"], step["bytes"]) == (
                row.out_shape,
                row.flops,
                row.activation_bytes,
            )
    assert sum(stage["count"] * stage["params"] for stage in found["stages"]) == book.params.total
    assert sum(stage["count"] * stage["flops"] for stage in found["stages"]) == book.totals(workload).flops
    assert found["totals"] == {
        "params": book.params.total,
        "flops": book.totals(workload).flops,
        "bytes": book.weight_bytes,
    }
    sizes = {"B": 1, "T": 9, "D": 52, "H": 8, "G": 2, "K": 6, "F": 80, "V": 272, "L": 3}
    assert {letter: found["letters"][letter] for letter in sizes} == sizes


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_the_overview_of_every_variant_adds_up(name: str):
    spec = variants.VARIANTS[name]
    found = books.overview(spec, "bf16", 5)
    book = Ledger(spec, "bf16")
    assert sum(stage["count"] * stage["params"] for stage in found["stages"]) == book.params.total
    assert sorted(layer for stage in found["stages"] for layer in stage["layers"]) == list(
        range(spec.n_layers)
    )


def test_a_tied_head_is_counted_once():
    found = books.overview(preset("gpt2"), "fp32", 4)
    head = next(stage for stage in found["stages"] if stage["id"] == "head")
    assert head["params"] == 0
    assert head["steps"][0]["params"] == 50_257 * 768
    assert head["steps"][0]["tied_to"] == "embed.weight"
    assert sum(stage["count"] * stage["params"] for stage in found["stages"]) == 124_439_808


@pytest.mark.parametrize(
    ("query", "workload"),
    [
        ({"tokens": 7}, Workload("prefill", new=7)),
        ({"tokens": 1, "past": 40, "mode": "decode", "batch": 3}, Workload("decode", 3, 1, 40)),
        ({"tokens": 11, "mode": "train"}, Workload("train", new=11)),
        ({"tokens": 13, "attention": "full"}, Workload("prefill", new=13, attention="full")),
    ],
)
def test_the_ledger_is_the_ledger(client: TestClient, model: dict[str, Any], query: Any, workload: Workload):
    found = good(client.get(url(model, "/ledger"), params=query))
    book = Ledger(served.SPEC, "fp32")
    assert (
        found["totals"]["flops"] == book.totals(workload).flops == sum(row["flops"] for row in found["steps"])
    )
    assert found["totals"]["memory_bytes"] == book.memory(workload).total
    assert found["conventions"] == book.conventions(workload)
    assert [(row["name"], row["params"]) for row in found["tensors"]] == [
        (row.name, row.count) for row in book.tensors
    ]
    assert [row["name"] for row in found["steps"]] == [row.name for row in book.ops(workload)]


def test_a_model_of_very_many_layers_has_each_kind_once():
    spec = variants.model(*[variants.block()] * 9_999)
    found = books.ledger(spec, "bf16", "prefill", 5, 0, 1, "causal")
    assert found["folded"]
    assert len(found["tensors"]) < 20
    assert sum(row["times"] * row["params"] for row in found["tensors"]) == Ledger(spec).params.total


@pytest.mark.parametrize(
    "query",
    [
        {"tokens": 0}, {"tokens": 10**8}, {"tokens": "9" * 5000}, {"tokens": "1.5"}, {"tokens": ""},
        {"mode": "dream"}, {"dtype": "fp3"}, {"past": -1}, {"mode": "train", "past": 3}, {"token": 3},
    ],
)  # fmt: skip
def test_a_question_that_makes_no_sense_is_a_bad_request(
    client: TestClient, model: dict[str, Any], query: Any
):
    refused(client.get(url(model, "/ledger"), params=query), 400)


# --- tokens ---


def test_a_text_is_told_as_its_tokens(client: TestClient, model: dict[str, Any], folder: Path):
    found = good(client.post(url(model, "/tokens"), json={"text": "é 世<|end|>"}))
    lm = load(folder, native=False)
    assert found["ids"] == lm.tokenizer.prompt("é 世<|end|>") == list("é 世<|end|>".encode())
    assert found["n_bytes"] == len("é 世<|end|>".encode())
    pieces = found["pieces"]
    assert [piece["bytes"] for piece in pieces[:3]] == ["c3", "a9", "20"]
    assert [piece["whole"] for piece in pieces[:6]] == ["é", "é", " ", "世", "世", "世"]
    assert [piece["char_group"] for piece in pieces[:6]] == [0, 0, 1, 2, 2, 2]
    assert pieces[0]["text"] == "\N{REPLACEMENT CHARACTER}"
    assert not any(piece["special"] for piece in pieces)  # what a person types is never a control token
    assert {piece["from"] for piece in pieces} == {"content"}


def test_a_chat_says_which_tokens_the_template_wrote(client: TestClient, model: dict[str, Any], folder: Path):
    said = "a<|end|>世"
    found = good(client.post(url(model, "/tokens"), json={"text": said, "chat": True, "system": "Be"}))
    lm = load(folder, native=False)
    messages = [{"role": "system", "content": "Be"}, {"role": "user", "content": said}]
    assert found["ids"] == lm.chat_ids(messages)
    content = b"".join(bytes.fromhex(p["bytes"]) for p in found["pieces"] if p["from"] == "content").decode()
    assert content == "Be" + said
    assert [p["text"] for p in found["pieces"] if p["special"]] == ["<|start|>", "<|end|>"] * 2 + [
        "<|start|>"
    ]
    assert found == good(client.post(url(model, "/tokens"), json={"messages": messages}))


@pytest.mark.parametrize(
    "body",
    [
        {}, {"text": "a", "ids": [1]}, {"text": 3}, {"text": ""}, {"ids": []}, {"ids": [272]}, {"ids": [-1]},
        {"ids": [True]}, {"ids": ["1"]}, {"ids": 1}, {"messages": []}, {"messages": [{"role": 3}]},
        {"messages": ["hi"]}, {"text": "a", "chat": "yes"}, {"text": "a", "unknown": 1},
    ],
)  # fmt: skip
def test_a_prompt_that_is_none_is_a_bad_request(client: TestClient, model: dict[str, Any], body: Any):
    refused(client.post(url(model, "/tokens"), json=body), 400)


def test_half_a_character_in_json_is_a_bad_request(client: TestClient, model: dict[str, Any]):
    body, headers = rb'{"text": "a\ud800"}', {"content-type": "application/json"}
    assert (
        "surrogate" in refused(client.post(url(model, "/tokens"), content=body, headers=headers), 400)["why"]
    )


def test_an_id_beyond_the_vocabulary_shows_its_number(client: TestClient, model: dict[str, Any]):
    found = good(client.post(url(model, "/tokens"), json={"ids": [65, 271]}))
    assert [piece["text"] for piece in found["pieces"]] == ["A", ""]


def test_a_model_without_a_tokenizer_takes_ids(client: TestClient, tmp_path: Path):
    opened = good(
        client.post("/api/models", json={"name": str(served.write_model(tmp_path / "m", served.SPEC))})
    )
    assert not opened["has_tokenizer"]
    refused(client.post(url(opened, "/tokens"), json={"text": "a"}), 400)
    found = good(client.post(url(opened, "/tokens"), json={"ids": [5, 7]}))
    assert [piece["text"] for piece in found["pieces"]] == ["#5", "#7"]


def test_the_worker_has_pytorchs_threads_and_those_who_look_have_one(folder: Path):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        explorer = Explorer(served.STORE)
        api = Api(explorer)
        asyncio.run(api._read(int))
        torch.set_num_threads(3)  # as the loading of weights does, back from one
        assert asyncio.run(api._read(torch.get_num_threads)) == 1
        assert explorer.worker.submit(torch.get_num_threads).result(30) == 3
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
