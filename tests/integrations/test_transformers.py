"""PrivateTrainer: the plain loop's run, resumed runs, losses of units, what is refused and what is logged."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers

import sparsedp
from documentation import DOCS
from sparsedp import concerns
from sparsedp.errors import CheckpointError, SparseDPError, UnsupportedError
from sparsedp.integrations.training_arguments import DECIDED, fields_of
from sparsedp.integrations.training_arguments import REFUSED as REASONS
from sparsedp.integrations.transformers import PrivateTrainer, loss_kind, refuse_arguments
from sparsedp.integrations.unit_losses import CLASSIFIERS, IGNORED, LABELS, losses_of_units
from sparsedp.settings import PrivacySettings

pytestmark = pytest.mark.models

VOCABULARY, LENGTH, SIZE, BATCH, PHYSICAL = 60, 6, 40, 8, 4
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, max_position_embeddings=16))


def examples(size: int = SIZE) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(5, VOCABULARY, (size, LENGTH), generator=draw).tolist()
    return [{"input_ids": row, "attention_mask": [1] * LENGTH, "label": i % 2} for i, row in enumerate(ids)]


def arguments(folder: Path, **changed: Any) -> transformers.TrainingArguments:
    given = {
        "per_device_train_batch_size": PHYSICAL, "gradient_accumulation_steps": BATCH // PHYSICAL, "num_train_epochs": 2,
        "logging_steps": 1, "save_steps": 3, "report_to": "none", "learning_rate": 1e-2, "use_cpu": True, "disable_tqdm": True,
        "optim": "sgd", "lr_scheduler_type": "linear",
    }  # fmt: skip
    return transformers.TrainingArguments(str(folder), **{**given, **changed})


def trainer(folder: Path, model: nn.Module | None = None, data: Any = None, **changed: Any) -> PrivateTrainer:
    own = {
        name: changed.pop(name)
        for name in ("privacy", "target_epsilon", "log_training_loss", "seed", "eval_dataset")
        if name in changed
    }
    noise = {} if "target_epsilon" in own else {"noise_multiplier": 1.0}
    return PrivateTrainer(
        classifier() if model is None else model,
        arguments(folder, **changed),
        train_dataset=examples() if data is None else data,
        privacy=own.pop("privacy", PrivacySettings(max_grad_norm=1.0)),
        engine=sparsedp.PrivacyEngine(seed=own.pop("seed", 3)),
        **noise,
        **own,
    )


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def plain_loop(steps: int) -> tuple[dict[str, Tensor], sparsedp.PrivacyEngine]:
    """The loop that a user would write."""
    model, engine = classifier(), sparsedp.PrivacyEngine(seed=3)
    data = examples()
    collate = transformers.default_data_collator
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-2),
        data_loader=torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True, collate_fn=collate),
        noise_multiplier=1.0, max_grad_norm=1.0, max_physical_batch=PHYSICAL,
    )  # fmt: skip
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 0, steps)
    model.train()
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
            if loader.current.last:
                schedule.step()
    return weights_of(model), engine


def test_it_trains_as_the_plain_loop_does(tmp_path: Path) -> None:
    private = trainer(tmp_path)
    private.train()
    weights, engine = plain_loop(2 * SIZE // BATCH)
    for name, value in weights_of(private.model).items():
        assert torch.equal(value, weights[name]), name
    assert private.engine.ledger.steps == engine.ledger.steps
    assert private.engine.get_epsilon(1e-3) == engine.get_epsilon(1e-3)


@pytest.mark.parametrize("of_inner", [False, True])
def test_several_optimizers_and_their_schedules(tmp_path: Path, of_inner: bool) -> None:
    """As a pair for `optimizers=`: a list, and a scheduler of one of them, or none; and resumed."""

    def made(folder: str) -> PrivateTrainer:
        model = classifier()
        tables, others = sparsedp.table_parameters(model), sparsedp.dense_parameters(model)
        optimizers: Any = [torch.optim.Adagrad(tables, lr=0.1), torch.optim.Adam(others, lr=0.01)]
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizers[1], gamma=0.5) if of_inner else None
        return PrivateTrainer(
            model, arguments(tmp_path / folder), train_dataset=examples(), privacy=PrivacySettings(max_grad_norm=1.0),
            engine=sparsedp.PrivacyEngine(seed=3), noise_multiplier=1.0, optimizers=(optimizers, schedule),
        )  # fmt: skip

    whole = made("whole")
    before = weights_of(whole.model)
    whole.train()
    assert whole.engine.ledger.steps == 10
    rates = [group["lr"] for group in whole.optimizer.param_groups]
    assert rates == ([0.1, pytest.approx(0.01 / 2**10)] if of_inner else [0, 0])
    after = weights_of(whole.model)
    assert not torch.equal(before["classifier.weight"], after["classifier.weight"])
    name = "bert.embeddings.word_embeddings.weight"
    assert not torch.equal(before[name], after[name])
    resumed = made("resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-6"))
    for name, value in weights_of(resumed.model).items():
        assert torch.equal(value, after[name]), name


def test_physical_batches_change_nothing(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", per_device_train_batch_size=BATCH, gradient_accumulation_steps=1)
    parts = trainer(tmp_path / "parts", per_device_train_batch_size=2, gradient_accumulation_steps=4)
    for private in (whole, parts):
        private.model.config.hidden_dropout_prob = 0.0
        for module in private.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # masks are drawn for each physical batch
        private.train()
    for name, value in weights_of(whole.model).items():
        torch.testing.assert_close(value, weights_of(parts.model)[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("at", [3, 5], ids=["in the middle of an epoch", "at its end"])
def test_a_resumed_run_ends_as_the_whole_one(tmp_path: Path, at: int) -> None:
    whole = trainer(tmp_path, save_steps=at)
    whole.train()
    kept = tmp_path / "kept" / f"checkpoint-{at}"
    shutil.copytree(tmp_path / f"checkpoint-{at}", kept)
    (tmp_path / "kept" / "checkpoint-9").mkdir()  # cut short
    resumed = trainer(tmp_path / "kept", save_steps=at)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == whole.state.global_step == 10
    for name, value in weights_of(whole.model).items():
        assert torch.equal(value, weights_of(resumed.model)[name]), name
    assert resumed.engine.ledger.steps == whole.engine.ledger.steps
    assert resumed.engine.get_epsilon(1e-3) == whole.engine.get_epsilon(1e-3)
    logged = [
        [(row["step"], row["epoch"], row["loss"]) for row in t.state.log_history if "loss" in row]
        for t in (whole, resumed)
    ]
    assert logged[0] == logged[1]


def test_a_checkpoint_that_was_cut_short_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    with pytest.raises(CheckpointError, match="cut short"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    with pytest.raises(CheckpointError, match="No whole checkpoint"):
        trainer(tmp_path).train(resume_from_checkpoint=True)


def test_a_target_is_met_within_its_steps(tmp_path: Path) -> None:
    private = trainer(tmp_path, target_epsilon=2.0, max_steps=7, save_strategy="no")
    private.train()
    assert private.engine.ledger.steps == 7
    assert 1.9 < private.epsilon() <= 2.0
    with pytest.raises(sparsedp.SparseDPError, match="trained already"):
        private.train()


def test_saved_weights_are_settled(tmp_path: Path) -> None:
    """Rows that LazyDP owes noise have it in what save_model writes."""
    private = trainer(
        tmp_path, privacy=PrivacySettings(max_grad_norm=1.0, mechanism=sparsedp.LazyDP()), save_strategy="no"
    )
    before = weights_of(private.model)
    private.train()
    private.save_model(str(tmp_path / "saved"))
    saved = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "saved").state_dict()
    table = "bert.embeddings.word_embeddings.weight"
    assert (saved[table] != before[table]).any(1).all()  # also rows that no example has
    assert all(torch.equal(saved[name], value) for name, value in weights_of(private.model).items())


def test_batches_without_examples(tmp_path: Path) -> None:
    """Half a unit a batch on average: most batches are empty, and every step counts."""
    few = examples(4)
    private = trainer(
        tmp_path, data=few, per_device_train_batch_size=1, gradient_accumulation_steps=1, num_train_epochs=4
    )
    private.train()
    assert private.engine.ledger.steps == 16 and all(
        torch.isfinite(v).all() for v in weights_of(private.model).values()
    )


def test_columns_are_those_of_the_model(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{**example, "text": "secret", "number": 3.5} for example in examples()]
    private = trainer(tmp_path, data=datasets.Dataset.from_list(rows), save_strategy="no")
    private.train()
    assert private.engine.ledger.steps == 10
    (batch,) = [batch for _, batch in zip(range(1), private.get_train_dataloader())]
    assert set(batch) == {"input_ids", "attention_mask", "labels"}


def test_texts_of_different_lengths(tmp_path: Path) -> None:
    """Padded to the longest of the batch by the collate function, which gives a BatchEncoding."""
    data = [
        {**row, "input_ids": row["input_ids"][: 2 + i % 5], "attention_mask": [1] * len(row["input_ids"][: 2 + i % 5])}
        for i, row in enumerate(examples())
    ]

    class Tokenizer:
        pass

    def collate(rows: list[dict[str, Any]]) -> transformers.BatchEncoding:
        longest = max(len(row["input_ids"]) for row in rows)
        padded = {
            name: torch.tensor([row[name] + [0] * (longest - len(row[name])) for row in rows])
            for name in ("input_ids", "attention_mask")
        }
        return transformers.BatchEncoding({**padded, "labels": torch.tensor([row["label"] for row in rows])})

    private = trainer(tmp_path, data=data, save_strategy="no")
    private.data_collator = collate
    private.train()
    assert private.engine.ledger.steps == 10


# ---------------------------------------------------------------------- losses


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    positions = {"max_position_embeddings": 16}
    makers = {
        "ForSequenceClassification": classifier,
        "ForCausalLM": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=8, n_layer=1, n_head=2, n_positions=16)),
        "ForMaskedLM": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, **positions)),
        "ForTokenClassification": lambda: transformers.BertForTokenClassification(transformers.BertConfig(**SMALL, **positions)),
        "ForQuestionAnswering": lambda: transformers.BertForQuestionAnswering(transformers.BertConfig(**SMALL, **positions)),
        "ForConditionalGeneration": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)),
    }  # fmt: skip
    return makers[kind]()


KINDS = [kind for kind in LABELS if kind not in CLASSIFIERS[1:]]  # without images, films and sounds


def labelled(kind: str, size: int = SIZE) -> list[dict[str, Any]]:
    """Examples with from one to all of their tokens labelled."""
    draw, rows = torch.Generator().manual_seed(2), examples(size)
    for i, row in enumerate(rows):
        del row["label"]
        if kind == "ForQuestionAnswering":
            row["start_positions"], row["end_positions"] = i % LENGTH, 99 if i % 3 == 0 else (i + 1) % LENGTH
            continue
        if kind == "ForSequenceClassification":
            row["labels"] = i % 2
            continue
        count = 2 if kind == "ForTokenClassification" else VOCABULARY
        labels = torch.randint(count, (LENGTH,), generator=draw)
        labels[: LENGTH - 1 - i % (LENGTH - 1)] = IGNORED
        row["labels"] = labels.tolist()
    return rows


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_a_unit_is_the_models_own_of_the_unit_alone(kind: str) -> None:
    model = model_of(kind).eval()
    assert loss_kind(model) == kind
    batch = transformers.default_data_collator(labelled(kind, 5))
    labels = {name: batch[name] for name in LABELS[kind]}
    rest = {name: value for name, value in batch.items() if name not in labels}
    if kind == "ForConditionalGeneration":
        rest["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=labels["labels"])
    losses = losses_of_units(kind, model(**rest), labels)
    for unit in range(5):
        own = model(**{name: value[unit : unit + 1] for name, value in batch.items()}).loss
        if kind == "ForQuestionAnswering" and batch["end_positions"][unit] == 99:
            assert torch.isnan(own)  # a mean over none; here the unit has the loss of its start alone
            continue
        torch.testing.assert_close(losses[unit], own)


@pytest.mark.parametrize("kind", KINDS)
def test_token_models_train(tmp_path: Path, kind: str) -> None:
    private = trainer(tmp_path, model_of(kind), labelled(kind), max_steps=2, save_strategy="no")
    private.train()
    assert private.engine.ledger.steps == 2


def test_a_unit_without_labels_has_no_loss() -> None:
    nothing = torch.full((2, LENGTH), IGNORED)
    losses = losses_of_units("ForMaskedLM", {"logits": torch.randn(2, LENGTH, 4)}, {"labels": nothing})
    assert losses.tolist() == [0.0, 0.0]


# ---------------------------------------------------------------------- what is refused, logged and moved


REFUSED = {
    "bf16": {"bf16": True}, "train_sampling_strategy": {"train_sampling_strategy": "group_by_length"},
    "accelerator_config.dispatch_batches": {"accelerator_config": {"dispatch_batches": True}},
    "torch_compile": {"torch_compile": True}, "neftune_noise_alpha": {"neftune_noise_alpha": 5.0},
    "gradient_checkpointing": {"gradient_checkpointing": True}, "label_smoothing_factor": {"label_smoothing_factor": 0.1},
    "auto_find_batch_size": {"auto_find_batch_size": True}, "dataloader_drop_last": {"dataloader_drop_last": True},
    "include_num_input_tokens_seen": {"include_num_input_tokens_seen": "all"},
    "load_best_model_at_end": {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 3},
    "save_only_model": {"save_only_model": True},
    "max_grad_norm": {"max_grad_norm": 0.5}, "data_seed": {"data_seed": 7},
    "accelerator_config.split_batches": {"accelerator_config": {"split_batches": True}},
    "accelerator_config.gradient_accumulation_kwargs": {"gradient_accumulation_steps": 1, "accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}},
    "optim": {"optim": "lomo"},
    "optim_target_modules": {"optim": "galore_adamw", "optim_target_modules": ["query"]},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_break_the_guarantee_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"TrainingArguments.{name} is not available"):
        trainer(tmp_path, **REFUSED[name])


def test_every_argument_was_decided_about(tmp_path: Path) -> None:
    """A new transformers may add some: decide whether they are refused, and add them to training_arguments.py."""
    fields = {field.name for field in fields_of(transformers.TrainingArguments)}
    assert fields <= DECIDED, fields - DECIDED
    assert len(fields) > 100
    assert {name.partition(".")[0] for name in REASONS} <= fields


def test_an_argument_that_nobody_decided_about_is_refused_where_it_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparsedp.integrations import training_arguments

    monkeypatch.setattr(training_arguments, "DECIDED", DECIDED - {"torch_empty_cache_steps"})
    trainer(tmp_path)
    with pytest.raises(UnsupportedError, match="torch_empty_cache_steps is new"):
        trainer(tmp_path, torch_empty_cache_steps=4)


def test_settings_of_the_environment_are_refused(tmp_path: Path) -> None:
    private = trainer(tmp_path)
    private.accelerator.gradient_accumulation_steps = 2
    with pytest.raises(UnsupportedError, match="gradient_accumulation_steps=2"):
        private.train()


@pytest.mark.parametrize(
    "name", ["deepspeed", "fsdp", "fp16", "tf32", "use_liger_kernel", "parallelism_config", "enable_jit_checkpoint"]
)
def test_what_cannot_be_set_up_here_is_refused_by_name(tmp_path: Path, name: str) -> None:
    args = arguments(tmp_path)
    setattr(args, name, True)
    with pytest.raises(UnsupportedError, match=f"TrainingArguments.{name} is not available"):
        refuse_arguments(args)


def test_settings_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="either target_epsilon or noise_multiplier"):
        PrivateTrainer(
            classifier(), arguments(tmp_path), train_dataset=examples(), privacy=PrivacySettings(max_grad_norm=1.0)
        )
    with pytest.raises(TypeError, match="PrivacySettings"):
        PrivateTrainer(classifier(), arguments(tmp_path), train_dataset=examples(), privacy={}, noise_multiplier=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("log_training_loss", [True, False])
def test_the_exact_loss_is_logged_here_or_not_at_all(tmp_path: Path, log_training_loss: bool) -> None:
    private = trainer(tmp_path, log_training_loss=log_training_loss)
    private.train()
    state = json.loads((tmp_path / "checkpoint-10" / "trainer_state.json").read_text())
    steps = [row for row in state["log_history"] if "learning_rate" in row]
    assert len(steps) == 10 and all(("loss" in row) == log_training_loss for row in steps)
    assert ("train_loss" in private.state.log_history[-1]) == log_training_loss
    assert state["total_flos"] == 0 and not any("grad_norm" in row for row in state["log_history"])
    if log_training_loss:
        epsilons = [row["epsilon"] for row in steps]
        assert epsilons == sorted(epsilons) and epsilons[-1] == round(private.epsilon(), 4)


class Reports(transformers.integrations.WandbCallback):
    """As W&B's, without W&B: keeps what it would send."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.saved = 0

    def setup(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def on_train_begin(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def on_train_end(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def on_log(self, args: Any, state: Any, control: Any, model: Any = None, logs: Any = None, **keywords: Any) -> None:
        self.logged.append({**logs, **{f"history {name}": 1 for row in state.log_history for name in row}})

    def on_save(self, *arguments: Any, **keywords: Any) -> None:
        self.saved += 1


@pytest.mark.parametrize("how", ["callbacks", "a class", "add_callback", "appended", "while training", "report_to"])
def test_the_exact_loss_reaches_no_reporter(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reporter = Reports()

    class AddsIt(transformers.TrainerCallback):
        def on_train_begin(self, *arguments: Any, **keywords: Any) -> None:
            private.add_callback(reporter)

    if how == "report_to":
        known = transformers.integrations.integration_utils.INTEGRATION_TO_CALLBACK
        monkeypatch.setitem(known, "wandb", lambda: reporter)
        monkeypatch.setattr(transformers.trainer, "get_reporting_integration_callbacks", lambda names: [reporter])
    more = {"callbacks": [reporter]} if how == "callbacks" else {"callbacks": [Reports]} if how == "a class" else {}
    private = made(PrivateTrainer, tmp_path, save_strategy="steps", **more)
    if how == "add_callback":
        private.add_callback(reporter)
    elif how == "appended":
        private.callback_handler.callbacks.append(reporter)
    elif how == "while training":
        private.add_callback(AddsIt())
    elif how == "a class":
        (reporter,) = [one for one in private.callback_handler.callbacks if isinstance(one, Reports)]
    private.train()
    assert len(reporter.logged) >= 10 and any("epsilon" in row for row in reporter.logged)
    assert not any(name.endswith("loss") for row in reporter.logged for name in row)
    assert (tmp_path / "checkpoint-10" / "sparsedp.pt").is_file() and reporter.saved == 0  # it would upload them


def test_the_exact_loss_is_not_kept_where_it_is_pushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private = made(PrivateTrainer, tmp_path)
    private.args.push_to_hub = True
    monkeypatch.setattr(private, "init_hf_repo", lambda *arguments, **keywords: None)
    monkeypatch.setattr(private, "_push_from_checkpoint", lambda *arguments, **keywords: None)
    monkeypatch.setattr(private, "_finish_current_push", lambda *arguments, **keywords: None)
    private.train()
    assert private.state.log_history and not any("loss" in name for row in private.state.log_history for name in row)


def test_callbacks_of_ones_own_see_the_loss(tmp_path: Path) -> None:
    seen = []

    class Looks(transformers.TrainerCallback):
        def on_log(self, *arguments: Any, logs: Any, **keywords: Any) -> None:
            seen.append(logs)

    made(PrivateTrainer, tmp_path, callbacks=[Looks()]).train()
    assert sum("loss" in logs for logs in seen) == 10


def test_columns_of_dictionaries_are_those_of_the_model(tmp_path: Path) -> None:
    rows = [{**example, "text": "secret", "number": 3.5} for example in examples()]
    private = trainer(tmp_path, data=rows, save_strategy="no")
    private.train()
    assert private.engine.ledger.steps == 10
    (batch,) = [batch for _, batch in zip(range(1), private.get_train_dataloader())]
    assert set(batch) == {"input_ids", "attention_mask", "labels"}


def test_adapters_and_saved_modules_move_and_nothing_else(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        task_type="SEQ_CLS", r=2, target_modules=["query", "value"], modules_to_save=["word_embeddings", "classifier"]
    )
    model = peft.get_peft_model(classifier(), config)
    before = {name: (p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()}
    private = trainer(tmp_path, model, save_strategy="no")
    private.train()
    for name, parameter in model.named_parameters():
        value, trained = before[name]
        assert torch.equal(value, parameter.detach()) != trained, name
    assert any("word_embeddings.modules_to_save" in name for name, (_, trained) in before.items() if trained)


@pytest.mark.parametrize("bias", ["modules_to_save", "requires_grad"])
def test_adapters_with_word_embeddings_train_are_saved_and_loaded(tmp_path: Path, bias: str) -> None:
    """The paper's set-up: LoRA in attention, and the word embeddings trained beside it."""
    peft = pytest.importorskip("peft")
    saved = ["word_embeddings", "classifier"] if bias == "modules_to_save" else ["classifier"]

    def adapted() -> nn.Module:
        torch.manual_seed(1)
        config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"], modules_to_save=saved)
        model = peft.get_peft_model(classifier(), config)
        if bias == "requires_grad":
            model.get_input_embeddings().weight.requires_grad_(True)
        return model

    model = adapted()
    privacy = PrivacySettings(max_grad_norm=1.0, mechanism=sparsedp.AdaFEST(threshold=1.0))
    private = trainer(tmp_path, model, privacy=privacy)
    before = {name: (p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()}
    private.train()
    moved = {name for name, p in model.named_parameters() if not torch.equal(before[name][0], p.detach())}
    assert moved == {name for name, (_, trained) in before.items() if trained}
    assert any("word_embeddings" in name for name in moved)
    resumed = trainer(tmp_path, adapted(), privacy=privacy)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert all(torch.equal(value, weights_of(resumed.model)[name]) for name, value in weights_of(model).items())
    if bias == "requires_grad":  # PEFT saves what it knows of: adapters, modules_to_save, and embeddings if told so
        model.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
        safetensors = pytest.importorskip("safetensors.torch")
        written = safetensors.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        (name,) = [name for name in written if "word_embeddings" in name]
        assert torch.equal(written[name], model.get_input_embeddings().weight.detach())
    else:
        private.save_model(str(tmp_path / "adapter"))
        loaded = peft.PeftModel.from_pretrained(classifier(), tmp_path / "adapter")
        private.engine.close()
        batch = torch.tensor([row["input_ids"] for row in examples(4)])
        with torch.no_grad():
            one, other = model.eval()(batch).logits, loaded.eval()(batch).logits
        torch.testing.assert_close(one, other)
        merged = loaded.merge_and_unload()
        with torch.no_grad():
            torch.testing.assert_close(merged.eval()(batch).logits, one)


@pytest.mark.parametrize("on_embedding", [False, True])
def test_a_merged_adapter_that_would_train_nothing_is_refused(tmp_path: Path, on_embedding: bool) -> None:
    """Merged into the weights that it stands beside, an adapter takes no part in forward, and noise alone would move it."""
    peft = pytest.importorskip("peft")
    targets = ["query", "value", *["word_embeddings"] * on_embedding]
    model = peft.get_peft_model(classifier(), peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=targets))
    model.merge_adapter()
    private = trainer(tmp_path, model, num_train_epochs=6, save_strategy="no")
    with pytest.raises(SparseDPError, match=rf"any of the {4 + 2 * on_embedding} trained lora parameters.*lora_"):
        private.train()
    assert private.engine.ledger.steps == concerns.SURE
    private.engine.close()
    model.unmerge_adapter()
    trainer(tmp_path, model, num_train_epochs=1, save_strategy="no").train()


def test_an_adapter_of_which_a_part_is_merged_is_named(tmp_path: Path) -> None:
    """The rest of it trains: a warning, as with any layer that is not used."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    model = peft.get_peft_model(classifier(), config)
    next(module for name, module in model.named_modules() if name.endswith("query")).merge()
    private = trainer(tmp_path, model, num_train_epochs=6, save_strategy="no")
    with pytest.warns(sparsedp.UtilityWarning, match=r"no gradient came to parameter .*query.lora_A") as caught:
        private.train()
    assert not any("value.lora_A" in str(warning.message) for warning in caught)


def test_adapters_that_are_merged_away_while_training_are_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    model = peft.get_peft_model(classifier(), config)

    class Merges(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            if state.global_step == 2:
                model.merge_and_unload()

    private = trainer(tmp_path, model, save_strategy="no")
    private.add_callback(Merges())
    with pytest.raises(UnsupportedError, match=r"lora_A.* which is not in the module any more"):
        private.train()
    assert private.engine.ledger.steps == 2


def test_an_adapter_on_the_embedding_and_a_tied_head(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = model_of("ForCausalLM")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["wte", "c_attn"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    private = trainer(tmp_path, adapted, labelled("ForCausalLM"), save_strategy="no")
    before = {name: (p.detach().clone(), p.requires_grad) for name, p in adapted.named_parameters()}
    private.train()
    for name, parameter in adapted.named_parameters():
        assert torch.equal(before[name][0], parameter.detach()) != before[name][1], name
    assert any("lora_embedding_A" in name for name, (_, trained) in before.items() if trained)


# ---------------------------------------------------------------------- attacks on the loop


def test_a_search_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="hyperparameter_search trains many times"):
        trainer(tmp_path).hyperparameter_search(n_trials=2)


class DividesByTheBatch(PrivateTrainer):
    """Scales the loss by the labelled tokens of all units."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        losses = nn.functional.cross_entropy(logits, inputs["labels"], reduction="none")
        return (losses * inputs["labels"]).sum() / inputs["labels"].sum()


class Weighs(PrivateTrainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        assert num_items_in_batch is None
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        losses = nn.functional.cross_entropy(logits, inputs["labels"], reduction="none")
        return (losses * (1 + inputs["labels"])).mean()


def made(
    kind: type[PrivateTrainer], folder: Path, model: nn.Module | None = None, save_strategy: str = "no", **keywords: Any
) -> PrivateTrainer:
    return kind(
        classifier() if model is None else model, arguments(folder, save_strategy=save_strategy, save_steps=5), train_dataset=examples(),
        privacy=PrivacySettings(max_grad_norm=1.0), engine=sparsedp.PrivacyEngine(seed=3), noise_multiplier=1.0, **keywords,
    )  # fmt: skip


def test_a_loss_of_a_subclass_that_mixes_units_is_refused_before_training(tmp_path: Path) -> None:
    private = made(DividesByTheBatch, tmp_path)
    before = weights_of(private.model)
    with pytest.raises(sparsedp.SparseDPError):
        private.train()
    assert private.engine.ledger.steps == 0
    assert all(torch.equal(value, before[name]) for name, value in weights_of(private.model).items())


def test_a_loss_of_a_subclass_that_keeps_them_apart_trains_and_is_on_record(tmp_path: Path) -> None:
    private = made(Weighs, tmp_path)
    private.train()
    assert private.engine.ledger.steps == 10
    assert "no check is on record" not in str(private.statement())


def test_a_loss_function_of_the_user_is_checked(tmp_path: Path) -> None:
    def mixes(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
        return nn.functional.cross_entropy(outputs.logits - outputs.logits.mean(0), labels)

    with pytest.raises(sparsedp.SparseDPError):
        made(PrivateTrainer, tmp_path, compute_loss_func=mixes).train()

    def apart(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
        return nn.functional.cross_entropy(outputs.logits, labels)

    private = made(PrivateTrainer, tmp_path, compute_loss_func=apart)
    private.train()
    assert private.engine.ledger.steps == 10


def test_a_callback_that_takes_steps_of_its_own_is_refused(tmp_path: Path) -> None:
    class Steps(transformers.TrainerCallback):
        def on_step_end(self, *arguments: Any, optimizer: Any, **keywords: Any) -> None:
            optimizer.step()

    class Learns(transformers.TrainerCallback):
        """On data of its own, by the optimizer's own rule."""

        def on_step_begin(self, *arguments: Any, model: Any, optimizer: Any, **keywords: Any) -> None:
            model(torch.tensor([[5, 6]]), labels=torch.tensor([1])).loss.backward()
            optimizer.inner.step()

    class LearnsBefore(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *arguments: Any, model: Any, **keywords: Any) -> None:
            model(torch.tensor([[5, 6]]), labels=torch.tensor([1])).loss.backward()

    for callback, message in ((Steps, "already had its step"), (LearnsBefore, "units")):
        with pytest.raises(sparsedp.SparseDPError, match=message):
            made(PrivateTrainer, tmp_path, callbacks=[callback()]).train()
    # The inner optimizer has no gradient to take: what was computed beside the step moves nothing.
    private = made(PrivateTrainer, tmp_path, callbacks=[Learns()])
    before = weights_of(private.model)
    with pytest.raises(sparsedp.SparseDPError):
        private.train()
    assert all(torch.equal(value, before[name]) for name, value in weights_of(private.model).items())


def test_a_callback_may_change_the_rate(tmp_path: Path) -> None:
    class Stops(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *arguments: Any, optimizer: Any, **keywords: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 0.0

    private = made(PrivateTrainer, tmp_path, callbacks=[Stops()])
    schedule = torch.optim.lr_scheduler.LambdaLR
    private.create_scheduler = lambda *a, **k: setattr(  # type: ignore[method-assign]
        private, "lr_scheduler", schedule(private.optimizer.inner, lambda step: float(step == 0))
    )
    private.train()
    one = made(PrivateTrainer, tmp_path)
    one.args.max_steps = 1
    one.train()
    assert private.engine.ledger.steps == 10 and one.engine.ledger.steps == 1
    # The schedule of `one` starts at the same rate.
    for name, value in weights_of(one.model).items():
        torch.testing.assert_close(value, weights_of(private.model)[name])


def test_evaluation_during_training_sees_settled_weights(tmp_path: Path) -> None:
    pending = []

    class Looks(transformers.TrainerCallback):
        def on_evaluate(self, *arguments: Any, metrics: Any, **keywords: Any) -> None:
            held_out = torch.tensor([row["input_ids"] for row in examples(8)]), torch.tensor([0, 1] * 4)
            copied = classifier()
            copied.load_state_dict(weights_of(private.model))
            copied.eval()
            with torch.no_grad():
                wanted = copied(held_out[0], labels=held_out[1]).loss.item()
            assert metrics["eval_loss"] == pytest.approx(wanted, abs=1e-6)
            pending.append(metrics["eval_loss"])

    private = trainer(
        tmp_path, privacy=PrivacySettings(max_grad_norm=1.0, mechanism=sparsedp.LazyDP()), save_strategy="no",
        eval_strategy="steps", eval_steps=3, eval_dataset=examples(8),
    )  # fmt: skip
    private.add_callback(Looks())
    private.train()
    assert len(pending) >= 3 and len(set(pending)) == len(pending)
    predicted = private.predict(examples(8))
    assert predicted.metrics["test_loss"] == pytest.approx(pending[-1], abs=1e-7)


class SubtractsTheMean(transformers.BertForSequenceClassification):
    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
        out = super().forward(input_ids, attention_mask)
        out.logits = out.logits - out.logits.mean(0)
        out["loss"] = nn.functional.cross_entropy(out.logits, labels)
        return out


def test_a_refusal_names_the_line_of_the_users_file(tmp_path: Path) -> None:
    config = transformers.BertConfig(**SMALL, max_position_embeddings=16)
    with pytest.raises(sparsedp.SparseDPError) as caught:
        made(PrivateTrainer, tmp_path, SubtractsTheMean(config)).train()
    text = Path(__file__).read_text().splitlines()
    line = next(n for n, row in enumerate(text, 1) if "out.logits - out.logits.mean(0)" in row)
    assert f"{Path(__file__).name}:{line}" in str(caught.value).replace(", line ", ":").replace('"', "")


def test_a_model_without_anything_to_train_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="nothing to train"):
        made(PrivateTrainer, tmp_path, classifier().requires_grad_(False)).train()


PROGRAM = """
import os, signal, sys
sys.path[:0] = [{tests!r}, {here!r}]
from pathlib import Path
import test_transformers as t

class Killed(t.transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, **keywords):
        if state.global_step == 7:
            os.kill(os.getpid(), signal.SIGKILL)

private = t.trainer(Path(sys.argv[1]))
private.add_callback(Killed())
private.train()
"""


def test_a_run_that_was_killed_is_resumed(tmp_path: Path) -> None:
    here = Path(__file__).parent
    program = PROGRAM.format(tests=str(here.parent), here=str(here))
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    resumed = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    weights, engine = plain_loop(2 * SIZE // BATCH)
    for name, value in weights_of(resumed.model).items():
        assert torch.equal(value, weights[name]), name
    assert resumed.engine.ledger.steps == engine.ledger.steps
    assert resumed.engine.get_epsilon(1e-3) == engine.get_epsilon(1e-3)


def test_the_documented_loss_of_texts_trains(tmp_path: Path) -> None:
    """docs/pitfalls.md, as it stands there."""
    page = (DOCS / "pitfalls.md").read_text()
    block = next(text for text in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "PrivateTrainer(" in text)
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCABULARY, **sizes))
    texts = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in examples()]
    texts[0] = {**texts[0], "labels": [-100] * LENGTH}  # nothing of it counts, and nothing is divided by zero
    names: dict[str, Any] = {"model": model, "arguments": arguments(tmp_path), "train": texts}
    before = weights_of(model)
    exec(compile(block, "docs/pitfalls.md", "exec"), names)
    assert names["trainer"].engine.ledger.steps == 2 * SIZE // BATCH
    after = weights_of(model)
    assert all(torch.isfinite(value).all() for value in after.values())
    assert not torch.equal(before["transformer.wte.weight"], after["transformer.wte.weight"])
