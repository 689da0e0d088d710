"""`PrivacyCallback`: Lightning's Trainer trains an ordinary LightningModule privately. See docs/lightning.md."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from sparsedp.callbacks import SpentEpsilon
from sparsedp.engine import PrivacyEngine
from sparsedp.errors import CheckpointError, SparseDPError, SparseDPWarning, UnsupportedError
from sparsedp.plan import default_delta
from sparsedp.sampling import PrivateLoader
from sparsedp.settings import PrivacySettings
from sparsedp.statement import PrivacyStatement

_PACKAGES = ("pytorch_lightning", "lightning.pytorch")  # one library under two names, with classes of their own


def _callback_classes() -> tuple[type, ...]:
    """`Callback` of each of the two that is installed."""
    classes = []
    for package in _PACKAGES:
        try:
            classes.append(importlib.import_module(package).Callback)
        except ImportError as error:
            missing = error
    if not classes:
        raise ImportError(
            f"sparsedp.integrations.lightning needs lightning or pytorch-lightning ({missing}). Install: "
            'pip install -c constraints.txt -e ".[lightning]"'
        )
    return tuple(classes)


_KEY = "sparsedp"  # in a checkpoint of Lightning's: what the engine's own checkpoints hold
_LOCAL_LOGGERS = {"CSVLogger", "TensorBoardLogger"}

_WRITES = "it writes to the weights that are trained"
_TRIES = "it trains on private data to choose a setting, and nothing pays for that"
_REFUSED_CALLBACKS = {
    "StochasticWeightAveraging": _WRITES,
    "WeightAveraging": _WRITES,
    "ModelPruning": _WRITES,
    "BaseFinetuning": "parameters cannot join the optimizer; give it all of them, frozen ones included",
    "GradientAccumulationScheduler": "physical batches are made by max_physical_batch",
    "BatchSizeFinder": "the expected batch size is public; max_physical_batch saves memory instead",
    "LearningRateFinder": _TRIES,
}


class PrivacyCallback(*_callback_classes()):  # type: ignore[misc]
    """Makes the module, its optimizer and the train loader of a `Trainer.fit` private; the LightningModule stays as it is.

    `settings` are those of `PrivacyEngine.make_private`. The noise is given by `noise_multiplier`, or found for
    `target_epsilon`, with `target_delta` (None: 0.1 / units, rounded down) and the steps that the Trainer's `max_epochs` and
    `max_steps` plan.

    The train loader's `batch_size` is the expected number of units of a batch. With `max_physical_batch`, larger batches reach
    `training_step` in parts; to the Trainer, its hooks and its counts they are one.

    Its checkpoints hold the engine's: `fit(ckpt_path=...)` goes on with ledger, position and noise.
    """

    def __init__(
        self,
        *,
        settings: PrivacySettings,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
        noise_multiplier: float | None = None,
        max_physical_batch: int | None = None,
        replace_recurrent: bool = False,
        engine: PrivacyEngine | None = None,
    ) -> None:
        super().__init__()
        if (target_epsilon is None) == (noise_multiplier is None):
            raise ValueError("Give either target_epsilon or noise_multiplier.")
        if not isinstance(settings, PrivacySettings):
            raise TypeError(f"settings must be a sparsedp.PrivacySettings, not {type(settings).__name__}")
        self.settings, self.engine = settings, PrivacyEngine() if engine is None else engine
        self.target_epsilon, self.target_delta, self.noise_multiplier = target_epsilon, target_delta, noise_multiplier
        self.max_physical_batch, self.replace_recurrent = max_physical_batch, replace_recurrent
        self._loader: PrivateLoader | None = None
        self._parts: _Parts | None = None
        self._saved: dict[str, Any] | None = None  # of the checkpoint that fit() goes on from
        self._spent = SpentEpsilon(self.epsilon)

    # ------------------------------------------------------------------ what becomes private

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Before anything of the run is there: what is refused."""
        if stage != "fit":
            return
        if self._loader is not None:
            raise SparseDPError("This PrivacyCallback has trained already. Make a new one, with a Trainer of its own.")
        refuse_trainer(trainer, pl_module)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """When the module is on its device and has its optimizer, and before the rest of a checkpoint is restored."""
        source = trainer.fit_loop._data_source
        loader = source.dataloader()
        if not isinstance(loader, DataLoader):
            raise UnsupportedError(
                f"The train loader is {type(loader).__name__}. Several loaders, or one that is no DataLoader, have no units that "
                "could be sampled: give one torch.utils.data.DataLoader over a map-style data set."
            )
        if len(trainer.optimizers) != 1:
            raise UnsupportedError(
                f"configure_optimizers gives {len(trainer.optimizers)} optimizers; private training takes one, which may have "
                "several groups of parameters."
            )
        optimizer, private = self._make_private(trainer, pl_module, trainer.optimizers[0], loader)
        self._loader, self._parts = private, _Parts(private)
        if self._saved is not None:
            self.engine.load_checkpoint_dict(self._saved)
            self._saved = None
        trainer.strategy.optimizers = [optimizer]
        source.instance = self._parts
        self._take_steps_of_parts(trainer, pl_module, self._parts)
        remote = [type(log).__name__ for log in trainer.loggers if type(log).__name__ not in _LOCAL_LOGGERS]
        if remote:
            warnings.warn(
                f"What training_step logs is computed on private data, without noise, and {remote[0]} may send it elsewhere: "
                "log nothing there but what callbacks say (epsilon), or metrics of public data.",
                SparseDPWarning,
                stacklevel=2,
            )

    def _make_private(self, trainer: Any, module: nn.Module, optimizer: Any, loader: DataLoader) -> Any:
        things: dict[str, Any] = {
            "module": module, "optimizer": optimizer, "data_loader": loader,
            **{field.name: getattr(self.settings, field.name) for field in fields(self.settings)},
            "max_physical_batch": self.max_physical_batch, "replace_recurrent": self.replace_recurrent,
        }  # fmt: skip
        if self.target_epsilon is None:
            assert self.noise_multiplier is not None
            made = self.engine.make_private(noise_multiplier=self.noise_multiplier, **things)
        else:
            users = self.settings.users_of(loader.dataset)
            units = len(loader.dataset) if users is None else users.count  # type: ignore[arg-type]
            length: dict[str, Any] = _length(trainer, loader, units, self.settings.stream is not None)
            made = self.engine.make_private_with_epsilon(
                target_epsilon=self.target_epsilon,
                target_delta=default_delta(units) if self.target_delta is None else self.target_delta,
                **length,
                **things,
            )
        made[2].warns_of_cuts = False  # the Trainer counts logical batches, and may end at max_steps
        return made[1:]

    def _take_steps_of_parts(self, trainer: Any, module: Any, parts: _Parts) -> None:
        """Lets one step of the Trainer's be those of all physical batches, of which it has seen the first."""
        strategy = trainer.strategy
        training_step, optimizer_step = strategy.training_step, strategy.optimizer_step

        def step_of_part(*arguments: Any, **keywords: Any) -> Any:
            if parts.at_hand is not None:
                arguments = (parts.at_hand, *arguments[1:])
            return training_step(*arguments, **keywords)

        def steps(*arguments: Any, **keywords: Any) -> Any:
            result = optimizer_step(*arguments, **keywords)
            try:
                for batch in parts.others():
                    parts.at_hand = _moved(trainer, module, batch)
                    result = optimizer_step(*arguments, **keywords)
            finally:
                parts.at_hand = None
            return result

        strategy.training_step, strategy.optimizer_step = step_of_part, steps

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            for name in ("training_step", "optimizer_step"):
                vars(trainer.strategy).pop(name, None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    # ------------------------------------------------------------------ what is told and written

    def epsilon(self) -> float:
        """What was spent so far, at the run's delta."""
        return self.engine.get_epsilon(self.target_delta)

    def statement(self) -> PrivacyStatement:
        return self.engine.statement()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any) -> None:
        if not trainer.barebones and trainer.global_step % trainer.log_every_n_steps == 0:
            self.log("epsilon", self._spent(), on_step=True, on_epoch=False, batch_size=1)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.barebones:
            self.log("epsilon", self._spent(now=True), on_step=False, on_epoch=True, batch_size=1)

    def state_dict(self) -> dict[str, Any]:
        """Something, so that the Trainer says so where a checkpoint is loaded without this callback."""
        return {} if self._loader is None else {"private": True}

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self._loader is not None:
            # The tensors are those of the checkpoint's state_dict: torch.save writes them once.
            checkpoint[_KEY] = self.engine.checkpoint_dict()
            checkpoint["optimizer_states"] = []  # the engine's has it

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != "fit":
            return
        if _KEY not in checkpoint:
            raise CheckpointError(
                "The checkpoint of fit(ckpt_path=...) was written without PrivacyCallback, so that it has no ledger: nobody "
                "knows what its steps cost. To start from its weights, load them into the module before fit()."
            )
        self._saved = checkpoint[_KEY]


