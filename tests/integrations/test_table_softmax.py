"""softmax_over_table: a causal model's loss without logits, exact against ordinary ones; what it takes, and what it refuses."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

import transformers

import sparsedp
from sparsedp.capture.uses import logit_gradients
from sparsedp.errors import UnsupportedError
from sparsedp.integrations.table_softmax import is_over_table, softmax_over_table
from sparsedp.integrations.transformers import LARGE, PrivateTrainer
from support import assert_equal, capture_uses, one_by_one

pytestmark = pytest.mark.models

VOCABULARY, LENGTH, UNITS = 40, 8, 4
GPT = {
    "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
LLAMA = {
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16,
    "max_position_embeddings": 16, "tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
OPT = {
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 16, "max_position_embeddings": 16,
    "word_embed_proj_dim": 8, "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip


def gpt2(rows: int = VOCABULARY, **more: Any) -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=rows, **{**GPT, **more}))


def llama(rows: int = VOCABULARY, **more: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=rows, **{**LLAMA, **more}))


def gemma3(rows: int = VOCABULARY, **more: Any) -> nn.Module:
    config = transformers.Gemma3TextConfig(vocab_size=rows, head_dim=4, **{**LLAMA, **more})
    return transformers.Gemma3ForCausalLM(config)


def frozen_table(rows: int = VOCABULARY) -> nn.Module:
    model = gpt2(rows)
    model.get_output_embeddings().weight.requires_grad_(False)
    return model


def own_input_table(rows: int = VOCABULARY) -> nn.Module:
    """The words' rows are trained, as a copy of the head's table, which is frozen."""
    model = frozen_table(rows)
    table = model.get_input_embeddings()
    table.weight = nn.Parameter(table.weight.detach().clone())
    return model


def lora(**more: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], **more)
    model = peft.get_peft_model(llama(), config)
    for name, parameter in model.named_parameters():  # B starts at zero, and A has no gradient then
        if "lora_" in name:
            nn.init.normal_(parameter)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "llama": llama,
    "gemma3": gemma3,
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(vocab_size=VOCABULARY, head_dim=4, **LLAMA)),
    "opt": lambda: transformers.OPTForCausalLM(transformers.OPTConfig(vocab_size=VOCABULARY, **OPT)),
    "cohere, whose logits are scaled": lambda: transformers.CohereForCausalLM(
        transformers.CohereConfig(vocab_size=VOCABULARY, logit_scale=0.3, **LLAMA)
    ),
    "llama, not tied": lambda: llama(tie_word_embeddings=False),
    "gpt2, its table frozen": frozen_table,
    "gpt2, the words' rows trained beside a frozen head": own_input_table,
    "lora": lora,
    "lora, with trained word embeddings": lambda: lora(modules_to_save=["embed_tokens"]),
    "lora, with a trained head": lambda: lora(modules_to_save=["lm_head"]),
}  # fmt: skip


def tokens(units: int = UNITS, rows: int = VOCABULARY) -> list[Tensor]:
    """Ids, masks and labels: padded on the right; the second unit labels few of its tokens, the third none."""
    ids = torch.randint(3, rows, (units, LENGTH), generator=torch.Generator().manual_seed(1))
    ids[:, 3] = ids[:, 1]
    lengths = torch.tensor([LENGTH, 6, 5, 3] * units)[:units, None]
    mask = (torch.arange(LENGTH) < lengths).long()
    labels = ids.masked_fill(mask == 0, -100)
    labels[1:2, :4], labels[2:3] = -100, -100
    return [ids * mask, mask, labels]


class Loss(nn.Module):
    """The sum over units of a model's own loss for the labels of each."""

    def __init__(self, model: nn.Module, ordinary: bool) -> None:
        super().__init__()
        self.model, self.ordinary = model, ordinary

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        if not self.ordinary:
            out = self.model(input_ids=ids, attention_mask=mask, labels=labels)
            assert "logits" not in out
            return out.loss
        logits = self.model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        losses = nn.functional.cross_entropy(logits.mT, labels[:, 1:], reduction="none", ignore_index=-100)
        return (losses.sum(1) / (labels[:, 1:] != -100).sum(1).clamp(min=1)).sum()


