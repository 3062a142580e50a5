"""Recipes: every key is used or named in an error; predictions are the ledger's."""

import json
from pathlib import Path

import pytest

from openbook.ledger import Workload, ledger
from openbook.spec.model import ModelSpec
from openbook.train.predict import predict
from openbook.train.recipe import RecipeError, read_recipe
from openbook.train.start import prediction, schedule_of, spec_of

RECIPES = Path(__file__).parents[2] / "recipes"

TEXT = """
[model]
preset = "smollm2-135m"
[data]
sources = ["stdlib"]
vocab = 300
length = 16
[train]
steps = 10
rows = 4
lr = 1e-3
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_the_recipes_that_come_along_can_be_read_and_predicted(path: Path):
    recipe = read_recipe(path)
    assert recipe.name == path.stem
    assert prediction(recipe).params > 0


def test_a_change_is_a_toml_value_or_else_a_string(recipe: Path):
    changed = read_recipe(recipe, ["train.lr = 2", "train.optimizer=muon", "run.keep=5", "data.whole=true"])
    assert (changed.train.lr, changed.train.optimizer) == (2.0, "muon")
    assert (changed.run.keep, changed.data.whole) == (5, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.step=3", "train.step is not known; close to it: steps"),
        ("trian.steps=3", "trian is not known; close to it: train"),
        ("train.steps=3.5", "train.steps must be a whole number, found 3.5"),
        ("train.steps=true", "train.steps must be a whole number, found True"),
        ("train.steps=0", "train.steps must be at least 1, found 0"),
        ("train.lr=nan", "train.lr must be at least 0, found nan"),
        ("train.lr=fast", "train.lr must be a number, found 'fast'"),
        ("train.optimizer=sgd", "train.optimizer must be one of adamw, muon, found 'sgd'"),
        ("train.decay=3", 'train.decay is of the schedule "wsd" alone'),
        ("data.sources=stdlib", "data.sources must be a list of strings, found 'stdlib'"),
        ("data.folder=data", "give either folder or sources"),
        ("data.tokenizer=gpt2", "give either vocab, to train a tokenizer, or tokenizer, to take one"),
        ("model.vocab_size=9", "model.vocab_size: the vocabulary's size is the dataset's"),
        ("model.hidden_size=9", "model.hidden_size is not known"),
        ("train=3", "--set train=3: write it as train.lr=1e-3"),
        ("train.lr.x=3", "--set train.lr.x=3: lr is a value and holds no keys"),
    ],
)
def test_what_cannot_be_meant_is_named(recipe: Path, change: str, message: str):
    with pytest.raises(RecipeError) as error:
        read_recipe(recipe, [change])
    assert message in str(error.value)


def test_a_key_that_must_be_there_is_named(recipe: Path):
    recipe.write_text(TEXT.replace("rows = 4\n", ""))
    with pytest.raises(RecipeError, match=r"mine.toml: train.rows is missing"):
        read_recipe(recipe)


def test_a_dataset_has_its_own_vocabulary(recipe: Path):
    recipe.write_text(TEXT.replace('sources = ["stdlib"]', 'folder = "data"'))
    with pytest.raises(RecipeError, match=r"data.vocab: the dataset in data.folder has its own"):
        read_recipe(recipe)


def test_what_is_no_toml_is_told_with_its_place(recipe: Path):
    recipe.write_text("[train\n")
    with pytest.raises(RecipeError, match=r"mine.toml is no recipe: .*line 1"):
        read_recipe(recipe)


def test_rows_beyond_the_models_positions_are_refused(recipe: Path):
    with pytest.raises(RecipeError, match=r"data.length 9000 is beyond the model's 8192 positions"):
        spec_of(read_recipe(recipe, ["data.length=9000"]), 300)


def test_a_schedule_rises_stays_and_falls(recipe: Path):
    changes = ["train.schedule=wsd", "train.warmup=1", "train.decay=3", "train.minimum=0"]
    schedule = schedule_of(read_recipe(recipe, changes).train)
    assert [schedule(step) for step in range(10)] == pytest.approx([0.5, *[1.0] * 6, 0.75, 0.5, 0.25])


# --- paths --------------------------------------------------------------------------------------


def test_what_lies_beside_the_recipe_is_meant_and_else_what_lies_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    beside, here = tmp_path / "recipes", tmp_path / "here"
    for folder, names in ((beside, ("a.txt", "both.txt", "stdlib")), (here, ("b.txt", "both.txt"))):
        folder.mkdir()
        for name in names:
            (folder / name).touch()
    monkeypatch.chdir(here)
    path = Path("../recipes/mine.toml")
    written = ["a.txt", "./a.txt", "b.txt", "both.txt", "none", "stdlib", str(beside / "a.txt")]
    (beside / "mine.toml").write_text(TEXT.replace('["stdlib"]', json.dumps(written)))
    found = read_recipe(path).data.sources
    assert found == (
        "../recipes/a.txt", "../recipes/./a.txt", "b.txt", "../recipes/both.txt", "none", "stdlib",
        str(beside / "a.txt"),
    )  # fmt: skip
    assert read_recipe(path, ['data.sources=["a.txt", "both.txt"]']).data.sources == ("a.txt", "both.txt")


def test_every_key_that_may_be_a_path_is_looked_for_beside_the_recipe(recipe: Path, tmp_path: Path):
    (tmp_path / "x").mkdir()
    recipe.write_text(TEXT.replace('preset = "smollm2-135m"', 'from = "x"').replace("vocab = 300\n", ""))
    found = read_recipe(recipe)
    assert found.base == found.data.tokenizer == str(tmp_path / "x")
    recipe.write_text(TEXT.replace("smollm2-135m", "x").replace("vocab = 300", 'tokenizer = "./x"'))
    found = read_recipe(recipe)
    assert (found.model, found.data.tokenizer) == ({"preset": str(tmp_path / "x")}, f"{tmp_path}/./x")
    recipe.write_text(TEXT.replace('sources = ["stdlib"]\nvocab = 300', 'folder = "x"'))
    assert read_recipe(recipe).data.folder == str(tmp_path / "x")


def test_the_name_of_a_model_is_no_path(recipe: Path, tmp_path: Path):
    (tmp_path / "smollm2-135m").mkdir()
    assert read_recipe(recipe).model == {"preset": "smollm2-135m"}


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_the_recipes_that_come_along_find_their_texts_from_anywhere(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    sources = read_recipe(path).data.sources
    assert sources == ("stdlib",) or all(Path(source).is_file() for source in sources)


# --- predictions --------------------------------------------------------------------------------


def spec() -> ModelSpec:
    from variants import VARIANTS

    return VARIANTS["llama"]


def test_a_prediction_is_the_ledgers(recipe: Path):
    train = read_recipe(recipe, ["train.micro_rows=2"]).train
    found = predict(spec(), train, length=16)
    book = ledger(spec(), "fp32")
    assert found.params == book.params.total
    assert found.tokens == 10 * 4 * 16
    assert found.flops == 10 * book.totals(Workload("train", batch=4, new=16)).flops
    items = {row.name: row.bytes for row in found.memory}
    assert items["weights"] == 4 * found.params
    assert items["gradients"] == 4 * (found.params + 131 * 52)  # of the first part; the head's of the second
    assert items["optimizer"] == 8 * found.params
    # Hidden states, those with a label, and their gradients; and one table of logits.
    assert items["work"] == 3 * 2 * 16 * 52 * 4 + 2 * 16 * 131 * 4
    passing = items["gradients"] + items["activations"] + items["work"]
    assert items["holes"] == round(0.3 * passing)
    assert found.bytes == sum(items.values())


def test_muon_keeps_one_moment_of_the_layers_matrices(recipe: Path):
    found = predict(spec(), read_recipe(recipe, ["train.optimizer=muon"]).train, length=16)
    items = {row.name: row.bytes for row in found.memory}
    outside = 2 * 131 * 52 + 7 * 52  # embedding and head; the norms
    assert items["optimizer"] == 8 * outside + 4 * (found.params - outside)
