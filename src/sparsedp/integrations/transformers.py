"""`PrivateTrainer`: transformers' Trainer, whose loader, optimizer and step are private ones. See docs/transformers.md."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from sparsedp.check import CheckReport, check
from sparsedp.engine import PrivacyEngine
from sparsedp.errors import CheckpointError, SparseDPError, UnsupportedError
from sparsedp.integrations.table_softmax import LARGE, inner_model, is_over_table, softmax_over_table, table_of
from sparsedp.integrations.training_arguments import refuse_arguments
from sparsedp.integrations.unit_losses import CLASSIFIERS, LABELS, losses_of_units, reduced
from sparsedp.plan import default_delta
from sparsedp.sampling import PrivateLoader
from sparsedp.settings import PrivacySettings
from sparsedp.statement import PrivacyStatement

try:
    import datasets
except ImportError:
    datasets = None
try:
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers import __version__ as transformers_version
    from transformers.integrations import TensorBoardCallback
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
    from transformers.utils import logging
except ImportError as error:
    raise ImportError(
        f"sparsedp.integrations.transformers needs transformers and accelerate ({error}). Install: "
        'pip install -c constraints.txt -e ".[transformers]"'
    ) from error

_ENGINE_FILE = "sparsedp.pt"  # in a checkpoint's folder: weights, optimizer, scheduler, ledger, position. Private.
_STATE_FILE = "trainer_state.json"  # which transformers writes last
# Packages whose callbacks send what is logged elsewhere: all that transformers knows, but TensorBoard, and some that it does not.
_REPORTERS = {"aim", "azureml", "comet_ml", "dagshub", "flytekitplugins", *INTEGRATION_TO_CALLBACK} - {"tensorboard"}
# What this class replaces in Trainer, and which has no other way in than by these names.
_HOOKS = (
    "get_train_dataloader", "get_batch_samples", "training_step", "compute_loss", "floating_point_ops", "log", "create_scheduler",
    "_prepare_for_training", "_run_epoch", "_clip_grad_norm", "_get_grad_norm", "_load_from_checkpoint", "_prepare_inputs",
    "_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler", "_remove_unused_columns",
    "_get_collator_with_removed_columns",
)  # fmt: skip
_LOSSES = ("loss", "train_loss")
_TRIED = 8  # examples, until one has labels

logger = logging.get_logger(__name__)


class PrivateTrainer(Trainer):
    """A Trainer for private training. What is not named here is as in `transformers.Trainer`.

    `privacy` are the settings of `PrivacyEngine.make_private`. The noise is given by `noise_multiplier`, or found for
    `target_epsilon`, with `target_delta` (None: 0.1 / units, rounded down) and the steps that the arguments plan.

    `per_device_train_batch_size` times `gradient_accumulation_steps` is the expected number of units of a batch, and the first
    of the two the most examples that reach the model together. The arguments' `max_grad_norm` is not used: `privacy` has it.

    The losses of causal, masked and token models, of question answering and of classifiers are one per unit, a mean over the
    unit's own tokens, and then the mean or the sum over units that `privacy` names, instead of a mean over all valid tokens of a
    batch, which would let units mix. With any other loss, training starts with `check()`.

    With `softmax_over_table`, the loss of a causal model is a softmax over the head's table in blocks, and no logits are kept
    (see the function of that name). None: where the vocabulary is large and the model is such that it can be done.

    The loss of the training data is not private. It is logged on this machine, unless `log_training_loss` is False, and never
    sent to a reporter such as W&B. What is logged beside it is the epsilon so far.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *positional: Any,
        privacy: PrivacySettings,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
        noise_multiplier: float | None = None,
        engine: PrivacyEngine | None = None,
        log_training_loss: bool = True,
        softmax_over_table: bool | None = None,
        **keywords: Any,
    ) -> None:
        if (target_epsilon is None) == (noise_multiplier is None):
            raise ValueError("Give either target_epsilon or noise_multiplier.")
        if not isinstance(privacy, PrivacySettings):
            raise TypeError(f"privacy must be a sparsedp.PrivacySettings, not {type(privacy).__name__}")
        missing = [name for name in _HOOKS if not callable(getattr(Trainer, name, None))]
        if missing:
            raise UnsupportedError(
                f"transformers {transformers_version} has no Trainer.{missing[0]}, which PrivateTrainer replaces: the "
                "training would not be private. Install a version that it is tested with, as constraints.txt names it."
            )
        given = TrainingArguments("trainer_output") if args is None else args
        refuse_arguments(given)
        # The loop sees logical batches, which are made of physical ones in `training_step`.
        self._physical = given.per_device_train_batch_size
        args = copy.copy(given)
        args.per_device_train_batch_size = self._physical * given.gradient_accumulation_steps
        args.gradient_accumulation_steps = 1
        args.max_grad_norm = 0.0
        args.ignore_data_skip = True  # the private loader goes on by itself where a checkpoint left off
        self._log_training_loss = log_training_loss
        self._told_of: str | None = None  # who would send the loss
        super().__init__(model, args, *positional, **keywords)
        self.privacy, self.engine = privacy, PrivacyEngine() if engine is None else engine
        self.target_epsilon, self.target_delta, self.noise_multiplier = target_epsilon, target_delta, noise_multiplier
        if log_training_loss and self._may_log_loss():
            logger.warning(
                "The logged loss of the training data is exact, and so not private: it must not leave this machine (nor "
                f"{_STATE_FILE}, which holds it). log_training_loss=False leaves it out."
            )
        take_softmax_over_table(self.model, softmax_over_table, privacy, self.compute_loss_func is not None)
        self._loader: PrivateLoader | None = None
        self._loss = torch.zeros(())  # of the last batch that had units
        self.add_callback(_Epochs(self))

    # ------------------------------------------------------------------ what becomes private

    def get_train_dataloader(self) -> DataLoader:
        """The private loader. Its first call makes model, optimizer and loader private."""
        if self._loader is None:
            self._make_private()
        assert self._loader is not None
        return self._loader

    def _make_private(self) -> None:
        accelerator = self.accelerator
        if accelerator.mixed_precision not in ("no", None) or accelerator.gradient_accumulation_steps != 1:
            raise UnsupportedError(
                f"accelerate is set to mixed_precision={accelerator.mixed_precision!r} and "
                f"gradient_accumulation_steps={accelerator.gradient_accumulation_steps} (ACCELERATE_... in the environment?). "
                "Private training takes float32, and divides batches by TrainingArguments.gradient_accumulation_steps."
            )
        if self._has_loss_of_units():
            self._refuse_another_loss()
        else:
            self.check()
        loader, optimizer = self._ordinary_loader(), self.create_optimizer()
        settings = {field.name: getattr(self.privacy, field.name) for field in fields(self.privacy)}
        settings["max_physical_batch"] = (
            self._physical if self._physical < self.args.per_device_train_batch_size else None
        )
        things: dict[str, Any] = {"module": self.model, "optimizer": optimizer, "data_loader": loader, **settings}
        if self.target_epsilon is None:
            assert self.noise_multiplier is not None
            made = self.engine.make_private(noise_multiplier=self.noise_multiplier, **things)
        else:
            units = self._units(loader.dataset)
            epochs = self.args.num_train_epochs
            steps = self.args.max_steps
            if steps <= 0:
                steps = math.ceil(epochs * math.ceil(units / self.args.per_device_train_batch_size))
            made = self.engine.make_private_with_epsilon(
                target_epsilon=self.target_epsilon,
                target_delta=default_delta(units) if self.target_delta is None else self.target_delta,
                steps=steps,
                **things,
            )
        _, self.optimizer, self._loader = made
        self._loader.warns_of_cuts = False  # the loop counts logical batches, and may end at max_steps
        self.callback_handler.train_dataloader = self._loader

    def check(self, units: int = 4) -> CheckReport:
        """`sparsedp.check` of the model and of `compute_loss` on some of the training data; the statement then has it.

        A run whose loss is not one of this class's starts with it: a loss that divides by what all units of a batch have
        together is computed outside of the model, where capture does not look. It works on copies of the model in float64.
        """
        if self._loader is not None:
            raise SparseDPError("check() is for a trainer that has not trained yet: afterwards, the model is private.")
        batch = self._some_of_the_data(range(2 * units))
        was_training = self.model.training
        self.model.train()
        try:
            whole = _Whole(self.model, lambda model, inputs: self.compute_loss(model, dict(inputs)))
            report = check(whole, lambda loss, _: loss, batch, units=units, loss_reduction=self.privacy.loss_reduction)
        finally:
            self.model.train(was_training)
        self.engine.add_check(report)
        return report

    def _has_loss_of_units(self) -> bool:
        """Whether the loss of the training data is made of the losses of units, here or by `softmax_over_table`."""
        own = getattr(self.compute_loss, "__func__", None) is not PrivateTrainer.compute_loss
        return not own and self._makes_loss_of_units(self._some_of_the_data(range(1)))

    def _makes_loss_of_units(self, inputs: Mapping[str, Any]) -> bool:
        inner = inner_model(self.model)
        return (
            self.compute_loss_func is None and self.label_smoother is None
            and {*LABELS.get(loss_kind(self.model), (None,))} <= inputs.keys()
            and getattr(getattr(inner, "config", None), "return_dict", True)
        )  # fmt: skip

    def _some_of_the_data(self, places: range) -> dict[str, Any]:
        """The batch of the training examples in these places, as far as there are so many."""
        loader = self._ordinary_loader()
        with torch.random.fork_rng(devices=[]):
            rows = [loader.dataset[i] for i in places if i < len(loader.dataset)]  # type: ignore[arg-type]
            return dict(self._prepare_inputs(loader.collate_fn(rows)))

    def _refuse_another_loss(self) -> None:
        """Raises if the model's own loss is another one, which would be left out: compares them for an example alone."""
        kind, inner = loss_kind(self.model), inner_model(self.model)
        refuse_terms_and_prompts(self.model, kind)
        was_training = self.model.training
        self.model.eval()
        try:
            for place in range(min(_TRIED, len(self.train_dataset))):
                inputs = self._some_of_the_data(range(place, place + 1))
                with torch.no_grad():
                    outputs = self.model(**inputs)
                    (loss,) = losses_of_units(
                        kind, outputs, {name: inputs[name] for name in LABELS[kind]}, _problem_of(inner)
                    )
                if torch.isfinite(outputs["loss"]):  # it is not for an example without labels
                    break
            else:
                return
        finally:
            self.model.train(was_training)
        if not torch.allclose(outputs["loss"].to(loss.dtype), loss, rtol=1e-5, atol=1e-6):
            raise UnsupportedError(
                f"The loss that {type(inner).__name__} returns for labels is not the one that its name says ({kind}), even for "
                "an example alone: it has labels that are not shifted, a term or a weight of its own. To train with it, subclass "
                "PrivateTrainer with a compute_loss of your own, or give compute_loss_func: either is checked, and has to keep "
                "units apart."
            )

    def _units(self, dataset: Any) -> int:
        users = self.privacy.users_of(dataset)
        return len(dataset) if users is None else users.count

    def _ordinary_loader(self) -> DataLoader:
        """What the Trainer would read with, without a sampler, and without accelerate, which would divide it into shards."""
        if self.train_dataset is None:
            raise ValueError("PrivateTrainer: training requires a train_dataset.")
        dataset, collate = self.train_dataset, self.data_collator
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise UnsupportedError(
                "train_dataset has no length: units are sampled by their place, so give a map-style data set."
            )
        if not len(dataset):
            raise ValueError("PrivateTrainer: train_dataset has no examples.")
        # Columns are those that the model's own forward() takes: the model is not wrapped.
        if datasets is not None and isinstance(dataset, datasets.Dataset):
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        return DataLoader(
            dataset,
            batch_size=self.args.per_device_train_batch_size,
            shuffle=True,
            collate_fn=collate,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
            persistent_workers=self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            multiprocessing_context=self.args.dataloader_multiprocessing_context,
            in_order=self.args.dataloader_in_order,
        )

    # ------------------------------------------------------------------ the loop

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **keywords: Any) -> Any:
        """As Trainer's. `True` resumes from the last whole checkpoint: one that was cut short is passed over."""
        if self._loader is not None:
            raise SparseDPError(
                "This trainer has trained already. Make a new one, and resume_from_checkpoint, to go on."
            )
        if isinstance(resume_from_checkpoint, bool) and resume_from_checkpoint:
            resume_from_checkpoint = last_whole_checkpoint(self.args.output_dir)
        elif resume_from_checkpoint and not is_whole(str(resume_from_checkpoint)):
            raise CheckpointError(
                f"{resume_from_checkpoint} is not a whole checkpoint of PrivateTrainer, which has {_ENGINE_FILE} and "
                f"{_STATE_FILE}. Was it cut short? resume_from_checkpoint=True takes the last whole one."
            )
        return super().train(resume_from_checkpoint, *args, **keywords)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Nothing: the engine's checkpoint has the weights, with the ledger that belongs to them."""

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, DataLoader]:
        """Without accelerate, which would wrap the private optimizer and loader."""
        self.create_scheduler(num_training_steps=max_steps)
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        self.model_wrapped = self.model
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        return self.model, train_dataloader

    def _run_epoch(self, *args: Any, **keywords: Any) -> None:
        assert self._loader is not None
        if self._loader.next_epoch < keywords["epoch"]:  # resumed at the end of an epoch: what is left of it is nothing
            for _ in self._loader:
                raise SparseDPError("The checkpoint's position and its number of steps do not fit each other.")
        super()._run_epoch(*args, **keywords)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], None]:
        """One logical batch, whose physical batches are read one by one; none at the end of an epoch that was resumed.

        The second would be the number of labelled tokens of the batch, a divisor that everybody decides.
        """
        try:
            first = next(epoch_iterator)
        except StopIteration:
            return [], None
        assert self._loader is not None
        return [_Parts(self._loader, first, epoch_iterator)], None

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of each physical batch, and the private step of all but the last, which the loop takes.

        Returns the mean loss of the batch, or of the one before if the batch is empty.
        """
        assert self._loader is not None
        total, examples = torch.zeros((), device=self.args.device), 0
        for part in inputs:
            batch = self._loader.current
            assert batch is not None
            loss = super().training_step(model, part, None)
            total, examples = total + loss * batch.examples, examples + batch.examples
            if not batch.last:
                self.optimizer.step()
        if examples:
            self._loss = total / examples if self.privacy.loss_reduction == "mean" else total
        return self._loss

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """In training, a mean over units, each the mean over its own tokens; otherwise Trainer's."""
        kind = loss_kind(self.model)
        if not model.training or is_over_table(self.model) or not self._makes_loss_of_units(inputs):
            return super().compute_loss(model, inputs, return_outputs, None)
        labels = {name: inputs[name] for name in LABELS[kind] if name in inputs}
        rest = {name: value for name, value in inputs.items() if name not in labels}
        if kind == "ForConditionalGeneration" and "decoder_input_ids" not in rest:
            rest["decoder_input_ids"] = self.model.prepare_decoder_input_ids_from_labels(labels=labels["labels"])
        outputs = model(**rest)
        losses = losses_of_units(kind, outputs, labels, _problem_of(inner_model(self.model)))
        loss = reduced(losses, self.privacy.loss_reduction)
        return (loss, outputs) if return_outputs else loss

    def _clip_grad_norm(self, model: nn.Module) -> None:
        return None  # clipped by unit

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        return None  # the norm of a gradient without noise is not private

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # a count of the data's tokens would leave with the trainer's state

    def hyperparameter_search(self, *args: Any, **keywords: Any) -> Any:
        raise UnsupportedError(
            "hyperparameter_search trains many times on private data, and what choosing among the runs costs would not be in any "
            "ledger. `sparsedp sweep --private` pays for a search (docs/tuning.md)."
        )

    # ------------------------------------------------------------------ what is written

    def add_callback(self, callback: Any) -> None:
        super().add_callback(callback)
        self._may_log_loss()

    def _may_log_loss(self) -> bool:
        """Whether what is logged stays here. Whoever sends it elsewhere is not told of checkpoints, which hold private state."""
        reporters = [callback for callback in self.callback_handler.callbacks if is_reporter(callback)]
        for callback in reporters:
            callback.on_save = _nothing
        # The Hub gets a model card with the losses, and the files of TensorBoard.
        remote = [type(callback).__name__ for callback in reporters] + ["the Hub"] * bool(self.args.push_to_hub)
        if remote and self._log_training_loss and self._told_of != remote[0]:
            self._told_of = remote[0]
            logger.warning(
                f"The loss of the training data is not private: it is not logged, as {remote[0]} would send it."
            )
        return self._log_training_loss and not remote

    def log(self, logs: dict[str, float], *args: Any, **keywords: Any) -> None:
        trained = any(name in logs for name in _LOSSES)
        if not self._may_log_loss():
            logs = {name: value for name, value in logs.items() if name not in _LOSSES}
        if trained and self.engine.ledger.steps:
            logs = {**logs, "epsilon": round(self.epsilon(), 4)}
        super().log(logs, *args, **keywords)

    def epsilon(self) -> float:
        """What was spent so far, at the run's delta."""
        assert self._loader is not None
        delta = default_delta(self._loader.dataset_size) if self.target_delta is None else self.target_delta
        return self.engine.get_epsilon(delta)

    def statement(self) -> PrivacyStatement:
        return self.engine.statement()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._may_log_loss()  # callbacks may have been put on their list since
        self.engine.save_checkpoint(
            os.path.join(output_dir, _ENGINE_FILE), extra={"scheduler": self.lr_scheduler.state_dict()}
        )

    def _load_optimizer_and_scheduler(self, checkpoint: str) -> None:
        extra = self.engine.load_checkpoint(os.path.join(checkpoint, _ENGINE_FILE))
        self.lr_scheduler.load_state_dict(extra["scheduler"])