@pytest.mark.parametrize("name", MODELS)
def test_norms_and_sums_are_those_of_ordinary_logits(name: str) -> None:
    """Of each unit alone, in float64. transformers computes norms and angles in float32 whatever the model's type is."""
    torch.manual_seed(0)
    model = MODELS[name]().double().train()
    batch = tokens()
    wanted = one_by_one(Loss(copy.deepcopy(model), ordinary=True), batch, loss=lambda value: value)
    module = Loss(softmax_over_table(model, "sum"), ordinary=False)
    found = capture_uses(module, batch, loss=lambda value: value)
    assert_equal(module, found, wanted, 1e-9 if name.startswith(("gpt2", "opt")) else 3e-6)


def test_the_loss_is_the_mean_over_units_and_the_value_that_of_logits() -> None:
    torch.manual_seed(0)
    model = gpt2().double()
    wanted = Loss(copy.deepcopy(model), ordinary=True)(*tokens())
    ids, mask, labels = tokens()
    model.train()
    softmax_over_table(model, "sum")
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    torch.testing.assert_close(model(**inputs).loss, wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        softmax_over_table(model)(**inputs, num_items_in_batch=3).loss, wanted / UNITS, rtol=1e-12, atol=0
    )
    torch.testing.assert_close(model(ids, None, mask, labels=labels).loss, wanted / UNITS, rtol=1e-12, atol=0)


# ---------------------------------------------------------------------- a drop-in


def test_the_model_is_otherwise_as_it_was() -> None:
    torch.manual_seed(0)
    model = llama()
    plain = copy.deepcopy(model)
    modes = {name: part.training for name, part in model.named_modules()}
    assert softmax_over_table(model) is model and is_over_table(model) and not is_over_table(plain)
    assert modes == {name: part.training for name, part in model.named_modules()}
    assert list(model.state_dict()) == list(plain.state_dict())
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    ids, mask, labels = tokens()
    for training in (False, True):
        model.train(training), plain.train(training)
        assert torch.equal(model(ids, mask).logits, plain(ids, mask).logits)
    assert "logits" not in model(ids, mask, labels=labels)
    model.eval(), plain.eval()
    assert torch.equal(model(ids, mask, labels=labels).logits, plain(ids, mask).logits)


def test_a_copy_is_of_its_own_weights() -> None:
    torch.manual_seed(0)
    model = softmax_over_table(gpt2().train())
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    ids, mask, labels = tokens()
    losses = [float(each(input_ids=ids, attention_mask=mask, labels=labels).loss.detach()) for each in (model, other)]
    assert losses[0] != losses[1]
    assert is_over_table(other)


def test_the_head_is_whole_again_after_an_error() -> None:
    model = softmax_over_table(gpt2().train())
    ids, mask, labels = tokens()
    with pytest.raises(ValueError, match="targets lie between"):
        model(input_ids=ids, attention_mask=mask, labels=labels.masked_fill(labels >= 0, VOCABULARY))
    assert model(input_ids=ids).logits.shape == (UNITS, LENGTH, VOCABULARY)


# ---------------------------------------------------------------------- what is refused


def capped() -> nn.Module:
    config = transformers.Gemma2Config(vocab_size=VOCABULARY, head_dim=4, final_logit_softcapping=30.0, **LLAMA)
    return transformers.Gemma2ForCausalLM(config)


def biased() -> nn.Module:
    return transformers.GPTJForCausalLM(transformers.GPTJConfig(vocab_size=VOCABULARY, rotary_dim=2, **GPT))


def adapted_head() -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(llama(tie_word_embeddings=False), peft.LoraConfig(r=2, target_modules=["lm_head"]))


