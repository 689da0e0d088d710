"""PrivateTrainer: by how much one unit moves the sum of clipped gradients, with every source of a loss and both reductions."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers

import sparsedp
from sparsedp.errors import UnsupportedError
from sparsedp.integrations.transformers import _HOOKS, PrivateTrainer, softmax_over_table
from sparsedp.integrations.unit_losses import IGNORED

pytestmark = pytest.mark.models

VOCABULARY, LENGTH = 40, 6
BERT = {
    "vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "max_position_embeddings": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0,
}  # fmt: skip
GPT = {
    "vocab_size": VOCABULARY, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "summary_first_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
Rows = list[dict[str, Any]]


def bert(head: str = "ForSequenceClassification", **more: Any) -> nn.Module:
    torch.manual_seed(0)
    return getattr(transformers, f"Bert{head}")(transformers.BertConfig(**BERT, **more))


def gpt2(head: str = "LMHeadModel", **more: Any) -> nn.Module:
    torch.manual_seed(0)
    return getattr(transformers, f"GPT2{head}")(transformers.GPT2Config(**GPT, **more))


def deberta(**more: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.DebertaV2Config(
        **BERT, pooler_hidden_size=8, pooler_dropout=0.0, relative_attention=True, pos_att_type=["p2c", "c2p"], **more
    )
    return transformers.DebertaV2ForSequenceClassification(config)


def texts(units: int = 4) -> Rows:
    """Padded texts: one of a repeated token, one of one token, one of nothing but padding."""
    ids = torch.randint(3, VOCABULARY, (units, LENGTH), generator=torch.Generator().manual_seed(1))
    ids[0] = 7
    lengths = [LENGTH, 4, 1, 0, *[3] * units][:units]
    mask = (torch.arange(LENGTH) < torch.tensor(lengths)[:, None]).long()
    return [{"input_ids": a, "attention_mask": b} for a, b in zip((ids * mask).tolist(), mask.tolist())]


def labelled(labels: Callable[[int, list[int]], Any], units: int = 4) -> Rows:
    return [{**row, "labels": labels(i, row["input_ids"])} for i, row in enumerate(texts(units))]


def classes(i: int, ids: list[int]) -> int:
    return i % 2


def next_tokens(i: int, ids: list[int]) -> list[int]:
    """Of the texts that have some; the second labels its last token alone."""
    kept = [token or IGNORED for token in ids]
    return [IGNORED] * 3 + kept[3:] if i == 1 else kept


def trainer(model: nn.Module, rows: Rows, clip: float, reduction: Any, kind: Any = None, **more: Any) -> PrivateTrainer:
    """One step over all of `rows`, without noise."""
    physical = more.pop("physical", len(rows))
    arguments = transformers.TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=physical, gradient_accumulation_steps=-(-len(rows) // physical),
        max_steps=1, learning_rate=1.0, optim="sgd", lr_scheduler_type="constant", save_strategy="no", report_to="none",
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    return (PrivateTrainer if kind is None else kind)(
        model, arguments, train_dataset=rows, noise_multiplier=0.0, engine=sparsedp.PrivacyEngine(seed=0), log_training_loss=False,
        privacy=sparsedp.PrivacySettings(max_grad_norm=clip, loss_reduction=reduction, poisson_sampling=False), **more,
    )  # fmt: skip


def clipped_sum(make: Callable[[], nn.Module], rows: Rows, clip: float, reduction: Any = "mean", **more: Any) -> Tensor:
    """What a step moves the parameters by, times what it was divided by."""
    private = trainer(make().double(), rows, clip, reduction, **more)
    before = flat(private.model)
    private.train()
    assert private.engine.ledger.steps == 1
    arguments = private.args
    divisor = arguments.per_device_train_batch_size if reduction == "mean" else 1
    return (before - flat(private.model)) * divisor


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def with_problem(labels: Callable[[int, list[int]], Any], **config: Any) -> tuple[Callable[..., Any], Any]:
    return (lambda: bert(**config)), labels


def over_table() -> nn.Module:
    """Called for the mean, whatever the trainer's reduction is."""
    return softmax_over_table(gpt2())


def tuned(model: nn.Module, config: str, task: str) -> nn.Module:
    """Under PEFT, with so many virtual tokens."""
    peft = pytest.importorskip("peft")
    more = {"encoder_hidden_size": 4} if config == "PromptEncoderConfig" else {}
    return peft.get_peft_model(model, getattr(peft, config)(task_type=task, num_virtual_tokens=2, **more))


