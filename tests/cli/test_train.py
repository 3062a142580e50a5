"""The verb that trains: what it tells, where, and with which exit code."""

import json
import math
from pathlib import Path

import pytest

from openbook.cli.train import _duration
from openbook.train.lock import Lock
from openbook.train.measure import Speed

RECIPE = """
[model]
model_type = "llama"
hidden_size = 24
intermediate_size = 40
num_hidden_layers = 2
num_attention_heads = 4
max_position_embeddings = 32
[data]
sources = [{texts!r}]
vocab = 300
held_out = 0.3
length = 16
[train]
steps = 6
rows = 4
lr = 1e-2
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(30):
        (texts / f"{i}.txt").write_text(f"the text of file number {i}\n" * 3)
    path = tmp_path / "small.toml"
    path.write_text(RECIPE.replace("{texts!r}", json.dumps(str(texts))))
    return path


def test_a_recipe_becomes_a_model_that_writes(openbook, recipe: Path, tmp_path: Path):
    folder = tmp_path / "run"
    done = openbook("train", str(recipe), "-o", str(folder))
    assert done.code == 0
    assert done.out == f"{folder / 'model'}: the model after 6 steps\n"
    assert done.err.splitlines()[0].startswith(f"{folder}: ")
    assert "held out" in done.err
    written = openbook("generate", str(folder), "-p", "the text", "-n", "3", "--temp", "0", "-q")
    assert written.code == 0


def test_the_texts_of_a_recipe_may_lie_beside_it(openbook, recipe: Path, tmp_path: Path, monkeypatch):
    recipe.write_text(recipe.read_text().replace(str(tmp_path / "texts"), "texts"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    done = openbook("train", "../small.toml", "-o", "run", "--set", "train.steps=1")
    assert done.code == 0
    again = ["train", str(recipe), "-o", str(tmp_path / "elsewhere" / "run"), "--resume", "auto"]
    monkeypatch.chdir(tmp_path)
    assert openbook(*again, "--set", "train.steps=1").code == 0
    assert openbook("train", "small.toml", "--set", 'data.sources=["none"]', "-o", "other").code == 3


def test_a_dry_run_prints_the_books_and_makes_nothing(openbook, recipe: Path, tmp_path: Path):
    before = sorted(tmp_path.iterdir())
    done = openbook("train", str(recipe), "--dry-run", "--set", "train.steps=7")
    assert done.code == 0
    # 2 layers of 4·24² + 3·24·40, norms of 24 and two matrices of 300 × 24
    assert done.out.startswith("small: 24,888 parameters; 7 steps of 4 × 16 tokens, 448 in all; ")
    assert sorted(tmp_path.iterdir()) == before


def test_the_books_as_json(openbook, recipe: Path):
    about = json.loads(openbook("train", str(recipe), "--dry-run", "--json").out)
    assert about["schema"] == "openbook.train/1"
    assert about["bytes"] == sum(row["bytes"] for row in about["memory"])
    assert about["recipe"]["train"]["steps"] == 6


@pytest.mark.parametrize("more", [["--dry-run"], []])
def test_what_cannot_fit_is_refused_before_anything_is_made(openbook, recipe: Path, tmp_path: Path, more):
    huge = ["--set", "model.hidden_size=1048576", "-o", str(tmp_path / "run")]
    done = openbook("train", str(recipe), *huge, *more)
    assert done.code == 4
    assert "training small needs" in done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ("train.stepz=3", 2, "train.stepz is not known; close to it: steps"),
        ("model.hiden_size=3", 1, "config has unknown keys: 'hiden_size'"),
        ("data.length=33", 2, "data.length 33 is beyond the model's 32 positions"),
    ],
)
def test_a_wrong_key_is_named_in_one_line(openbook, recipe: Path, tmp_path: Path, change, code, message):
    done = openbook("train", str(recipe), "--set", change, "-o", str(tmp_path / "run"))
    assert (done.code, len(done.err.splitlines())) == (code, 1)
    assert message in done.err
    assert not (tmp_path / "run").exists()


def test_a_recipe_that_is_not_there_is_not_found(openbook, tmp_path: Path):
    assert openbook("train", str(tmp_path / "none.toml")).code == 3


RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_that_comes_along_passes_a_dry_run(openbook, path: Path, monkeypatch):
    # What is measured has its own tests; a part of GPT-2 takes seconds.
    speed = Speed(2.5, 4e10, layers=1, of_layers=12, rows=2, length=64)
    monkeypatch.setattr("openbook.train.measure.measure", lambda recipe, spec: speed)
    monkeypatch.setattr("openbook.weights.fit.available_bytes", lambda device="cpu": 64 * 10**9)
    monkeypatch.chdir(path.parents[1])
    done = openbook("train", f"recipes/{path.name}", "--dry-run")
    assert done.code == 0, done.err
    assert done.out.startswith(f"{path.stem}: ")
    assert "at 40 GFLOP/s. Measured here just now" in " ".join(done.out.split())
    assert "1 of 12 layers, 2 × 64 at once" in " ".join(done.out.split())


def test_the_time_is_the_steps_at_the_speed_measured(openbook, recipe: Path):
    about = json.loads(openbook("train", str(recipe), "--dry-run", "--json").out)
    assert about["seconds"] == pytest.approx(6 * about["measured"]["seconds_per_step"])


@pytest.mark.parametrize(
    ("seconds", "words"), [(59.4, "59 s"), (125.0, "2 min 5 s"), (9000, "2.5 h"), (864_000, "10 days")]
)
def test_a_duration_is_told_in_the_unit_that_it_is_counted_in(seconds: float, words: str):
    assert _duration(seconds) == words


# --- runs, and what they predict -----------------------------------------------------------------


@pytest.fixture
def two_runs(openbook, recipe: Path, tmp_path: Path) -> Path:
    for name, lr in (("a", "1e-2"), ("b", "2e-3")):
        done = openbook("train", str(recipe), "-o", str(tmp_path / "runs" / name), "--set", f"train.lr={lr}")
        assert done.code == 0
    return tmp_path / "runs"


def test_runs_are_listed_compared_and_scored(openbook, two_runs: Path):
    listed = json.loads(openbook("runs", str(two_runs), "--json").out)
    assert listed["schema"] == "openbook.runs/1"
    assert [(Path(run["folder"]).name, run["state"], run["step"]) for run in listed["runs"]] == [
        ("a", "done", 6),
        ("b", "done", 6),
    ]
    table = openbook("runs", str(two_runs)).out
    assert table.startswith("2 runs\n")
    assert "6 of 6" in table

    both = openbook("runs", str(two_runs / "a"), str(two_runs / "b"), "--json").out
    compared = json.loads(both)
    assert compared["differing"] == {"train.lr": [0.01, 0.002]}
    assert [row["step"] for row in compared["equal_steps"]] == [1, 2, 3, 4, 5, 6]
    assert "train.lr" in openbook("runs", str(two_runs / "a"), str(two_runs / "b")).out

    # The figures of a run's own last evaluation, from its exported model and its dataset.
    run = two_runs / "a"
    scored = json.loads(openbook("eval", str(run), str(run / "data"), "-c", "16", "--json").out)
    assert scored["bits_per_byte"] == pytest.approx(listed["runs"][0]["bits_per_byte"], rel=1e-5)
    assert scored["perplexity"] == pytest.approx(math.exp(scored["nats_per_token"]))
    assert (scored["context"], scored["stride"], scored["split"]) == (16, 16, "heldout")


def test_a_text_is_scored_whole(openbook, two_runs: Path, tmp_path: Path):
    text = tmp_path / "new.txt"
    text.write_text("the text of file number 99\n")
    scored = json.loads(openbook("eval", str(two_runs / "a"), str(text), "--json").out)
    assert scored["bytes"] == len("the text of file number 99\n")
    assert (scored["split"], scored["documents"], scored["context"]) == ("all", 1, 32)
    shown = openbook("eval", str(two_runs / "a"), str(text)).out
    assert "bits per byte" in shown
    assert "each begins without what came before it" in shown
    command = ["eval", str(two_runs / "a"), str(text), "-c", "8", "--stride", "3"]
    overlapping = json.loads(openbook(*command, "--json").out)
    assert (overlapping["context"], overlapping["stride"]) == (8, 3)
    assert (overlapping["labels"], overlapping["bytes"]) == (scored["labels"], scored["bytes"])
    shown = openbook(*command).out
    assert (
        "rows of 8 tokens, stride 3: a token is predicted from at least 5, or all of its document." in shown
    )
    assert openbook(*command[:-1], "9").code == 2
    assert openbook(*command[:-1], "0").code == 2
    assert openbook("eval", str(two_runs / "a"), str(text), "-c", "33").code == 2
    assert openbook("eval", str(two_runs / "a"), str(tmp_path / "none.txt")).code == 3


def test_a_run_that_goes_on_and_one_that_stopped_are_told_apart(openbook, two_runs: Path):
    with (two_runs / "a" / "metrics.jsonl").open("r+") as file:
        lines = file.readlines()[:3]
        file.seek(0)
        file.truncate()
        file.writelines([*lines, "{cut"])
    lock = Lock(two_runs / "b")
    listed = json.loads(openbook("runs", str(two_runs), "--json").out)["runs"]
    assert [(run["state"], run["step"], run["bits_per_byte"] is None) for run in listed] == [
        ("stopped", 3, True),
        ("running", 6, False),
    ]
    lock.release()


@pytest.mark.parametrize("content", ["{}", '{"train": {"steps": "many"}}', "[]", "no JSON"])
def test_a_folder_with_a_broken_recipe_is_one_line(openbook, tmp_path: Path, content: str):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.json").write_text(content)
    done = openbook("runs", str(tmp_path))
    assert (done.code, len(done.err.splitlines())) == (1, 1)


def test_where_no_runs_are_that_is_said(openbook, tmp_path: Path):
    assert openbook("runs", str(tmp_path)).err.startswith("no runs in ")
    assert openbook("runs", str(tmp_path / "none")).code == 3


def test_a_second_process_in_a_run_is_told_so(openbook, recipe: Path, tmp_path: Path):
    (tmp_path / "run").mkdir()
    lock = Lock(tmp_path / "run")
    done = openbook("train", str(recipe), "-o", str(tmp_path / "run"))
    assert (done.code, len(done.err.splitlines())) == (1, 1)
    assert "another process is training in" in done.err
    lock.release()
