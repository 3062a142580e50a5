"""Adapters against peft's own, and against the ledger."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bounded import bounded_work
from checkpoints import FAMILIES, random_model
from openbook.files import FileError
from openbook.ledger import ledger
from openbook.lm import LanguageModel
from openbook.model import Decoder
from openbook.spec.presets import preset
from openbook.spec.reader import UnsupportedError
from openbook.train.lora import (
    DEFAULT_TARGETS,
    LoraError,
    LoraLinear,
    adapters,
    add_lora,
    check_peft,
    load_peft,
    lora_parameters,
    lora_rows,
    lora_targets,
    merge_lora,
    save_peft,
)
from openbook.train.optim import parameter_groups
from openbook.weights.load import load_decoder
from variants import VARIANTS, noisy_decoder

ATTENTION = ("layers.*.attn.*",)
MATRIX = "layers.0.attn.q.weight"
TARGETS = {
    "llama": DEFAULT_TARGETS,
    "qwen2": ("layers.*.attn.q", "layers.*.attn.v", "layers.1.mlp.down"),
    "gpt2": DEFAULT_TARGETS,
    "gemma3_text": DEFAULT_TARGETS,
    "phi3": DEFAULT_TARGETS,
    "gpt_neox": ("layers.*.attn.q", "layers.*.attn.v", "layers.*.mlp.up"),
    "olmo": DEFAULT_TARGETS,
    "mixtral": ATTENTION,
    "deepseek_v3": ATTENTION,
}
"""By family: biases (qwen2), q, k and v in one matrix (gpt2 transposed, gpt_neox by heads, phi3), a norm of
1 + w and windows (gemma3), clipped projections (olmo), experts, latents."""

FAMILIES_HERE = FAMILIES | {"qwen2": {k: v for k, v in FAMILIES["mistral"].items() if k != "head_dim"}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny random checkpoint of a family, made once."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family) / "base"
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(FAMILIES, family, FAMILIES_HERE[family])
                random_model(family).save_pretrained(made[family])
        return made[family]

    return folder


def with_noise(decoder: Decoder, seed: int = 4) -> Decoder:
    """As if trained: B is no longer zero."""
    generator = torch.Generator().manual_seed(seed)
    for adapter in adapters(decoder).values():
        adapter.lora_b.data.normal_(0.0, 0.1, generator=generator)
    return decoder


def adapted(folder: Path, targets: tuple[str, ...], rank: int = 3, alpha: float = 7.0) -> Decoder:
    decoder = load_decoder(folder)
    add_lora(decoder, rank, alpha, targets, seed=5)
    return with_noise(decoder)


def theirs(folder: Path, adapter: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return peft.PeftModel.from_pretrained(model, adapter).eval()


def ids() -> Tensor:
    return torch.randint(0, 131, (2, 17), generator=torch.Generator().manual_seed(1))


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found = model(ids())
    return found if isinstance(found, Tensor) else found.logits


def assert_close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


# --- peft ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", list(TARGETS))
def test_peft_computes_what_we_compute_and_back(
    family: str, base: Callable[[str], Path], tmp_path: Path, recwarn: pytest.WarningsRecorder
):
    plain, ours = load_decoder(base(family)), adapted(base(family), TARGETS[family])
    save_peft(tmp_path / "adapter", ours, str(base(family)), family)
    assert (logits(ours) - logits(plain)).abs().max() > 0.1, "the adapters change nothing"
    assert_close(logits(theirs(base(family), tmp_path / "adapter")), logits(ours))
    assert not [w for w in recwarn if "adapter keys" in str(w.message)]

    again = load_decoder(base(family))
    load_peft(again, tmp_path / "adapter", family)
    assert_close(logits(again), logits(ours))
    merge_lora(again)
    assert_close(logits(again), logits(ours))


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": "all-linear", "use_rslora": True, "lora_dropout": 0.2},
        {
            "target_modules": ["k_proj", "down_proj"],
            "rank_pattern": {"down_proj": 6, "layers.1.self_attn.k_proj": 2},
            "alpha_pattern": {"model.layers.0.mlp.down_proj": 11},
        },
        {"target_modules": ["o_proj"], "layers_to_transform": [1], "init_lora_weights": "gaussian"},
    ],
    ids=["two", "rslora", "patterns", "one-layer"],
)
def test_we_compute_what_peft_computes(options: dict[str, Any], base: Callable[[str], Path], tmp_path: Path):
    folder = base("llama")
    made = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(folder),
        peft.LoraConfig(**{"r": 4, "lora_alpha": 9, "task_type": "CAUSAL_LM"} | options),
    ).eval()
    generator = torch.Generator().manual_seed(2)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0.0, 0.1, generator=generator)
    made.save_pretrained(str(tmp_path))
    ours = load_decoder(folder)
    load_peft(ours, tmp_path)
    assert_close(logits(ours), logits(made))
    save_peft(tmp_path / "again", ours, str(folder))
    assert_close(logits(theirs(folder, tmp_path / "again")), logits(made))


def test_one_adapter_of_a_fused_matrix_becomes_one_of_each_part(base: Callable[[str], Path], tmp_path: Path):
    config = peft.LoraConfig(r=4, lora_alpha=9, target_modules=["c_attn"], fan_in_fan_out=True)
    made = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base("gpt2")), config).eval()
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    made.save_pretrained(str(tmp_path))
    ours = load_decoder(base("gpt2"))
    load_peft(ours, tmp_path)
    assert {name.split(".")[3] for name in adapters(ours)} == {"q", "k", "v"}
    assert_close(logits(ours), logits(made))


def test_what_peft_would_give_to_the_experts_is_refused(base: Callable[[str], Path], tmp_path: Path):
    decoder = adapted(base("deepseek_v3"), ("layers.*.mlp.shared.up",))
    for ask in (lambda: save_peft(tmp_path / "adapter", decoder, "base"), lambda: check_peft(decoder)):
        with pytest.raises(UnsupportedError, match=r"layers\.1\.mlp\.shared\.up to the experts"):
            ask()
    assert not list(tmp_path.iterdir())


def test_a_folder_is_never_overwritten_and_a_plain_model_has_nothing_to_save(
    base: Callable[[str], Path], tmp_path: Path
):
    with pytest.raises(LoraError, match="no adapters"):
        save_peft(tmp_path / "new", load_decoder(base("llama")), "base")
    (tmp_path / "kept.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="not empty"):
        save_peft(tmp_path, adapted(base("llama"), ATTENTION), "base")


# --- the module and the ledger ------------------------------------------------------------------------


def test_the_adapters_are_what_the_ledger_says():
    for name in ("llama", "parallel", "experts", "latent"):
        spec = VARIANTS[name]
        decoder = noisy_decoder(spec)
        before = dict(decoder.named_parameters(remove_duplicate=False))
        targets = ATTENTION if name in ("experts", "latent") else DEFAULT_TARGETS
        add_lora(decoder, 3, 6.0, targets)
        rows = lora_rows(spec, 3, targets)
        learned = {name: tuple(p.shape) for name, p in decoder.named_parameters() if p.requires_grad}
        assert learned == {row.name: row.shape for row in rows}
        assert sum(p.numel() for p in decoder.parameters() if p.requires_grad) == lora_parameters(
            spec, 3, targets
        )
        kept = dict(decoder.named_parameters(remove_duplicate=False))
        assert all(kept[name] is parameter for name, parameter in before.items())


def test_the_count_by_hand():
    """SmolLM2-135M: width 576, keys and values 192, feed-forward 1536, 30 layers. r·(in + out) for each."""
    one = (576 + 576) * 2 + (576 + 192) * 2 + (576 + 1536) * 3
    assert lora_parameters(preset("smollm2-135m"), 8) == 30 * 8 * one == 2_442_240
    assert lora_parameters(preset("smollm2-135m"), 8, ["layers.*.attn.q", "layers.*.attn.v"]) == 460_800


def test_a_row_writes_its_formula_in_letters():
    first, second = lora_rows(VARIANTS["llama"], 3, ["layers.0.attn.q"])
    assert (first.name, first.formula, first.letters) == ("layers.0.attn.q.lora_a", "r·D", ("r", "D"))
    assert (second.name, second.formula, second.letters) == ("layers.0.attn.q.lora_b", "H·K·r", ("H·K", "r"))


def test_only_adapters_are_given_to_the_optimizer():
    spec = VARIANTS["llama"]
    decoder = noisy_decoder(spec)
    add_lora(decoder, 2, 4.0)
    groups = parameter_groups(decoder, [*ledger(spec).tensors, *lora_rows(spec, 2)])
    assert set(groups.block_matrices) == {row.name for row in lora_rows(spec, 2)}
    assert not groups.matrices
    assert not groups.plain


def test_a_new_adapter_changes_nothing_and_learns():
    decoder = noisy_decoder(VARIANTS["llama"])
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        before = decoder(tokens)
    add_lora(decoder, 2, 4.0)
    after = decoder(tokens)
    assert torch.equal(after, before)
    after.square().sum().backward()
    for name, parameter in decoder.named_parameters():
        learns = name.endswith("lora_b")  # the gradient of A goes through B, which is still zero
        assert (parameter.grad is not None and bool(parameter.grad.any())) == learns, name


def test_the_first_values_depend_on_seed_and_name_alone():
    def values(targets: tuple[str, ...], seed: int) -> dict[str, Tensor]:
        decoder = noisy_decoder(VARIANTS["llama"])
        add_lora(decoder, 3, 6.0, targets, seed)
        return {name: adapter.lora_a.detach() for name, adapter in adapters(decoder).items()}

    some, all_of_them, others = (
        values(("layers.1.attn.q",), 5),
        values(DEFAULT_TARGETS, 5),
        values(DEFAULT_TARGETS, 6),
    )
    name = "layers.1.attn.q"
    assert torch.equal(some[name], all_of_them[name])
    assert not torch.equal(some[name], others[name])
    assert not torch.equal(all_of_them["layers.0.attn.q"], all_of_them[name])
    bound = some[name].shape[1] ** -0.5
    assert 0.8 * bound < some[name].abs().max() <= bound


def test_merging_gives_plain_modules_and_leaves_the_old_matrices_alone():
    decoder = noisy_decoder(VARIANTS["llama"])
    plain = {name: type(module) for name, module in decoder.named_modules()}
    before = decoder.get_parameter(MATRIX).detach().clone()
    matrix = decoder.get_parameter(MATRIX)
    add_lora(decoder, 2, 4.0)
    with_noise(decoder)
    merge_lora(decoder)
    assert {name: type(module) for name, module in decoder.named_modules()} == plain
    assert all(parameter.requires_grad for parameter in decoder.parameters())
    assert torch.equal(matrix, before), "a mapped file would have been written to"
    assert not torch.equal(decoder.get_parameter(MATRIX), before)


def test_native_steps_never_leave_adapters_out():
    decoder = noisy_decoder(VARIANTS["llama"])
    add_lora(decoder, 3, 30.0)
    with_noise(decoder)
    greedy = {"max_tokens": 12, "temperature": 0.0}
    ours = [token.id for token in LanguageModel(decoder).tokens([3, 1, 4], **greedy)]
    merge_lora(decoder)
    assert ours == [token.id for token in LanguageModel(decoder).tokens([3, 1, 4], **greedy)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("way", ["fp32", "bf16 weights", "autocast"])
def test_adapted_maps_have_the_values_and_gradients_of_their_formula(way: str, bias: bool):
    """W x + b + 1.5 · B A x in double precision; what is rounded to bf16 errs by a part of its norm."""
    linear = nn.Linear(23, 37, bias=bias, dtype=torch.bfloat16 if way == "bf16 weights" else None)
    a, b = torch.randn(3, 23), torch.randn(37, 3)
    module = LoraLinear(linear.requires_grad_(False), a, b, 1.5)
    x, slopes = torch.randn(2, 11, 23, dtype=linear.weight.dtype), torch.randn(2, 11, 37)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, a, b)]
    y = exact[0] @ (linear.weight.double() + 1.5 * exact[2] @ exact[1]).T
    expected = [y, *torch.autograd.grad(((y + linear.bias.double() if bias else y) * slopes).sum(), exact)]
    expected[0] = y + linear.bias.double() if bias else y
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        y = module(x)
        with torch.no_grad():
            unlearned = module(x)
    found = [y, *torch.autograd.grad((y.float() * slopes).sum(), [x, module.lora_a, module.lora_b])]
    assert [tensor.dtype for tensor in found[2:]] == [torch.float32] * 2
    for ours, right in zip([*found, unlearned], [*expected, expected[0]], strict=True):
        assert (ours.double() - right).norm() <= (1e-6 if way == "fp32" else 8e-3) * right.norm()


def test_bf16_weights_have_fp32_adapters():
    decoder = noisy_decoder(VARIANTS["llama"]).bfloat16()
    add_lora(decoder, 2, 4.0)
    with_noise(decoder)
    tokens = torch.arange(12)[None]
    assert {adapter.lora_a.dtype for adapter in adapters(decoder).values()} == {torch.float32}
    with torch.no_grad():
        before = decoder(tokens)
        merge_lora(decoder)
        after = decoder(tokens)
    assert decoder.get_parameter(MATRIX).dtype == torch.bfloat16
    probs = before.float().softmax(-1)
    divergence = (probs * (probs.log() - after.float().log_softmax(-1))).sum(-1)
    assert divergence.max() < 2e-3


# --- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "targets", "message"),
    [
        ("llama", ["layers.*.attn.query"], r"names no matrix .* there are layers\.\*\.attn\.q, "),
        ("llama", ["layers.*.attn_norm"], "names no matrix"),
        ("llama", ["head"], "names no matrix"),
        ("llama", [], "must be a list"),
        ("llama", "layers.*.attn.q", "must be a list"),
        ("experts", ["layers.*.mlp.router"], "decides who computes"),
        ("experts", ["layers.*.mlp.experts.up"], "stacks"),
        ("latent", ["layers.*.attn.kv_up"], "latent attention also multiplies"),
    ],
)
def test_a_target_that_selects_nothing_is_refused(variant: str, targets: Any, message: str):
    with pytest.raises(LoraError, match=message):
        lora_targets(VARIANTS[variant], targets)


@pytest.mark.parametrize(("rank", "alpha"), [(0, 1), (-1, 1), (True, 1), (2.0, 1), (2, 0), (2, float("nan"))])
def test_ranks_and_alphas_that_make_no_adapter_are_refused(rank: Any, alpha: Any):
    decoder = noisy_decoder(VARIANTS["llama"])
    with pytest.raises(LoraError, match="must be"):
        add_lora(decoder, rank, alpha)
    assert all(parameter.requires_grad for parameter in decoder.parameters())


def test_a_second_set_of_adapters_is_refused():
    decoder = noisy_decoder(VARIANTS["llama"])
    add_lora(decoder, 2, 4.0)
    with pytest.raises(LoraError, match="merge them before"):
        add_lora(decoder, 2, 4.0)


@pytest.fixture(scope="module")
def adapter(base: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "llama"
    save_peft(folder, adapted(base("llama"), ("layers.*.attn.q", "layers.*.attn.v")), "base")
    return folder


def spoiled(adapter: Path, to: Path, tensors: Any = None, **config: Any) -> Path:
    """A copy with other keys in its configuration, or with what `tensors` makes of its tensors."""
    about = json.loads((adapter / "adapter_config.json").read_text()) | config
    (to / "adapter_config.json").write_text(json.dumps(about))
    values = load_file(adapter / "adapter_model.safetensors")
    save_file(tensors(values) if tensors else values, to / "adapter_model.safetensors")
    return to


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("bias", "all"),
        ("lora_bias", True),
        ("modules_to_save", ["lm_head"]),
        ("trainable_token_indices", [3]),
        ("target_parameters", ["mlp.experts.down_proj"]),
        ("init_lora_weights", "pissa"),
        ("layer_replication", [[0, 2]]),
        ("use_of_tomorrow", {"strength": 3}),
        ("peft_type", "IA3"),
        ("r", 0),
        ("r", "8"),
        ("r", 10**12),
        ("lora_alpha", -1),
        ("lora_alpha", None),
        ("rank_pattern", {"(a+)+$": 3}),
        ("alpha_pattern", {"(.*q_proj": 3}),
        ("alpha_pattern", [3]),
        ("rank_pattern", {"q_proj": "3"}),
    ],
)
def test_options_that_are_not_supported_are_refused_by_name(
    key: str, value: Any, adapter: Path, base: Callable[[str], Path], tmp_path: Path
):
    decoder = load_decoder(base("llama"))
    shape = "lora_A" if (key, value) == ("r", 10**12) else key
    with bounded_work(20), pytest.raises(FileError, match=shape):
        load_peft(decoder, spoiled(adapter, tmp_path, **{key: value}))
    assert not adapters(decoder)


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (lambda t: {}, "without tensors"),
        (lambda t: {k: v for k, v in t.items() if k != f"{Q}.lora_B.weight"}, "lora_B.*missing"),
        (lambda t: t | {f"{Q}.lora_B.weight": t[f"{Q}.lora_A.weight"].clone()}, "the shape"),
        (lambda t: t | {f"{Q}.lora_A.weight": t[f"{Q}.lora_A.weight"].double()}, "F64"),
        (lambda t: t | {f"{Q}.lora_A.weight": t[f"{Q}.lora_A.weight"] * torch.nan}, "NaN"),
        (lambda t: t | {f"{Q}.lora_magnitude_vector.weight": torch.ones(80)}, "not supported"),
        (lambda t: t | {f"{Q}s.lora_A.weight": torch.ones(3, 48)}, "no linear module"),
        (lambda t: t | {f"{Q[17:]}.lora_A.weight": t[f"{Q}.lora_A.weight"].clone()}, "no linear module"),
        (lambda t: t | {"base_model.model.lm_head.weight": torch.ones(131, 48)}, "no linear module"),
        (lambda t: t | {"\x1b[2J.lora_A.weight": torch.ones(1)}, "no linear module"),
    ],
    ids=["none", "half", "shape", "dtype", "nan", "magnitude", "name", "twice", "saved-whole", "escape"],
)
def test_tensors_that_are_no_adapters_of_this_model_are_refused(
    tensors: Any, message: str, adapter: Path, base: Callable[[str], Path], tmp_path: Path
):
    decoder = load_decoder(base("llama"))
    with pytest.raises(FileError, match=message) as error:
        load_peft(decoder, spoiled(adapter, tmp_path, tensors))
    assert str(error.value).isprintable()
    assert not adapters(decoder)


def test_a_pickle_is_never_opened(adapter: Path, base: Callable[[str], Path], tmp_path: Path):
    (tmp_path / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(FileError, match="pickle can run code"):
        load_peft(load_decoder(base("llama")), tmp_path)


def test_an_adapter_of_another_model_is_refused(adapter: Path, base: Callable[[str], Path]):
    with pytest.raises(FileError, match="no linear module"):
        load_peft(load_decoder(base("gpt2")), adapter)


def test_a_module_of_another_kind_is_not_replaced():
    decoder = noisy_decoder(VARIANTS["llama"])
    decoder.set_submodule("layers.0.attn.q", nn.Identity())
    with pytest.raises(LoraError, match=r"layers\.0\.attn\.q is a Identity"):
        add_lora(decoder, 2, 4.0)