class _Parts:
    """The train loader that the Trainer sees: of each logical batch the first part, and their number as its length."""

    def __init__(self, loader: PrivateLoader) -> None:
        self._loader = loader
        self._pass: Iterator[Any] = iter(())
        self.at_hand: Any = None  # the part that training_step is given in place of the first

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if not self._loader.left_of_epoch:  # resumed at the end of an epoch
            for _ in self._loader:
                raise SparseDPError("The checkpoint's position and its number of steps do not fit each other.")
        self._pass = iter(self._loader)
        yield from self._pass

    def others(self) -> Iterator[Any]:
        """The rest of the batch at hand. They are read one by one: the loader's position is that of the last."""
        while self._loader.current is not None and not self._loader.current.last:
            yield next(self._pass)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the engine's checkpoint has the position."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing, likewise."""


def _moved(trainer: Any, module: Any, batch: Any) -> Any:
    """A batch as the Trainer would hand it to training_step."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def _length(trainer: Any, loader: DataLoader, units: int, is_stream: bool) -> dict[str, int]:
    """How long the Trainer plans to train: `epochs` or `steps` of make_private_with_epsilon."""
    epochs, steps = trainer.fit_loop.max_epochs, trainer.max_steps
    has_epochs, has_steps = epochs is not None and epochs >= 0, steps >= 0
    if not (has_epochs or has_steps):
        raise UnsupportedError(
            "A target_epsilon is planned for a number of steps: give the Trainer max_epochs or max_steps, or give "
            "PrivacyCallback a noise_multiplier."
        )
    if not has_steps:
        return {"epochs": epochs}
    if has_epochs and not is_stream and loader.batch_size:
        of_epoch = units // loader.batch_size if loader.drop_last else -(-units // loader.batch_size)
        steps = min(steps, epochs * of_epoch)
    return {"steps": steps}


def _is_of_lightning(module: Any, name: str) -> bool:
    """Whether a method of a LightningModule is Lightning's own."""
    method: Callable[..., Any] = getattr(type(module), name)
    return method.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")