class _Whole(nn.Module):
    """A model together with what makes its loss."""

    def __init__(self, model: nn.Module, compute_loss: Callable[[nn.Module, Mapping[str, Any]], Tensor]) -> None:
        super().__init__()
        self.model, self.compute_loss = model, compute_loss

    def forward(self, **inputs: Any) -> Tensor:
        return self.compute_loss(self.model, inputs)


class _Parts:
    """The physical batches of a logical one. They are read one by one: the loader's position is that of the last."""

    def __init__(self, loader: PrivateLoader, first: Any, others: Iterator[Any]) -> None:
        self._loader, self._first, self._others = loader, first, others

    def __iter__(self) -> Iterator[Any]:
        yield self._first
        while self._loader.current is not None and not self._loader.current.last:
            yield next(self._others)

    def keys(self) -> Iterable[str]:  # the loop looks for the names of inputs
        return self._first.keys() if isinstance(self._first, Mapping) else ()


class _Epochs(TrainerCallback):
    """Keeps the number of epochs right in an epoch that was resumed, of which the loop sees the rest alone."""

    def __init__(self, trainer: PrivateTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **keywords: Any) -> None:
        loader = self._trainer._loader
        if loader is not None:
            state.epoch = state.global_step / loader.steps_per_epoch


def is_reporter(callback: Any) -> bool:
    """Whether a callback sends what is logged to some service."""
    if isinstance(callback, TensorBoardCallback):
        return False
    modules = [kind.__module__ for kind in type(callback).__mro__]
    return any(name.startswith("transformers.integrations") or name.partition(".")[0] in _REPORTERS for name in modules)


