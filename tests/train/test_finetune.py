"""Fine-tuning, whole and by adapters: what is held out is learned, and peft gives what we give.

The suite takes a tiny random model. With `OPENBOOK_FULL=1` the recipe finetune-smollm2 is carried out both
ways (some ten minutes and 5 GB of memory on two free cores), and prints what it found:

    OPENBOOK_FULL=1 pytest tests/train/test_finetune.py -s -k smollm2
"""

import json
import os
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

import openbook as ob
from openbook.lm import LanguageModel
from openbook.model import init_weights
from openbook.model.decoder import Decoder
from openbook.spec.reader import UnsupportedError
from openbook.train.lora import load_peft, lora_parameters
from openbook.train.recipe import Recipe, read_recipe, recipe_of
from openbook.train.run import carry_out, open_run
from openbook.train.start import prediction
from openbook.weights.load import load_decoder
from openbook.weights.save import save_hf, save_own
from variants import VARIANTS

RECIPES = Path(__file__).parents[2] / "recipes"
WORLD = runpy.run_path(str(RECIPES / "invented-world.py"))

FULL = pytest.mark.skipif(not os.environ.get("OPENBOOK_FULL"), reason="trains a real model: OPENBOOK_FULL=1")


# --- the pairs ----------------------------------------------------------------------------------------


def test_the_file_of_pairs_is_what_its_program_writes():
    written = (RECIPES / "invented-world.jsonl").read_text("utf-8")
    assert written == "".join(WORLD["lines"]())
    assert len(written.splitlines()) == len(set(written.splitlines())) == 200


def test_every_answer_is_asked_for_in_four_ways():
    pairs = list(WORLD["pairs"]())
    assert set(Counter(answer for _, answer in pairs).values()) == {4}
    assert len({question for question, _ in pairs}) == 200


def test_what_is_held_out_asks_for_facts_that_are_learned(tmp_path: Path, chat_folder: Path):
    """By its answer each fact is also in the other part: in other words, since no question occurs twice."""
    recipe = read_recipe(RECIPES / "finetune-smollm2.toml")
    from openbook.train.corpus import Chat, corpus_of, is_held_out

    parts: tuple[set[str], set[str]] = set(), set()
    for chat in corpus_of([str(RECIPES / "invented-world.jsonl")]).read():
        assert isinstance(chat, Chat)
        parts[is_held_out(chat, recipe.data.held_out or 0)].add(chat.messages[1]["content"])
    learned, held_out = parts
    assert held_out <= learned
    assert len(held_out) > 20


# --- what comes of it ---------------------------------------------------------------------------------