LEFT_OUT = (0, 3)  # the text of a repeated token, and the one that is nothing but padding
SOURCES: dict[str, tuple[Callable[[], nn.Module], Callable[[int, list[int]], Any]]] = {
    "BERT, classes": (bert, classes),
    "BERT, classes, one without": (bert, lambda i, ids: IGNORED if i == 1 else i % 2),
    "BERT, regression": with_problem(lambda i, ids: i / 2, num_labels=1),
    "BERT, regression of whole numbers": with_problem(classes, num_labels=1),
    "BERT, regression of two": with_problem(lambda i, ids: [i / 2, 1.0], num_labels=2, problem_type="regression"),
    "BERT, several labels": with_problem(lambda i, ids: [1.0, float(i % 2), 0.0], num_labels=3),
    "GPT-2, classes": (lambda: gpt2("ForSequenceClassification"), classes),
    "DeBERTa-v2, classes": (deberta, classes),
    "DeBERTa-v2, regression": (lambda: deberta(num_labels=1), lambda i, ids: i / 2),
    "GPT-2, next tokens": (gpt2, next_tokens),
    "GPT-2, softmax over the table": (over_table, next_tokens),
    "GPT-2, next tokens after a prefix": (lambda: tuned(gpt2(), "PrefixTuningConfig", "CAUSAL_LM"), next_tokens),
    "BERT, classes after a prompt": (lambda: tuned(bert(), "PromptTuningConfig", "SEQ_CLS"), classes),
    "BERT, masked tokens": (lambda: bert("ForMaskedLM"), next_tokens),
    "BERT, tokens": (lambda: bert("ForTokenClassification"), lambda i, ids: [IGNORED if t == 0 else t % 2 for t in ids]),
}  # fmt: skip


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", SOURCES)
def test_the_sum_without_a_unit_differs_by_this_unit_alone(name: str, reduction: str) -> None:
    """Unclipped, the sum over all is the sum over the rest plus that of the unit alone; clipped, it moves by C at most."""
    make, labels = SOURCES[name]
    rows = labelled(labels)
    whole, norms = clipped_sum(make, rows, 1e3, reduction), {}
    for unit in LEFT_OUT:
        alone, rest = ([rows[unit]], rows[:unit] + rows[unit + 1 :])
        difference = whole - clipped_sum(make, rest, 1e3, reduction)
        torch.testing.assert_close(difference, clipped_sum(make, alone, 1e3, reduction), atol=1e-7, rtol=1e-6)
        norms[unit] = float(difference.norm())
    clip = norms[0] / 2
    whole = clipped_sum(make, rows, clip, reduction)
    for unit, norm in norms.items():
        moved = float((whole - clipped_sum(make, rows[:unit] + rows[unit + 1 :], clip, reduction)).norm())
        assert moved == pytest.approx(min(norm, clip), rel=1e-5, abs=1e-9)


def test_a_sum_of_losses_is_no_mean_of_them_where_one_more_unit_would_move_the_sum_twice_as_far() -> None:
    """Four like units and one against them: a loss that divides by the batch moves the clipped sum by 1.6 C."""
    rows = [{**texts(1)[0], "labels": int(i == 4)} for i in range(5)]
    size = float(clipped_sum(bert, rows[:1], 1e3, "sum").norm())
    clip = size / 4
    moved = (clipped_sum(bert, rows, clip, "sum") - clipped_sum(bert, rows[:4], clip, "sum")).norm()
    assert float(moved) == pytest.approx(clip, rel=1e-3)


# ---------------------------------------------------------------------- losses of somebody's own


def loss_of(reduction: str) -> Callable[..., Tensor]:
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
        assert num_items_in_batch is None
        return nn.functional.cross_entropy(outputs["logits"], labels, reduction=reduction)

    return loss


class OwnLoss(PrivateTrainer):
    reduction = "mean"

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs = dict(inputs)
        return loss_of(self.reduction)(model(**inputs), inputs.pop("labels"))


class OwnSum(OwnLoss):
    reduction = "sum"