def _nothing(*arguments: Any, **keywords: Any) -> None:
    """In place of a reporter's `on_save`, which may upload the checkpoint."""


def loss_kind(model: Any) -> str:
    """transformers' name for the loss of a model, which may be under PEFT's."""
    inner = inner_model(model)
    kind = getattr(inner, "loss_type", None)
    encodes = bool(getattr(getattr(inner, "config", None), "is_encoder_decoder", False))
    if kind is None and type(inner).__name__.endswith("LMHeadModel"):
        return "ForCausalLM"
    if kind == "ForConditionalGeneration" and not encodes:
        return "ForCausalLM"
    return kind or ""


def _problem_of(model: Any) -> str | None:
    """config.problem_type of transformers' model."""
    return getattr(getattr(model, "config", None), "problem_type", None)


def refuse_terms_and_prompts(model: Any, kind: str) -> None:
    """Raises for what adds a term to the loss, or tokens to the text, that losses of units do not know."""
    config = getattr(inner_model(model), "config", None)
    for part in (config, getattr(config, "text_config", None)):
        if getattr(part, "output_router_logits", False):
            raise UnsupportedError(
                "config.output_router_logits=True adds a loss of the routers, over all tokens of the batch, so that units mix: "
                "set it to False, and experts are balanced as they were in pretraining."
            )
    prompts = [one.peft_type.value for one in getattr(model, "peft_config", {}).values() if one.is_prompt_learning]
    longer = sorted({*prompts} - {"PREFIX_TUNING"})  # whose prefixes are keys and values alone
    if longer and kind not in CLASSIFIERS:
        raise UnsupportedError(
            f"PEFT's {longer[0]} puts tokens before each text, which have no labels, and "
            "PrivateTrainer takes one loss for each token of the text: use adapters beside the weights (LoraConfig)."
        )