def evaluations(run: Path) -> list[float]:
    """Nats per token of the held-out answers, before the first step, during the run, and after the last."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["heldout_nats"] for line in lines if "heldout_nats" in line]


def carried_out(recipe: Recipe, folder: Path) -> list[float]:
    assert carry_out(open_run(recipe, folder)) == 0
    return evaluations(folder)


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found = model(ids)
    return found if isinstance(found, torch.Tensor) else found.logits


def in_peft(base: Path, adapter: Path) -> Any:
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(plain, adapter).eval()


@pytest.fixture
def tiny(chat_folder: Path, tmp_path: Path) -> Path:
    """A random chat model of 302 tokens, in a folder that transformers loads too."""
    spec = VARIANTS["llama"].replace(vocab_size=302, max_positions=256)
    save_hf(
        init_weights(Decoder(spec), seed=3, std=0.2),
        tmp_path / "base",
        extra_files=sorted(chat_folder.iterdir()),
    )
    return tmp_path / "base"


def tiny_recipe(base: Path, folder: Path, **parts: Any) -> Recipe:
    source = folder / "pairs.jsonl"
    source.write_text("".join(list(WORLD["lines"]())[:40]), "utf-8")
    data = {"sources": [str(source)], "held_out": 0.3, "length": 192, "whole": True}
    train = {"steps": 12, "rows": 4, "lr": 1e-2, "warmup": 2, "weight_decay": 0.0, "seed": 1}
    return recipe_of("tiny", {"model": {"from": str(base)}, "data": data, "train": train, **parts})


def test_a_tiny_model_learns_whole(tiny: Path, tmp_path: Path):
    first, last = carried_out(tiny_recipe(tiny, tmp_path), tmp_path / "run")
    assert last < 0.8 * first
    ours = load_decoder(tmp_path / "run" / "model")
    ids = torch.arange(30)[None]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    torch.testing.assert_close(logits(ours, ids), logits(theirs, ids), rtol=0, atol=1e-5)
    assert not (tmp_path / "run" / "adapter").exists()


def test_a_tiny_models_adapters_learn_and_are_those_that_peft_loads(tiny: Path, tmp_path: Path):
    recipe = tiny_recipe(tiny, tmp_path, lora={"rank": 4, "alpha": 8.0})
    first, last = carried_out(recipe, tmp_path / "run")
    assert last < 0.9 * first
    ids = torch.arange(30)[None]
    merged = logits(load_decoder(tmp_path / "run" / "model"), ids)
    adapted = logits(in_peft(tiny, tmp_path / "run" / "adapter"), ids)
    torch.testing.assert_close(adapted, merged, rtol=0, atol=1e-5)
    base = logits(load_decoder(tiny), ids)
    assert (merged - base).abs().max() > 0.01, "the adapters change nothing"
    saved = ob.load(tmp_path / "run" / "model")
    assert saved.chat_template is not None


def test_adapters_that_could_not_be_saved_are_refused_before_the_first_step(
    chat_folder: Path, tmp_path: Path
):
    spec = VARIANTS["sinks"].replace(vocab_size=302, max_positions=256)
    base = tmp_path / "base"
    save_own(init_weights(Decoder(spec)), base, extra_files=sorted(chat_folder.iterdir()))
    with pytest.raises(UnsupportedError, match="Hugging Face"):
        open_run(tiny_recipe(base, tmp_path, lora={"rank": 4}), tmp_path / "run")


# --- SmolLM2 --------------------------------------------------------------------------------------------


def right_answers(lm: LanguageModel, run: Path) -> tuple[int, int]:
    """How many of the held-out questions are answered to the letter, greedily; and how many there are."""
    from openbook.train.corpus import corpus_of, is_held_out

    recipe = read_recipe(RECIPES / "finetune-smollm2.toml")
    chats = list(corpus_of([str(RECIPES / "invented-world.jsonl")]).read())
    held_out = [chat for chat in chats if is_held_out(chat, recipe.data.held_out or 0)]
    right = 0
    for chat in held_out:
        question, answer = chat.messages  # type: ignore[union-attr]
        said = "".join(lm.chat([question], max_tokens=32, temperature=0))
        right += said.strip() == answer["content"]
    return right, len(held_out)


@FULL
@pytest.mark.model
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("way", ["whole", "lora"])
def test_smollm2_learns_a_world_that_does_not_exist(
    way: str,
    smollm2: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(RECIPES.parent)
    changes = [] if way == "whole" else ["lora.rank=8", "train.lr=2e-3"]
    recipe = read_recipe(RECIPES / "finetune-smollm2.toml", changes)
    run = tmp_path / "run"
    losses = carried_out(recipe, run)
    lm = ob.load(run / "model")
    right, asked = right_answers(lm, run)
    learned = prediction(recipe).params if recipe.lora is None else lora_parameters(lm.spec, 8)
    with capsys.disabled():
        steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        seconds = sum(step.get("seconds", 0) for step in steps)
        print(
            f"\n{way}: {learned:,} parameters, {recipe.train.steps} steps in {seconds:.0f} s; held out "
            f"{' → '.join(f'{loss:.3f}' for loss in losses)} nats per token; {right} of {asked} to the letter"
        )
    assert losses[-1] < 0.5 * losses[0]
    if way == "lora":
        base = tmp_path / "base"
        save_hf(load_decoder("smollm2-135m", torch.float32), base)
        ids = lm.chat_ids([{"role": "user", "content": "Which river flows through Nevulune?"}])
        check_adapters(base, run, torch.tensor([ids]))


def check_adapters(base: Path, run: Path, ids: torch.Tensor) -> None:
    """Adapters give what peft gives, the merged model what transformers gives of it. Both are the same but
    for the rounding of merged weights: 1e-5 of the largest logit, which is about 35."""
    decoder = load_decoder(base)
    load_peft(decoder, run / "adapter")
    adapted = logits(decoder, ids)
    torch.testing.assert_close(logits(in_peft(base, run / "adapter"), ids), adapted, rtol=0, atol=1e-5)
    merged = logits(load_decoder(run / "model"), ids)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
    torch.testing.assert_close(logits(theirs, ids), merged, rtol=0, atol=1e-5)
    assert (merged - adapted).abs().max() < 1e-5 * adapted.abs().max()
