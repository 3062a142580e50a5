"""Generation through the cache, one text taught, one step of an optimizer, and runs on disk."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from starlette.testclient import TestClient

import served
import variants
from openbook.infer.cache import Cache
from openbook.infer.teaching import generated, teacher_forced
from openbook.ledger import Ledger, Workload
from openbook.lm import LanguageModel, load
from openbook.serve import decoding, training
from openbook.serve.explorer import Explorer
from openbook.train.lock import Lock
from served import good, refused

TEXT = "so und so und wieder so"


@pytest.fixture(scope="module")
def lm(folder: Path) -> LanguageModel:
    return load(folder, native=False)


def lines(response: Any) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


# --- the cache ---


def test_a_generation_is_told_step_by_step(client: TestClient, model: dict[str, Any], lm: LanguageModel):
    found = lines(client.post(f"/api/models/{model['id']}/cache", json={"text": TEXT, "tokens": 6}))
    ids = list(TEXT.encode())
    expected = [token.id for token in lm.tokens(ids, max_tokens=6, temperature=0)]
    steps, end = found[:-1], found[-1]
    assert [line["token"]["id"] for line in steps] == expected
    assert [line["kind"] for line in found] == ["prefill", *["decode"] * (len(expected) - 1), "end"]
    assert [line["length"] for line in steps] == [len(ids) + i for i in range(len(expected))]
    book = Ledger(served.SPEC, "fp32")
    for i, line in enumerate(steps):
        workload = Workload("decode", past=len(ids) + i - 1) if i else Workload("prefill", new=len(ids))
        assert line["flops"] == book.totals(workload).flops
        assert line["flops_without"] == book.totals(Workload("prefill", new=line["length"])).flops
        assert line["bytes"] == book.kv_bytes(1, line["length"], "fp32")
        assert line["capacity_bytes"] == Cache(served.SPEC, 1, len(ids) + 6).nbytes
        assert line["ms"] > 0
        assert line["ms_without_cache"] > 0
    assert end["totals"]["steps"] == len(expected)
    assert end["totals"]["flops"] == sum(line["flops"] for line in steps)


def test_a_window_has_as_many_slots_as_it_is_wide(client: TestClient, model: dict[str, Any]):
    first = lines(client.post(f"/api/models/{model['id']}/cache", json={"text": "abc", "tokens": 4}))
    rows = first[0]["layers"]
    assert [(row["layer"], row["times"], row["filled"], row["slots"]) for row in rows] == [
        ("0", 1, 3, 5),
        ("1-2", 2, 3, 7),
    ]
    last = first[-2]["layers"]
    assert [row["filled"] for row in last] == [5, 6]
    assert sum(row["bytes"] for row in last) == first[-2]["bytes"]


@pytest.mark.parametrize("tokens", [0, 257, "x"])
def test_as_many_tokens_cannot_be_generated(client: TestClient, model: dict[str, Any], tokens: Any):
    refused(client.post(f"/api/models/{model['id']}/cache", json={"text": "a", "tokens": tokens}), 400)


def test_a_generation_beyond_the_context_is_refused_before_it_begins(
    client: TestClient, model: dict[str, Any]
):
    url = f"/api/models/{model['id']}/cache"
    error = refused(client.post(url, json={"text": "a" * 60, "tokens": 5}), 400)
    assert "64 positions" in error["why"]


def test_an_error_on_the_way_is_the_last_line(
    client: TestClient, model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    def broken(*args: Any) -> Any:
        yield {"kind": "prefill"}
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(decoding, "generation", broken)
    found = lines(client.post(f"/api/models/{model['id']}/cache", json={"text": "a", "tokens": 2}))
    assert found[0] == {"kind": "prefill"}
    assert set(found[1]["error"]) == {"what", "why", "next"}
    assert "secret" not in str(found)


def test_a_client_that_goes_away_ends_the_generation(explorer: Explorer, model: dict[str, Any]):
    """The application is called as a server calls it: after the first line the client is gone."""
    import asyncio

    app = served.client_of(explorer).app
    body = json.dumps({"text": "a", "tokens": 60}).encode()
    sent: list[bytes] = []

    async def talk() -> None:
        gone = asyncio.Event()
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if parts:
                return parts.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body" and message["body"]:
                sent.append(message["body"])
                gone.set()

        scope = {
            "type": "http", "method": "POST", "path": f"/api/models/{model['id']}/cache", "query_string": b"",
            "headers": [(b"host", served.ADDRESS[7:].encode()), (b"content-type", b"application/json")],
        }  # fmt: skip
        await app(scope, receive, send)

    asyncio.run(talk())
    assert 1 <= len(sent) < 60
    done = threading.Event()
    explorer.worker.submit(done.set)
    assert done.wait(20)  # the worker is free again
    with explorer.store.room(explorer.store.limit, "all of it"):
        pass  # and what was promised to it is given back


def test_what_if_is_the_ledger_of_another_spec(client: TestClient, model: dict[str, Any]):
    found = good(client.get(f"/api/models/{model['id']}/cache_whatif", params={"tokens": 40}))
    sizes = {row["name"]: row["bytes"] for row in found["rows"]}
    token = 2 * 6 * 4  # a key and a value of 6 fp32 numbers
    assert sizes == {
        "mha": 8 * token * (5 + 40 + 40),
        "gqa": 2 * token * (5 + 40 + 40),
        "mqa": token * (5 + 40 + 40),
        "no_window": 2 * token * 3 * 40,
        "window": 2 * token * (5 + 40 + 40),  # 40 tokens fill no window of 1,024
    }
    assert [row["name"] for row in found["rows"] if row["this"]] == ["gqa"]


def test_latents_are_told_beside_what_they_would_be_expanded():
    found = decoding.what_if(variants.VARIANTS["latent"], "bf16", 100)
    assert [row["name"] for row in found["rows"]] == ["mha", "latent"]
    assert found["rows"][1]["bytes"] < found["rows"][0]["bytes"]


# --- a text that is taught ---


def test_a_text_is_taught_and_continued(client: TestClient, model: dict[str, Any], lm: LanguageModel):
    found = good(client.post(f"/api/models/{model['id']}/teaching", json={"text": TEXT}))
    ids = [*TEXT.encode(), 257]  # ended by <|end|>
    lesson = teacher_forced(lm.decoder, ids)
    assert [row["label"]["id"] for row in found["rows"]] == ids[1:]
    assert [row["input"]["id"] for row in found["rows"]] == ids[:-1]
    assert [row["loss"] for row in found["rows"]] == pytest.approx(
        [row.loss for row in lesson.rows], rel=1e-5
    )
    logits = lm.decoder(torch.tensor([ids[:-1]]))[0].detach()
    assert found["total"]["loss"] == pytest.approx(
        float(F.cross_entropy(logits, torch.tensor(ids[1:]))), rel=1e-5
    )
    assert (
        found["total"]["flops"] == Ledger(served.SPEC, "fp32").totals(Workload("train", new=len(TEXT))).flops
    )
    given = list(b"so und so")
    assert found["prompt"] == "so und so"
    assert found["prefill"]["tokens"] == len(given)
    drawn = generated(lm.decoder, given, len(ids) - len(given), {257}, 258)
    assert [step["token"]["id"] for step in (found["prefill"], *found["steps"])] == [
        step.id for step in drawn
    ]
    assert [row["length"] for row in found["savings"]] == [16, 64]  # as far as the model's positions go
    assert found["savings"][0]["measured"] > 0


@pytest.mark.parametrize("text", ["", "a" * 64, "a" * 10_000, "a" * 1_000_000])
def test_a_text_too_short_or_too_long_is_not_taught(client: TestClient, model: dict[str, Any], text: str):
    refused(client.post(f"/api/models/{model['id']}/teaching", json={"text": text}), 400)
    refused(client.post(f"/api/models/{model['id']}/optimizer_step", json={"text": text}), 400)


# --- one step ---


def test_a_step_of_the_optimizer_is_a_real_one(client: TestClient, model: dict[str, Any], folder: Path):
    url = f"/api/models/{model['id']}/optimizer_step"
    found = good(client.post(url, json={"text": TEXT, "lr": 0.01}))
    assert found["optimizer"] == "adamw"
    decoder = load(folder, native=False).decoder.requires_grad_(True)
    ids = [*TEXT.encode(), 257]
    before = {name: p.detach().clone() for name, p in decoder.named_parameters()}
    loss = F.cross_entropy(decoder(torch.tensor([ids[:-1]]))[0], torch.tensor(ids[1:]))
    loss.backward()
    assert found["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    # AdamW's first step, by hand: both moments are corrected to the gradient itself.
    for row in found["grads"]:
        gradient = decoder.get_parameter(row["name"]).grad
        assert row["l2"] == pytest.approx(float(gradient.norm()), rel=1e-4, abs=1e-7)
        update = 0.01 * gradient / (gradient.abs() + 1e-8)
        assert row["update_l2"] == pytest.approx(float(update.norm()), rel=1e-3, abs=1e-6)
    assert {row["name"] for row in found["grads"]} == set(before)
    mean = lambda rows: sum(row["loss"] for row in rows) / len(rows)  # noqa: E731
    assert mean(found["after"]) < mean(found["before"])
    memory = Ledger(served.SPEC, "fp32").memory(Workload("train", new=len(TEXT)), "adamw-fp32")
    assert sum(found["memory"].values()) == memory.total


def test_the_open_model_has_learned_nothing_by_it(client: TestClient, model: dict[str, Any]):
    url = f"/api/models/{model['id']}"
    before = good(client.post(url + "/teaching", json={"text": TEXT}))["total"]["loss"]
    good(client.post(url + "/optimizer_step", json={"text": TEXT, "lr": 0.5, "optimizer": "sgd"}))
    assert good(client.post(url + "/teaching", json={"text": TEXT}))["total"]["loss"] == before


def test_a_model_that_is_too_large_for_a_step_says_what_it_takes(tmp_path: Path):
    folder = served.write_model(tmp_path / "m", served.SPEC, served.byte_tokenizer())
    parameters = Ledger(served.SPEC).params.total
    with served.client_of(Explorer(12 * parameters)) as client:
        model = good(client.post("/api/models", json={"name": str(folder)}))
        url = f"/api/models/{model['id']}/optimizer_step"
        assert good(client.post(url, json={"text": "abc"}))["optimizer"] == "sgd"  # which keeps no moments
        assert "--store" in refused(client.post(url, json={"text": "abc", "optimizer": "adamw"}), 422)["next"]


@pytest.mark.parametrize("body", [{"lr": 2}, {"lr": -1}, {"lr": "x"}, {"optimizer": "lion"}])
def test_a_step_that_makes_no_sense_is_a_bad_request(client: TestClient, model: dict[str, Any], body: Any):
    refused(client.post(f"/api/models/{model['id']}/optimizer_step", json={"text": "abc", **body}), 400)


# --- runs on disk ---


def write_run(folder: Path, metrics: str, recipe: Any = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text(json.dumps(recipe or {"name": "r", "train": {"steps": 40}}))
    (folder / "metrics.jsonl").write_text(metrics)
    return folder


def rows(first: int, last: int) -> str:
    return "".join(
        json.dumps({"step": n, "loss": 5 - n / 100, "lr": 1e-3}) + "\n" for n in range(first, last)
    )


def test_runs_below_the_working_folder_are_found_and_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "one", rows(1, 11) + '{"step": 10, "heldout_nats": 4.5}\n{"step": 11, "lo')
    elsewhere = write_run(tmp_path / "far" / "away" / "from" / "here", rows(1, 3))
    (elsewhere / "model").mkdir()
    with served.client_of(Explorer(served.STORE, [str(elsewhere)])) as client:
        listed = good(client.get("/api/training"))["runs"]
        assert listed == [
            {"name": "runs/one", "state": "stopped", "step": 10, "steps": 40, "loss": 4.9},
            {"name": "far/away/from/here", "state": "done", "step": 2, "steps": 40, "loss": 4.98},
        ]
        made = [row for row in good(client.get("/api/state"))["available"] if row["kind"] == "run"]
        assert made == [{"name": "far/away/from/here", "kind": "run", "has_weights": True}]
        found = good(client.get("/api/training/runs/one"))
        assert [row["step"] for row in found["metrics"]] == [*range(1, 11), 10]
        assert found["metrics"][-1]["valid_loss"] == 4.5
        assert found["recipe"]["train"] == {"steps": 40}
        later = good(client.get("/api/training/runs%2Fone", params={"after": 8}))
        assert [row["step"] for row in later["metrics"]] == [9, 10, 10]


def test_a_run_goes_on_as_long_as_its_folder_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    folder = write_run(tmp_path / "one", rows(1, 3))

    def state() -> str:
        return training.listing([])[0]["state"]

    held = Lock(folder)
    assert [state(), state()] == ["running", "running"]
    held.release()
    assert state() == "stopped"
    Lock(folder).release()  # asking has not kept it
    (folder / "metrics.jsonl").unlink()
    assert state() == "new"
    (folder / "model").mkdir()
    assert state() == "done"
    (folder / "lock").unlink()
    os.mkfifo(folder / "lock")  # opening it would wait for ever
    assert state() == "done"


@pytest.mark.parametrize(
    "name", ["nothing", "..", "/etc", "runs%2f..%2fruns%2fone", "runs%2f..%2f..", "runs"]
)
def test_a_folder_that_is_not_listed_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "one", rows(1, 3))
    with served.client_of(Explorer(served.STORE)) as client:
        refused(client.get(f"/api/training/{name}"), 404)


def test_hostile_metrics_are_passed_over(tmp_path: Path):
    lines = ['{"step": 1, "loss": 3}', "[" * 100_000, "nonsense", '{"step": "2"}', '{"step": true}', "3", "",
             '{"step": 4, "loss": NaN, "text": "<b>", "lr": 0.5}']  # fmt: skip
    folder = write_run(tmp_path / "r", "\n".join(lines))
    (folder / "metrics.jsonl").write_bytes((folder / "metrics.jsonl").read_bytes() + b"\n\xff\xfe\n")
    assert training.read_metrics(folder / "metrics.jsonl") == [{"step": 1, "loss": 3}, {"step": 4, "lr": 0.5}]


def test_a_pipe_in_place_of_metrics_holds_nobody_up(tmp_path: Path):
    folder = write_run(tmp_path / "r", "")
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").symlink_to("/dev/zero")
    assert training.read_metrics(folder / "metrics.jsonl") == []


def test_a_long_run_is_thinned_to_what_a_chart_shows():
    many = [{"step": n, "loss": 1.0} for n in range(50_000)]
    many[777]["valid_loss"] = 1.0
    found = training.thinned(many)
    assert len(found) <= training.MOST_POINTS + 1
    assert found[-1]["step"] == 49_999
    assert many[777] in found
    assert [row["step"] for row in found] == sorted(row["step"] for row in found)