def take_softmax_over_table(model: Any, wanted: bool | None, privacy: PrivacySettings, has_own_loss: bool) -> None:
    """Lets a causal model's loss be a softmax over its table, if that is wanted, or if it is large and can be done."""
    if is_over_table(model):
        if wanted is False:
            raise ValueError("softmax_over_table=False, but softmax_over_table(model) was called on the model.")
        softmax_over_table(model, privacy.loss_reduction)  # it may have been called for the other one
        return
    causal = loss_kind(model) == "ForCausalLM"
    if wanted and (not causal or has_own_loss):
        reason = "has a compute_loss_func" if causal else f"trains {type(inner_model(model)).__name__}"
        raise UnsupportedError(
            f"softmax_over_table=True is for the labels of causal language models; this trainer {reason}."
        )
    if wanted is False or not causal or has_own_loss:
        return
    try:
        if wanted or table_of(inner_model(model)).shape[0] >= LARGE:
            softmax_over_table(model, privacy.loss_reduction)
    except UnsupportedError:
        if wanted:
            raise


def is_whole(folder: str) -> bool:
    """Whether a checkpoint was written to its end."""
    return all(os.path.isfile(os.path.join(folder, name)) for name in (_ENGINE_FILE, _STATE_FILE))


def last_whole_checkpoint(output_dir: str) -> str:
    """The newest checkpoint in a folder that was written to its end."""
    folders = [entry.path for entry in os.scandir(output_dir) if entry.is_dir()] if os.path.isdir(output_dir) else []
    steps = {path: path.rpartition("-")[2] for path in folders if os.path.basename(path).startswith("checkpoint-")}
    whole = [path for path, step in steps.items() if step.isdigit() and is_whole(path)]
    if not whole:
        raise CheckpointError(f"No whole checkpoint was found in {output_dir}.")
    return max(whole, key=lambda path: int(steps[path]))