def replaced() -> nn.Module:
    model = gpt2()
    model.forward = model.forward  # as accelerate does it
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "soft-capping": (capped, "soft-capping: config.final_logit_softcapping"),
    "a bias": (biased, "has a bias"),
    "an adapter on the head": (adapted_head, "Leave adapters off the head"),
    "no head": (lambda: nn.Linear(2, 2), "is missing"),
    "an encoder-decoder": (
        lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=40, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)),
        "encoder-decoder",
    ),
    "a forward of its own": (replaced, "was replaced already"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_heads_that_are_no_table_are_refused(name: str) -> None:
    make, said = REFUSED[name]
    model = make()
    before = dict(vars(model))
    with pytest.raises(UnsupportedError, match=said):
        softmax_over_table(model)
    assert vars(model) == before


def test_options_that_would_be_ignored_are_refused() -> None:
    model = softmax_over_table(gpt2().train())
    ids, mask, labels = tokens()
    for name, value in (("shift_labels", labels), ("return_dict", False)):
        with pytest.raises(UnsupportedError, match=name):
            model(input_ids=ids, attention_mask=mask, labels=labels, **{name: value})


# ---------------------------------------------------------------------- in the Trainer


def trained(
    folder: Path,
    model: nn.Module,
    over_table: bool | None,
    mechanism: sparsedp.Mechanism,
    reduction: Any = "mean",
    **more: Any,
) -> PrivateTrainer:
    ids, mask, labels = tokens(24)
    rows = [
        {"input_ids": a, "attention_mask": b, "labels": c}
        for a, b, c in zip(ids.tolist(), mask.tolist(), labels.tolist())
    ]
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=3, learning_rate=0.5, optim="sgd",
        use_cpu=True, disable_tqdm=True, report_to="none", save_strategy="no", logging_steps=1,
    )  # fmt: skip
    trainer = PrivateTrainer(
        model, arguments, train_dataset=rows, noise_multiplier=0.3, engine=sparsedp.PrivacyEngine(seed=5),
        privacy=sparsedp.PrivacySettings(max_grad_norm=0.5, mechanism=mechanism, loss_reduction=reduction),
        softmax_over_table=over_table, **more,
    )  # fmt: skip
    if over_table is not None:
        trainer.train()
    return trainer


MECHANISMS: dict[str, sparsedp.Mechanism] = {
    "dpsgd": sparsedp.DPSGD(),
    "adafest": sparsedp.AdaFEST(threshold=1.0, noise_ratio=1.0, map_clip=1.0),
    "lazydp": sparsedp.LazyDP(),
}


@pytest.mark.filterwarnings("ignore:Table .* is used whole:sparsedp.SparseDPWarning")
@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("make", [gpt2, own_input_table, llama, gemma3])
def test_a_run_is_that_of_ordinary_logits(tmp_path: Path, make: Callable[[], nn.Module], mechanism: str) -> None:
    runs = []
    for over_table in (False, True):
        torch.manual_seed(0)
        trainer = trained(tmp_path, make(), over_table, MECHANISMS[mechanism], "sum" if make is gpt2 else "mean")
        assert is_over_table(trainer.model) == over_table
        runs.append((trainer, trainer.model.state_dict()))
    (one, weights), (other, others) = runs
    assert one.engine.ledger.state_dict() == other.engine.ledger.state_dict() and one.epsilon() == other.epsilon()
    for name, value in weights.items():
        # Noisy sums lie on a grid of 2^-10 deviations: what rounds differently may be a point further, in each step.
        torch.testing.assert_close(value, others[name], rtol=1e-4, atol=1e-4)
    start = make().state_dict()
    assert any(not torch.equal(value, start[name]) for name, value in weights.items())
    logged = [[row["loss"] for row in run.state.log_history if "loss" in row] for run, _ in runs]
    assert len(logged[0]) == 3 and logged[0] == pytest.approx(logged[1], rel=1e-4)


def test_batches_without_units(tmp_path: Path) -> None:
    model = softmax_over_table(gpt2().train())
    engine = sparsedp.PrivacyEngine(seed=1)
    data = torch.utils.data.TensorDataset(*tokens(2))
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0,
        data_loader=torch.utils.data.DataLoader(data, batch_size=1, shuffle=True),
    )  # fmt: skip
    sizes = []
    for _ in range(8):
        for ids, mask, labels in loader:
            sizes.append(loader.current.units)
            optimizer.zero_grad()
            model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
            optimizer.step()
    assert min(sizes) == 0 and max(sizes) > 0 and engine.ledger.steps == len(sizes)
    assert all(bool(value.isfinite().all()) for value in model.state_dict().values())


