"""What comes out of a run, read by others: transformers and llama.cpp; and in our own form by ourselves."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import openbook
from llama_server import MISSING, next_logprobs, tokenize
from openbook.cli import convert
from openbook.files.gguf import read_gguf
from openbook.model import Decoder, init_weights
from openbook.sources import resolve
from openbook.spec.model import to_dict
from openbook.train.checkpoint import CheckpointError, load_latest
from openbook.train.corpus import corpus_of
from openbook.train.data import build
from openbook.train.recipe import Recipe, RecipeError, recipe_of
from openbook.train.run import carry_out, open_run
from openbook.train.start import is_for_transformers, prediction
from openbook.weights.load import load_decoder
from openbook.weights.save import save_hf
from variants import VARIANTS

CHAT = [{"role": "user", "content": "How wide is <|im_end|> it?"}]
"""With a control token's name spelled out, which is text."""


def chats(folder: Path) -> Path:
    """The file of 30 questions and answers."""
    path = folder / "chats.jsonl"
    pairs = ((f"What is {i} and {i}?", f"It is {2 * i}.") for i in range(30))
    lines = (
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in pairs
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def recipe(model: dict[str, Any], data: dict[str, Any], **more: Any) -> Recipe:
    train = {"steps": 6, "rows": 4, "lr": 1e-2, "seed": 5}
    run = {"save_every": 2, "samples": ["What is 3 and 3?"], "sample_tokens": 5}
    document = {"model": model, "data": {"length": 48, "held_out": 0.2, **data}, "train": train, "run": run}
    return recipe_of("test", {**document, **more})


@pytest.fixture(scope="module")
def base(chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random chat model that transformers loads too; it has more rows than tokens, as real ones do."""
    folder = tmp_path_factory.mktemp("base") / "tiny-chat"
    spec = VARIANTS["llama"].replace(vocab_size=320, max_positions=128)
    save_hf(init_weights(Decoder(spec), seed=3, std=0.2), folder, extra_files=sorted(chat_folder.iterdir()))
    return folder


@pytest.fixture(scope="module")
def chat_run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "chat"
    about = recipe({"from": str(base)}, {"sources": [str(chats(folder.parent))], "whole": True})
    assert carry_out(open_run(about, folder)) == 0
    return folder


# --- chats --------------------------------------------------------------------------------------


def test_transformers_renders_the_exported_chat_template_to_our_ids(chat_run: Path):
    from transformers import AutoTokenizer

    ours = openbook.load(chat_run, dtype="fp32")
    theirs = AutoTokenizer.from_pretrained(chat_run / "model")
    plain = [{"role": "user", "content": "How wide is it?"}]
    rendered = theirs.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
    assert ours.chat_ids(plain) == rendered


def test_generation_ends_with_the_turn(chat_run: Path):
    from transformers import GenerationConfig

    tokenizer = openbook.load(chat_run).tokenizer
    assert tokenizer is not None
    ends = GenerationConfig.from_pretrained(chat_run / "model").eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends)
    assert tokenizer.id_of("<|im_end|>") in ends
    assert ends == tokenizer.eos_ids


def test_a_run_begins_with_the_weights_and_the_loss_before_the_first_step(base: Path, tmp_path: Path):
    about = recipe({"from": str(base)}, {"sources": [str(chats(tmp_path))], "whole": True})
    run = open_run(about, tmp_path / "run")
    weights = dict(run.trainer.decoder.named_parameters())
    for name, weight in load_decoder(base).named_parameters():
        assert torch.equal(weight, weights[name])
    carry_out(run)
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == 0
    assert first["heldout_nats"] > 3


@pytest.mark.skipif(MISSING, reason="needs llama.cpp: pip install xllamacpp")
def test_llama_cpp_loads_the_converted_run_with_our_logits_and_ids(chat_run: Path, tmp_path: Path):
    path = tmp_path / "run.gguf"
    convert.run(str(chat_run), str(path), "F32")
    ours = openbook.load(chat_run, dtype="fp32")
    assert ours.tokenizer is not None
    text = "It is 2 and area(width)"
    ids = ours.tokenizer.prompt(text)
    assert tokenize(path, [text]) == [ids]
    (found,) = next_logprobs(path, [ids], plain=ours.tokenizer.encode("e")[0])
    with torch.no_grad():
        wanted = ours.decoder(torch.tensor([ids]))[0, -1].log_softmax(-1)
    assert len(found) >= ours.tokenizer.vocab_size
    assert max(abs(found[i] - float(wanted[i])) for i in found) < 1e-4
    assert "<|im_start|>" in read_gguf(path).metadata["tokenizer.chat_template"]


# --- our own form -------------------------------------------------------------------------------


def test_a_model_without_a_family_is_trained_exported_and_writes(tmp_path: Path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(30):
        (texts / f"{i}.txt").write_text(f"the text of file number {i}, which is {i} times {i}\n" * 3)
    # One layer of the preset, small: a third norm, no positions, no final norm.
    spec = openbook.spec("triple-norm-512")
    model = {key: value for key, value in to_dict(spec).items() if key != "vocab_size"}
    model["layers"] = [{"times": 1, "block": model["layers"][0]["block"]}]
    run = open_run(recipe(model, {"sources": [str(texts)], "vocab": 300, "length": 16}), tmp_path / "run")
    assert not is_for_transformers(run.trainer.decoder.spec)
    assert any("transformers cannot read" in note for note in run.notes)
    carry_out(run)
    found = resolve(tmp_path / "run")
    assert found.is_own
    assert found.spec.layers[0] == spec.layers[0]
    lm = openbook.load(tmp_path / "run", dtype="fp32")
    weights = dict(run.trainer.decoder.named_parameters())
    assert all(torch.equal(weight, weights[name]) for name, weight in lm.decoder.named_parameters())
    assert "".join(lm.generate("the text of", max_tokens=4, temperature=0))


# --- adapters -----------------------------------------------------------------------------------


def with_adapters(base: Path, folder: Path) -> Recipe:
    data = {"sources": [str(chats(folder))], "whole": True}
    return recipe({"from": str(base)}, data, lora={"rank": 3, "alpha": 6.0, "targets": ["layers.*.attn.q"]})


def test_a_checkpoint_holds_the_adapters_alone_and_the_run_goes_on_from_it_as_if_unbroken(
    base: Path, tmp_path: Path
):
    about = with_adapters(base, tmp_path)
    assert carry_out(open_run(about, tmp_path / "unbroken")) == 0
    checkpoint = load_latest(tmp_path / "unbroken")
    assert checkpoint is not None
    names = {name for name in checkpoint.tensors if not name.endswith((".exp_avg", ".exp_avg_sq", ".step"))}
    assert names == {f"layers.{n}.attn.q.lora_{x}" for n in range(3) for x in "ab"}

    shutil.copytree(tmp_path / "unbroken", tmp_path / "run")
    for name in ("model", "adapter", "step-000006"):
        shutil.rmtree(tmp_path / "run" / name)
    assert carry_out(open_run(about, tmp_path / "run", resume=True)) == 0
    for name in ("model/model.safetensors", "adapter/adapter_model.safetensors", "samples.jsonl"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "unbroken" / name).read_bytes()


def test_another_base_does_not_go_on_with_its_adapters(base: Path, tmp_path: Path):
    shutil.copytree(base, tmp_path / "base")
    about = with_adapters(tmp_path / "base", tmp_path)
    assert carry_out(open_run(about, tmp_path / "run")) == 0
    shutil.rmtree(tmp_path / "base")
    spec = VARIANTS["llama"].replace(vocab_size=320, max_positions=128)
    files = [base / name for name in ("tokenizer.json", "tokenizer_config.json")]
    save_hf(init_weights(Decoder(spec), seed=4, std=0.2), tmp_path / "base", extra_files=files)
    with pytest.raises(CheckpointError, match="are not those that the run in"):
        open_run(about, tmp_path / "run", resume=True)


def test_frozen_weights_are_predicted_without_gradients_and_moments(base: Path, tmp_path: Path):
    whole = prediction(recipe({"from": str(base)}, {"sources": [str(chats(tmp_path))]}))
    part = prediction(with_adapters(base, tmp_path))
    rows = {row.name: row.bytes for row in part.memory}
    spec = VARIANTS["llama"]
    n_adapters = sum(3 * (spec.d_model + block.attn.q_width) for block in spec.layers)  # type: ignore[union-attr]
    assert rows["gradients"] == rows["adapters"] == 4 * n_adapters
    assert rows["optimizer"] == 8 * n_adapters
    assert part.flops == whole.flops * 2 // 3


# --- what does not fit together -----------------------------------------------------------------


def test_a_dataset_with_other_tokens_is_refused(base: Path, vocabulary: Path, tmp_path: Path):
    texts = tmp_path / "a.txt"
    texts.write_text("def area(width, height):\n" * 40)
    other = tmp_path / "other"
    shutil.copytree(vocabulary, other)
    about = json.loads((other / "tokenizer.json").read_text())
    tokens = sorted(about["model"]["vocab"], key=about["model"]["vocab"].get)
    about["model"]["vocab"][tokens[70]], about["model"]["vocab"][tokens[71]] = 71, 70
    (other / "tokenizer.json").write_text(json.dumps(about))
    config = {"model_type": "llama", "vocab_size": 320, "hidden_size": 24, "num_attention_heads": 4}
    (other / "config.json").write_text(
        json.dumps({**config, "intermediate_size": 40, "num_hidden_layers": 1})
    )
    build(tmp_path / "data", corpus_of([str(texts)]), resolve(other), held_out=0)
    about = recipe_of("test", {
        "model": {"from": str(base)},
        "data": {"folder": str(tmp_path / "data"), "length": 16},
        "train": {"steps": 1, "rows": 1, "lr": 1e-3},
    })  # fmt: skip
    with pytest.raises(RecipeError, match="token 70 of the dataset is"):
        open_run(about, tmp_path / "run")


def test_a_sample_that_leaves_no_room_is_told_at_once(base: Path, tmp_path: Path):
    data = {"sources": [str(chats(tmp_path))]}
    about = recipe({"from": str(base)}, data, run={"samples": ["word " * 500]})
    with pytest.raises(RecipeError, match=r"run.samples: .* must have 1 to 127"):
        open_run(about, tmp_path / "run")