def refuse_trainer(trainer: Any, module: Any) -> None:
    """Raises for what would break the guarantee, or what would be ignored."""
    strategy = type(trainer.strategy).__name__
    reasons = {
        "precision": (
            str(trainer.precision) not in ("32-true", "64-true"),
            "types below float32 round a unit's gradient by the others'; leave it at '32-true'",
        ),
        "accumulate_grad_batches": (
            trainer.accumulate_grad_batches != 1,
            "the loader's batch_size is the expected number of units of a step; PrivacyCallback(max_physical_batch=...) lets "
            "the model see so many at a time",
        ),
        "gradient_clip_val": (
            trainer.gradient_clip_val or trainer.gradient_clip_algorithm,
            "each unit is clipped by itself, to PrivacySettings(max_grad_norm=...)",
        ),
        "overfit_batches": (trainer.overfit_batches, "batches are Poisson samples"),
        "limit_train_batches": (
            trainer.limit_train_batches != 1.0 and not trainer.fast_dev_run,
            "an epoch is planned as a whole; max_steps ends a run early",
        ),
        "reload_dataloaders_every_n_epochs": (
            trainer.reload_dataloaders_every_n_epochs,
            "the data and their order are part of what is accounted for",
        ),
    }  # fmt: skip
    for name, (is_wanted, reason) in reasons.items():
        if is_wanted:
            raise UnsupportedError(f"Trainer({name}=...) is not available in private training: {reason}.")
    if trainer.world_size > 1 or strategy != "SingleDeviceStrategy":
        raise UnsupportedError(
            f"PrivacyCallback trains in one process on one device, not with {strategy} on {trainer.world_size}: give the Trainer "
            "devices=1. For tables that outgrow a machine, see docs/distributed.md."
        )
    for callback in trainer.callbacks:
        for kind in type(callback).__mro__:
            if kind.__name__ in _REFUSED_CALLBACKS and kind.__module__.partition(".")[0] in (
                "lightning",
                "pytorch_lightning",
            ):
                why = _REFUSED_CALLBACKS[kind.__name__]
                raise UnsupportedError(f"Callback {kind.__name__} is not available in private training: {why}.")
    if not module.automatic_optimization:
        raise UnsupportedError(
            f"{type(module).__name__} has automatic_optimization=False, and takes its steps itself: call make_private on its "
            "module, optimizer and loader in a loop of your own, or let Lightning take the steps."
        )
    if not _is_of_lightning(module, "configure_gradient_clipping"):
        raise UnsupportedError(
            f"{type(module).__name__}.configure_gradient_clipping would find no gradient: each unit is clipped by itself, to "
            "PrivacySettings(max_grad_norm=...). Remove it."
        )
