"""Who may talk to the server, and what may be asked of it: nothing from another site, nothing too large."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import served
from bounded import bounded_work
from openbook.serve import explorer as explorer_module
from openbook.serve import static
from openbook.serve.errors import ApiError, api_error
from openbook.serve.explorer import Explorer
from openbook.serve.security import MAX_BODY
from openbook.serve.worker import WAITING, Worker
from served import ADDRESS, PORT, good, refused

JSON = {"content-type": "application/json"}


# --- from where ---


@pytest.mark.parametrize("host", [f"127.0.0.1:{PORT}", f"localhost:{PORT}", f"LOCALHOST:{PORT}"])
def test_this_machine_is_answered(client: TestClient, host: str):
    assert client.get("/api/state", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["example.com", f"example.com:{PORT}", "127.0.0.1", "127.0.0.1:8010", f"127.0.0.1.example.com:{PORT}",
     f"0.0.0.0:{PORT}", "", f"127.0.0.1:{PORT}, x"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/", "/api/state"])
def test_a_name_that_someone_lets_point_here_is_not(client: TestClient, host: str, path: str):
    refused(client.get(path, headers={"host": host}), 403)


def test_two_hosts_are_none(client: TestClient):
    refused(
        client.get("/api/state", headers=[("host", f"127.0.0.1:{PORT}"), ("host", f"127.0.0.1:{PORT}")]), 403
    )


@pytest.mark.parametrize(
    "origin", ["http://example.com", "null", f"https://127.0.0.1:{PORT}", "http://127.0.0.1", ""]
)
def test_a_page_from_elsewhere_is_refused(client: TestClient, origin: str):
    refused(client.get("/api/state", headers={"origin": origin}), 403)
    refused(client.post("/api/models", json={"name": "gpt2"}, headers={"origin": origin}), 403)


def test_our_own_page_is_answered(client: TestClient):
    for origin in (ADDRESS, f"http://localhost:{PORT}"):
        assert client.get("/api/state", headers={"origin": origin}).status_code == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_another_site_cannot_embed_an_answer_but_may_link_to_the_page(client: TestClient, site: str):
    refused(client.get("/api/state", headers={"sec-fetch-site": site}), 403)
    assert client.get("/", headers={"sec-fetch-site": site}).status_code == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_a_form_of_another_page_is_no_request(client: TestClient, kind: str):
    body = json.dumps({"name": "gpt2"})
    refused(client.post("/api/models", content=body, headers={"content-type": kind}), 400)


# --- what comes with an answer ---


def test_every_answer_forbids_scripts_from_elsewhere(client: TestClient, model: dict[str, Any]):
    answers = [
        client.get("/"),
        client.get("/api/state"),
        client.get("/nothing"),
        client.get("/api/nothing"),
        client.get("/", headers={"host": "x"}),
        client.post(f"/api/models/{model['id']}/cache", json={"text": "a", "tokens": 1}),
        client.put("/api/state", headers=JSON),
    ]
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in answer.headers
        assert "server" not in answer.headers


# --- files ---


def test_the_page_is_served_with_its_type_and_is_asked_for_anew(client: TestClient):
    page = client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["cache-control"] == "no-cache"
    assert page.content == (static.WEB / "index.html").read_bytes()
    again = client.get("/", headers={"if-none-match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.head("/").headers["etag"] == page.headers["etag"]


def test_every_file_of_the_page_is_served_and_no_other(client: TestClient):
    files = [file for file in static.WEB.rglob("*") if file.is_file() and not file.name.startswith(".")]
    assert len(files) > 20
    for file in files:
        answer = client.get("/" + file.relative_to(static.WEB).as_posix())
        if file.suffix in static.TYPES:
            assert answer.content == file.read_bytes()
            assert answer.headers["content-type"] == static.TYPES[file.suffix]
        else:
            refused(answer, 404)
    assert client.get("/app.js").headers["content-type"] == "text/javascript; charset=utf-8"


@pytest.mark.parametrize(
    "path",
    [
        "/%2e%2e/app.py", "/..%2fapp.py", "/%2e%2e%2f%2e%2e%2f__init__.py", "/web/..%2f..%2fapp.py",
        "//etc/passwd", "/%2fetc%2fpasswd", "/views", "/views/", "/i18n", "/.git/config", "/app.js%00.html",
        "/app.js/", "/APP.JS", "/views/%2e%2e/app.js", "/..\\app.py", "/%c0%ae%c0%ae/app.py", "/~root",
        "/index.html/x",
    ],
)  # fmt: skip
def test_what_is_no_file_of_the_page_is_not_found(client: TestClient, path: str):
    refused(client.get(path), 404)


# --- what may be asked ---


def test_a_body_is_bounded_whatever_its_header_says(client: TestClient, model: dict[str, Any]):
    url = f"/api/models/{model['id']}/tokens"
    refused(client.post(url, content=b" " * (MAX_BODY + 1), headers=JSON), 413)
    refused(client.post(url, content=b"{}", headers={**JSON, "content-length": "9" * 30}), 413)

    def chunks() -> Any:
        for _ in range(5):
            yield b" " * 1_000_000

    refused(client.post(url, content=chunks(), headers=JSON), 413)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"3", b"null", b'{"name": NaN}', b"\xff\xfe", b"[" * 100_000, b"{}",
        b'{"name": ' + b"9" * 10_000 + b"}", b'{"name": "gpt2", "x": 1}', b'{"name": ["gpt2"]}',
    ],
)  # fmt: skip
def test_a_body_that_is_no_such_object_is_a_bad_request(client: TestClient, body: bytes):
    with bounded_work(5):
        refused(client.post("/api/models", content=body, headers=JSON), 400)


def test_an_address_that_is_not_there_is_not_found(client: TestClient):
    for path in ("/api", "/api/", "/api/models/x", "/api/runs/x", "/api/runs/x/lens", "/api/training/x"):
        refused(client.get(path), 404)
    for method in ("PUT", "PATCH"):
        assert client.request(method, "/api/state", headers=JSON).status_code in (404, 405)


def test_a_prompt_of_a_million_tokens_is_refused_before_it_is_read(client: TestClient, model: dict[str, Any]):
    url = f"/api/models/{model['id']}/runs"
    with bounded_work(2):
        error = refused(client.post(url, json={"text": "a " * 1_000_000}), 413)
    assert "2,000,000 characters" in error["why"]
    assert f"{model['limits']['prompt_chars']:,}" in error["why"]
    error = refused(client.post(url, json={"ids": [1] * 1_000_000}), 413)
    assert f"at most {model['limits']['tokens']} tokens" in error["why"]
    messages = [{"role": "user", "content": "a " * 1_000_000}]
    refused(client.post(url, json={"messages": messages}), 413)


def test_the_longest_prompt_fits_and_one_more_token_does_not(tmp_path: Path):
    explorer = Explorer(700_000)
    folder = served.write_model(tmp_path / "m", served.SPEC, served.byte_tokenizer())
    with served.client_of(explorer) as client:
        model = good(client.post("/api/models", json={"name": str(folder)}))
        most = model["limits"]["tokens"]
        assert 5 < most < served.SPEC.max_positions
        found = good(client.post(f"/api/models/{model['id']}/runs", json={"text": "a" * most}))
        assert found["bytes"] <= 700_000
        refused(client.post(f"/api/models/{model['id']}/runs", json={"text": "a" * (most + 1)}), 413)


def test_runs_that_are_kept_never_take_more_than_the_store(tmp_path: Path):
    explorer = Explorer(250_000)
    folder = served.write_model(tmp_path / "m", served.SPEC, served.byte_tokenizer())
    with served.client_of(explorer) as client:
        model = good(client.post("/api/models", json={"name": str(folder)}))
        names = [
            good(client.post(f"/api/models/{model['id']}/runs", json={"text": text}))["id"]
            for text in ("abcdefgh", "bcdefghi", "cdefghij", "defghijk", "efghijkl", "fghijklm")
        ]
        state = good(client.get("/api/state"))["store"]
        assert state["bytes"] <= state["limit"] == 250_000
        assert [row["id"] for row in state["runs"]] == names[-len(state["runs"]) :] != names
        refused(client.get(f"/api/runs/{names[0]}"), 404)


# --- many at once ---


def test_two_tabs_that_ask_for_one_run_have_it_computed_once(
    client: TestClient, model: dict[str, Any], explorer: Explorer, monkeypatch: pytest.MonkeyPatch
):
    begun, go_on, made = threading.Event(), threading.Event(), []
    record = explorer_module.record

    def slow(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        go_on.wait(20)
        made.append(args)
        return record(*args, **kwargs)

    monkeypatch.setattr(explorer_module, "record", slow)
    found: list[Any] = []

    def ask() -> None:
        found.append(good(client.post(f"/api/models/{model['id']}/runs", json={"text": "two tabs"}))["id"])

    tabs = [threading.Thread(target=ask) for _ in range(3)]
    for tab in tabs:
        tab.start()
    begun.wait(20)
    assert good(client.get("/api/state"))  # others are answered meanwhile
    go_on.set()
    for tab in tabs:
        tab.join(20)
    assert len(found) == 3
    assert len(set(found)) == 1
    assert len(made) == 1


def test_an_error_of_the_worker_is_an_answer_without_its_traceback(
    client: TestClient, model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("the secret path /home/x")

    monkeypatch.setattr(explorer_module, "record", broken)
    error = refused(client.post(f"/api/models/{model['id']}/runs", json={"text": "broken"}), 500)
    assert "secret" not in json.dumps(error)
    monkeypatch.undo()
    good(client.post(f"/api/models/{model['id']}/runs", json={"text": "broken"}))  # and it can be tried again


def test_a_pass_that_runs_out_of_memory_says_so(
    client: TestClient, model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    def greedy(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(explorer_module, "record", greedy)
    refused(client.post(f"/api/models/{model['id']}/runs", json={"text": "greedy"}), 507)


def test_few_jobs_may_wait():
    worker, go_on, begun = Worker(), threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        go_on.wait(20)

    worker.submit(wait)
    begun.wait(20)
    waiting = [worker.submit(lambda: 3) for _ in range(WAITING)]
    with pytest.raises(ApiError) as error:
        worker.submit(lambda: 3)
    assert error.value.status == 503
    waiting[0].cancel()
    go_on.set()
    assert [job.result(20) for job in waiting[1:]] == [3] * (WAITING - 1)


# --- what files and people spell ---


HOSTILE = "</script><img src=x onerror=alert(1)>\u202e\x1b[31m\x00\ud800\n"


def test_what_a_file_spells_is_escaped(tmp_path: Path):
    tokenizer = json.loads(served.byte_tokenizer())
    spelled = "</script><img src=x onerror=alert(1)>\u202e\x1b[31m"
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 258, "content": spelled})
    spec = served.SPEC.replace(name=spelled)
    folder = served.write_model(tmp_path / "m", spec, json.dumps(tokenizer))
    with served.client_of(Explorer(served.STORE)) as client:
        opened = client.post("/api/models", json={"name": str(folder)})
        model = good(opened)
        assert set(model["id"]) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
        found = client.post(f"/api/models/{model['id']}/tokens", json={"ids": [258]})
        assert good(found)["pieces"][0]["text"] == spelled
        for answer in (opened, found):
            assert answer.headers["content-type"] == "application/json"
            assert answer.text.isascii()
            assert answer.text.isprintable()


def test_a_hostile_name_of_a_model_cannot_break_a_line(client: TestClient):
    for name in (HOSTILE.replace("\ud800", ""), "../" * 1000 + "etc/passwd", "\n".join("ab"), "x" * 4096):
        response = client.post("/api/models", json={"name": name})
        assert response.status_code in (400, 404, 422)
        assert len(refused(response, response.status_code)["why"]) <= 1000
        assert response.text.isprintable()


def test_a_path_to_what_is_no_model_tells_nothing_of_its_content(client: TestClient, tmp_path: Path):
    (tmp_path / "secret.json").write_text('{"password": "sesame"}')
    (tmp_path / "folder").mkdir()
    (tmp_path / "pipe.gguf").symlink_to("/dev/zero")
    for name in ("secret.json", "folder", "pipe.gguf"):
        with bounded_work(5):
            response = client.post("/api/models", json={"name": str(tmp_path / name)})
        assert "sesame" not in json.dumps(refused(response, response.status_code))


@pytest.mark.parametrize(
    "error", [KeyError("x"), RecursionError(), OSError(2, "No such file"), MemoryError()]
)
def test_any_error_becomes_what_why_and_next(error: Exception):
    told = api_error(error)
    assert told.status >= 400
    assert set(told.plain()["error"]) == {"what", "why", "next"}


def test_numbers_that_are_not_finite_are_null(client: TestClient, tmp_path: Path, run: Callable[..., Any]):
    from openbook.serve.lines import to_json

    assert to_json({"a": [1.5, float("nan"), (float("inf"),)]}) == '{"a":[1.5,null,[null]]}'
