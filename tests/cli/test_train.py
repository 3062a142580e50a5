"""The verb that trains: what it tells, where, and with which exit code."""

import json
from pathlib import Path

import pytest

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