def test_large_vocabularies_take_it_by_themselves(tmp_path: Path) -> None:
    mechanism = sparsedp.DPSGD()
    assert is_over_table(trained(tmp_path, gpt2(LARGE), None, mechanism).model)
    assert not is_over_table(trained(tmp_path, gpt2(LARGE - 1), None, mechanism).model)
    large = transformers.GPTJForCausalLM(transformers.GPTJConfig(vocab_size=LARGE, rotary_dim=2, **GPT))
    assert not is_over_table(trained(tmp_path, large, None, mechanism).model)  # its head has a bias
    own = {"compute_loss_func": lambda outputs, labels, num_items_in_batch=None: outputs["logits"].sum()}
    assert not is_over_table(trained(tmp_path, gpt2(LARGE), None, mechanism, **own).model)


def test_wishes_that_cannot_be_met_are_refused(tmp_path: Path) -> None:
    own = {"compute_loss_func": lambda outputs, labels, num_items_in_batch=None: outputs["logits"].sum()}
    encoder = transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
        )
    )
    for model, said, more in (
        (biased(), "has a bias", {}),
        (gpt2(), "compute_loss_func", own),
        (encoder, "trains BertForMaskedLM", {}),
    ):
        with pytest.raises(UnsupportedError, match=said):
            trained(tmp_path, model, True, sparsedp.DPSGD(), **more)
    with pytest.raises(ValueError, match="softmax_over_table=False"):
        trained(tmp_path, softmax_over_table(gpt2()), False, sparsedp.DPSGD())


# ---------------------------------------------------------------------- memory


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operation gave new memory to."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._known = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
                continue
            if tensor.untyped_storage().data_ptr() not in self._known:
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


def largest_of_a_step(model: nn.Module, mechanism: sparsedp.Mechanism, rows: int) -> int:
    model.train()
    engine = sparsedp.PrivacyEngine(seed=1)
    batch = tokens(16, rows)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        data_loader=torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch), batch_size=16, shuffle=True),
        noise_multiplier=1.0, max_grad_norm=1.0, mechanism=mechanism,
    )  # fmt: skip
    largest = 0
    for step in range(3):
        ((ids, mask, labels),) = loader
        optimizer.zero_grad()
        with Largest(model) as mode:
            model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
            optimizer.step()
        largest = mode.elements if step else 0  # the first step makes what is kept from step to step
    return largest


ROWS = 1500


@pytest.mark.filterwarnings("ignore:Table .* is used whole:sparsedp.SparseDPWarning")
@pytest.mark.parametrize("mechanism", ["adafest", "lazydp"])
@pytest.mark.parametrize("tied", [False, True])
def test_nothing_of_the_size_of_logits_or_the_table(
    monkeypatch: pytest.MonkeyPatch, mechanism: str, tied: bool
) -> None:
    """A step under a mechanism that selects rows, of a causal model with a large vocabulary."""
    monkeypatch.setattr(logit_gradients, "CHUNK", 1 << 10)
    monkeypatch.setattr(logit_gradients, "WHOLE", 1 << 10)
    torch.manual_seed(0)
    model = gpt2(ROWS) if tied else own_input_table(ROWS)
    softmax_over_table(model)
    largest = largest_of_a_step(model, {"adafest": sparsedp.AdaFEST(threshold=2.5, noise_ratio=1.0), "lazydp": sparsedp.LazyDP()}[mechanism], ROWS)  # fmt: skip
    table, logits = 8 * ROWS, 16 * (LENGTH - 1) * ROWS
    assert largest < logits / 8
    if tied and mechanism == "lazydp":  # every row has a gradient: the step is DP-SGD's
        assert largest >= table
    else:
        assert largest < table / 2


def test_ordinary_logits_are_of_their_size() -> None:
    """The measure sees what it is to see."""
    torch.manual_seed(0)
    model = own_input_table(ROWS)

    def forward(self: Any, **inputs: Any) -> Any:
        labels = inputs.pop("labels")
        out = type(self).forward(self, **inputs)
        losses = nn.functional.cross_entropy(out.logits[:, :-1].mT, labels[:, 1:], reduction="none")
        out.loss = losses.mean(1).mean()
        return out

    import types

    model.forward = types.MethodType(forward, model)
    assert largest_of_a_step(model, sparsedp.AdaFEST(threshold=2.5, noise_ratio=1.0), ROWS) >= 16 * LENGTH * ROWS / 2