class MultipleChoice(nn.Module):
    """Of a kind that has no loss per unit here: what forward() returns is the loss."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.inner, self.reduction = bert(), reduction

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.inner(input_ids, attention_mask).logits
        return {"loss": nn.functional.cross_entropy(logits, labels, reduction=self.reduction)}


def assigned(reduction: str) -> PrivateTrainer:
    """A compute_loss that was put on the object itself."""
    private = trainer(bert(), labelled(classes), 1.0, "mean" if reduction == "sum" else "sum")

    def compute_loss(model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        inputs = dict(inputs)
        return loss_of(reduction)(model(**inputs), inputs.pop("labels"))

    private.compute_loss = compute_loss  # type: ignore[method-assign]
    return private


OTHER: dict[str, str] = {"mean": "sum", "sum": "mean"}
OWN: dict[str, Callable[[str], PrivateTrainer]] = {
    "compute_loss_func": lambda r: trainer(bert(), labelled(classes), 1.0, OTHER[r], compute_loss_func=loss_of(r)),
    "compute_loss": lambda r: trainer(bert(), labelled(classes), 1.0, OTHER[r], OwnLoss if r == "mean" else OwnSum),
    "compute_loss of the object": assigned,
    "a model's own": lambda r: trainer(MultipleChoice(r), labelled(classes), 1.0, OTHER[r]),
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", OWN)
def test_a_loss_of_the_other_reduction_is_refused_before_training(name: str, reduction: str) -> None:
    private = OWN[name](reduction)
    before = flat(private.model)
    with pytest.raises(sparsedp.SparseDPError, match=f"looks like a {reduction} over units, not a {OTHER[reduction]}"):
        private.train()
    assert private.engine.ledger.steps == 0 and torch.equal(before, flat(private.model))


def test_a_label_smoother_of_the_trainer_is_checked() -> None:
    """It divides by the valid tokens of the batch."""
    private = trainer(gpt2(), labelled(next_tokens), 1.0, "mean")
    private.label_smoother = transformers.trainer_pt_utils.LabelSmoother(epsilon=0.1)
    with pytest.raises(sparsedp.SparseDPError, match=r"[Uu]nits"):
        private.train()


def test_a_loss_that_is_not_what_the_models_name_says_is_refused() -> None:
    """It would be left out, silently."""

    class WeighsForSequenceClassification(transformers.BertForSequenceClassification):
        def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
            outputs = super().forward(input_ids, attention_mask, labels=labels)
            if labels is not None:
                outputs["loss"] = 2 * outputs["loss"]
            return outputs

    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=8, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=8, init_std=0.5,
        max_position_embeddings=16,
    )  # fmt: skip
    bart = transformers.BartForCausalLM(config)  # its labels are not shifted
    soft = deberta(num_labels=3)  # takes numbers for probabilities of classes
    for model, rows in (
        (WeighsForSequenceClassification(transformers.BertConfig(**BERT)), labelled(classes)),
        (bart, labelled(next_tokens)),
        (soft, labelled(lambda i, ids: [0.5, 0.5, 0.0])),
    ):
        before = flat(model)
        with pytest.raises(UnsupportedError, match=f"{type(model).__name__} returns for labels is not the one"):
            trainer(model, rows, 1.0, "mean").train()
        assert torch.equal(before, flat(model))


@pytest.mark.parametrize("config", ["PromptTuningConfig", "PromptEncoderConfig"])
def test_prompts_that_make_texts_of_tokens_longer_are_refused(config: str) -> None:
    with pytest.raises(UnsupportedError, match=r"PEFT's P\w+ puts tokens before each text"):
        trainer(tuned(gpt2(), config, "CAUSAL_LM"), labelled(next_tokens), 1.0, "mean").train()


@pytest.mark.parametrize("over_table", [False, True])
def test_a_loss_of_routers_is_refused(over_table: bool) -> None:
    """Without labels for the model, it would be left out, silently."""

    def mixtral(**more: Any) -> nn.Module:
        torch.manual_seed(0)
        return transformers.MixtralForCausalLM(
            transformers.MixtralConfig(
                vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
                intermediate_size=8, max_position_embeddings=16, num_local_experts=2, num_experts_per_tok=1, **more,
            )
        )  # fmt: skip

    rows = labelled(next_tokens)
    with pytest.raises(UnsupportedError, match=r"config\.output_router_logits=True adds a loss"):
        trainer(mixtral(output_router_logits=True), rows, 1.0, "mean", softmax_over_table=over_table).train()
    trainer(mixtral(), rows, 1.0, "mean", softmax_over_table=over_table).train()


@pytest.mark.parametrize("name", ["_prepare_for_training", "_run_epoch", "_clip_grad_norm", "get_batch_samples"])
def test_a_version_without_what_is_replaced_is_refused_by_its_number(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delattr(transformers.Trainer, name)
    with pytest.raises(UnsupportedError, match=f"transformers {transformers.__version__} has no Trainer.{name}"):
        trainer(bert(), labelled(classes), 1.0, "mean")


def test_every_method_of_trainer_that_is_replaced_is_looked_for() -> None:
    replaced = {
        name for name in vars(PrivateTrainer) if hasattr(transformers.Trainer, name) and not name.startswith("__")
    }
    assert replaced - {"train", "hyperparameter_search", "add_callback", "compute_loss"} <= set(_HOOKS)
    assert all(hasattr(transformers.Trainer, name) for name in _HOOKS)


# ---------------------------------------------------------------------- whole runs: physical batches, empty batches, awkward texts


def poisson(
    model: nn.Module, rows: Rows, folder: Path, clip: float, **more: Any
) -> tuple[PrivateTrainer, list[Tensor]]:
    """A run of some steps without noise over Poisson samples, in physical batches of two; what each step moved the weights by."""
    given = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 6, "learning_rate": 1e-3,
        "optim": "sgd", "lr_scheduler_type": "constant", "save_strategy": "no", "report_to": "none", "use_cpu": True,
        "disable_tqdm": True, "logging_steps": 1,
    }  # fmt: skip
    private = PrivateTrainer(
        model, transformers.TrainingArguments(str(folder), **{**given, **more}), train_dataset=rows, noise_multiplier=0.0,
        engine=sparsedp.PrivacyEngine(seed=4), log_training_loss=False,
        privacy=sparsedp.PrivacySettings(max_grad_norm=clip, loss_reduction="sum"),
    )  # fmt: skip
    weights = [flat(private.model)]

    class Looks(transformers.TrainerCallback):
        def on_step_end(self, *arguments: Any, **keywords: Any) -> None:
            weights.append(flat(private.model))

    private.add_callback(Looks())
    private.train()
    return private, [(before - after) / 1e-3 for before, after in itertools.pairwise(weights)]


AWKWARD: dict[str, tuple[Callable[[], nn.Module], Callable[[int, list[int]], Any]]] = {
    name: SOURCES[name] for name in ("BERT, classes", "GPT-2, next tokens", "GPT-2, softmax over the table", "BERT, masked tokens")
}  # fmt: skip


@pytest.mark.parametrize("name", AWKWARD)
def test_a_unit_moves_a_step_in_physical_batches_by_the_bound_at_most(tmp_path: Path, name: str) -> None:
    """The same key: a batch of the neighbour is that of the data without the unit that was left out."""
    make, labels = AWKWARD[name]
    rows = labelled(labels, 8)
    clip = float(clipped_sum(make, rows[:1], 1e3, "sum").norm()) / 2
    whole, moves = poisson(make().double(), rows, tmp_path / "whole", clip, max_steps=1)
    assert whole.engine.ledger.steps == len(moves) == 1
    largest = 0.0
    for unit in range(len(rows)):
        # The unit stays in its place, without a label that has a loss: what the sample is does not change.
        without = [dict(row) for row in rows]
        nothing = without[unit]["labels"]
        without[unit]["labels"] = [IGNORED] * len(nothing) if isinstance(nothing, list) else IGNORED
        _, others = poisson(make().double(), without, tmp_path / f"{unit}", clip, max_steps=1)
        largest = max(largest, float((moves[0] - others[0]).norm()))
    assert clip * 0.99 < largest <= clip * (1 + 1e-6)


def test_awkward_texts_and_empty_batches_train_and_leave_nothing_but_what_is_said(tmp_path: Path) -> None:
    rows = labelled(classes, 4)
    private, moves = poisson(
        bert().double(), rows, tmp_path, 0.1, per_device_train_batch_size=1, gradient_accumulation_steps=1, max_steps=24,
        save_strategy="steps", save_steps=24,
    )  # fmt: skip
    assert private.engine.ledger.steps == len(moves) == 24
    sizes = [float(move.norm()) for move in moves]
    assert min(sizes) == 0 and 0 < max(sizes) <= 4 * 0.1 * (1 + 1e-6)  # an empty batch moves nothing, and counts
    logged = {name for row in private.state.log_history for name in row}
    assert logged <= {
        "epoch", "step", "learning_rate", "epsilon", "train_runtime", "train_samples_per_second", "train_steps_per_second",
        "total_flos",
    }  # fmt: skip
    files = {path.name for path in (tmp_path / "checkpoint-24").iterdir()}
    assert files == {
        "config.json",
        "model.safetensors",
        "sparsedp.pt",
        "trainer_state.json",
        "training_args.bin",
        "rng_state.pth",
    }
    state = json.loads((tmp_path / "checkpoint-24" / "trainer_state.json").read_text())
    assert {name for row in state["log_history"] for name in row} <= logged and state["total_flos"] == 0
    weights = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "checkpoint-24").state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in private.model.state_dict().items())
