"""PrivacyCallback: the plain loop's run with an ordinary LightningModule, killed and resumed, and what is refused."""

from __future__ import annotations

import importlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import sparsedp
from sparsedp.errors import CheckpointError, SparseDPError, UnsupportedError
from sparsedp.settings import PrivacySettings
from support import Clicks, clicks, loader_of

lightning = pytest.importorskip("pytorch_lightning")

PrivacyCallback = pytest.importorskip("sparsedp.integrations.lightning").PrivacyCallback

pytestmark = pytest.mark.models

SIZE, BATCH = 40, 8  # five steps an epoch
SETTINGS = PrivacySettings(max_grad_norm=1.0)


class Ordinary(lightning.LightningModule):
    """Nothing in it knows of privacy."""

    momentum = 0.9

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Clicks()
        self.dropout = nn.Dropout(0.1)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.dropout(self.model(*inputs)[:, None])[:, 0]

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        *inputs, target = batch
        loss = binary_cross_entropy_with_logits(self(*inputs), target)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(target))
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        *inputs, target = batch
        self.log("val_loss", binary_cross_entropy_with_logits(self(*inputs), target), batch_size=len(target))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=self.momentum)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def trainer_of(folder: Path, *callbacks: Any, **changed: Any) -> Any:
    given = {
        "max_epochs": 2, "accelerator": "cpu", "logger": False, "enable_checkpointing": bool(callbacks[1:]),
        "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder, "log_every_n_steps": 1,
    }  # fmt: skip
    return lightning.Trainer(callbacks=list(callbacks), **{**given, **changed})


def callback_of(**changed: Any) -> Any:
    noise = {} if "target_epsilon" in changed else {"noise_multiplier": 1.0}
    return PrivacyCallback(**{"settings": SETTINGS, "engine": sparsedp.PrivacyEngine(seed=3), **noise, **changed})


def data() -> Any:
    return loader_of(*clicks(SIZE), batch_size=BATCH)


def fit(
    folder: Path, *others: Any, ckpt_path: Any = None, callback: Any = None, **changed: Any
) -> tuple[Any, Any, Any]:
    callback, module = callback_of() if callback is None else callback, Ordinary()
    trainer = trainer_of(folder, callback, *others, **changed)
    trainer.fit(module, data(), loader_of(*clicks(16, seed=5), batch_size=8), ckpt_path=ckpt_path)
    return callback, module, trainer


def plain(epochs: int = 2, **settings: Any) -> tuple[Ordinary, sparsedp.PrivacyEngine]:
    """The loop that a user would write."""
    module, engine = Ordinary(), sparsedp.PrivacyEngine(seed=3)
    inner = torch.optim.SGD(module.parameters(), lr=0.1, momentum=module.momentum)
    _, optimizer, loader = engine.make_private(
        module=module, optimizer=inner, data_loader=data(), noise_multiplier=1.0, max_grad_norm=1.0, **settings
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1 / (1 + step))
    for _ in range(epochs):
        for *inputs, target in loader:
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(module(*inputs), target).backward()
            optimizer.step()
            if loader.current.last:
                schedule.step()
    return module, engine


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


@pytest.mark.parametrize("max_physical_batch", [None, 3])
@pytest.mark.parametrize("mechanism", [sparsedp.DPSGD(), sparsedp.LazyDP(), sparsedp.AdaFEST(threshold=1.0)], ids=str)
def test_it_trains_as_the_plain_loop_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mechanism: sparsedp.Mechanism, max_physical_batch: int | None
) -> None:
    settings = PrivacySettings(max_grad_norm=1.0, mechanism=mechanism)
    if mechanism.selects:
        monkeypatch.setattr(Ordinary, "momentum", 0.0)
    # An evaluation reads all rows, which lets LazyDP settle them, in other numbers of the same law.
    evaluates = {"limit_val_batches": 0, "num_sanity_val_steps": 0} if mechanism.noise_waits else {}
    callback, module, trainer = fit(
        tmp_path, callback=callback_of(settings=settings, max_physical_batch=max_physical_batch), **evaluates
    )
    wanted, engine = plain(mechanism=mechanism, max_physical_batch=max_physical_batch)
    assert_same(wanted, module)
    assert callback.engine.ledger.steps == engine.ledger.steps == trainer.global_step == 10
    assert callback.engine.get_epsilon(1e-3) == engine.get_epsilon(1e-3)
    assert trainer.callback_metrics["epsilon"] == pytest.approx(callback.epsilon())


class SaveAt(lightning.Callback):
    """Writes after some steps, in the middle of an epoch and at its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"step{trainer.global_step}.ckpt")


@pytest.mark.parametrize("max_physical_batch", [None, 3])
@pytest.mark.parametrize("lazy", [False, True], ids=["dpsgd", "lazydp"])
def test_resumed_runs_end_as_the_whole_one(tmp_path: Path, lazy: bool, max_physical_batch: int | None) -> None:
    mechanism: sparsedp.Mechanism = sparsedp.LazyDP() if lazy else sparsedp.DPSGD()

    def callback() -> Any:
        settings = PrivacySettings(max_grad_norm=1.0, mechanism=mechanism)
        return callback_of(settings=settings, max_physical_batch=max_physical_batch)

    at_end = lightning.callbacks.ModelCheckpoint(
        tmp_path, filename="end{epoch}", auto_insert_metric_name=False, save_top_k=-1
    )
    whole, module, _ = fit(tmp_path, at_end, SaveAt(tmp_path), callback=callback())
    for name in ("step1", "step4", "step5", "step6", "end0", "step9", "step10"):
        resumed, other, trainer = fit(
            tmp_path / name, SaveAt(tmp_path / name), callback=callback(), ckpt_path=tmp_path / f"{name}.ckpt"
        )
        assert resumed.engine.ledger.steps == trainer.global_step == 10, name
        assert_same(module, other)
        assert resumed.engine.get_epsilon(1e-3) == whole.engine.get_epsilon(1e-3)


def test_max_steps_and_max_epochs_decide_the_plan(tmp_path: Path) -> None:
    for limits, steps in (
        ({"max_epochs": 2}, 10),
        ({"max_steps": 7, "max_epochs": -1}, 7),
        ({"max_steps": 30, "max_epochs": 1}, 5),
    ):
        callback, _, _ = fit(tmp_path, callback=callback_of(target_epsilon=2.0, target_delta=1e-3), **limits)
        assert callback.engine.ledger.steps == callback.engine.plan.steps == steps
        assert 1.9 < callback.epsilon() <= 2.0
    with pytest.raises(UnsupportedError, match="max_epochs or max_steps"):
        fit(tmp_path, callback=callback_of(target_epsilon=2.0), max_epochs=-1)


def test_a_checkpoint_has_settled_weights_once_and_the_ledger(tmp_path: Path) -> None:
    settings = PrivacySettings(max_grad_norm=1.0, mechanism=sparsedp.LazyDP())
    callback, module, trainer = fit(tmp_path, callback=callback_of(settings=settings))
    before = Ordinary().state_dict()["model.table.weight"]
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    table = saved["state_dict"]["model.table.weight"]
    assert (table != before).any(1).all()  # also rows that no example has
    assert table.data_ptr() == saved["sparsedp"]["model"]["model.table.weight"].data_ptr()
    assert Ordinary.load_from_checkpoint(tmp_path / "last.ckpt").model.table.weight.equal(table)
    assert callback.engine.pending() == {"model.table.weight": 0} or not any(callback.engine.pending().values())


def test_a_checkpoint_without_a_ledger_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.fit(Ordinary(), data())
    trainer.save_checkpoint(tmp_path / "public.ckpt")
    with pytest.raises(CheckpointError, match="no ledger"):
        fit(tmp_path, ckpt_path=tmp_path / "public.ckpt")


def test_a_checkpoint_of_another_plan_is_refused(tmp_path: Path) -> None:
    _, _, trainer = fit(tmp_path)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(CheckpointError, match=r"another plan: .*noise"):
        fit(tmp_path, callback=callback_of(noise_multiplier=0.5), ckpt_path=tmp_path / "last.ckpt", max_epochs=3)


PROGRAM = """
import sys, os, signal
sys.path[:0] = [{tests!r}, {here!r}]
from pathlib import Path
import test_lightning_callback as t

class Killed(t.lightning.Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 7:
            os.kill(os.getpid(), signal.SIGKILL)

folder = Path(sys.argv[1])
saves = t.lightning.callbacks.ModelCheckpoint(folder, filename="kept", every_n_train_steps=3, save_top_k=1, enable_version_counter=False)
t.fit(folder, saves, Killed())
"""


def test_a_run_that_was_killed_is_resumed(tmp_path: Path) -> None:
    here = Path(__file__).parent
    program = PROGRAM.format(tests=str(here.parent), here=str(here))
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    resumed, module, trainer = fit(tmp_path, ckpt_path=tmp_path / "kept.ckpt")
    wanted, engine = plain()
    assert trainer.global_step == 10
    assert_same(wanted, module)
    assert resumed.engine.ledger.steps == engine.ledger.steps
    assert resumed.engine.get_epsilon(1e-3) == engine.get_epsilon(1e-3)


OTHER_NAME = """
import importlib, sys
sys.path[:0] = [{tests!r}, {here!r}]
if {alone}:
    sys.modules["pytorch_lightning"] = sys.modules["lightning_fabric"] = None  # as if they were not installed
import lightning.pytorch, sparsedp.integrations.lightning as callback
import pytest
pytest.importorskip = lambda name: importlib.import_module(name.replace("pytorch_lightning", "lightning.pytorch"))
import test_lightning_callback as t
assert t.Ordinary.__mro__[1].__module__.startswith("lightning.pytorch.") and t.lightning is lightning.pytorch
assert len(callback._callback_classes()) == (1 if {alone} else 2)

from pathlib import Path
folder = Path(sys.argv[1])
if {alone}:
    t.test_resumed_runs_end_as_the_whole_one(folder, lazy=True, max_physical_batch=3)
t.test_callbacks_that_write_or_try_are_refused_by_name(folder, "StochasticWeightAveraging")
t.test_settings_of_the_trainer_that_do_not_fit_are_refused_by_name(folder, "precision")
t.test_modules_that_do_not_fit_are_refused(folder, t.Clips)
t.test_an_adapter_that_trains_nothing_is_refused(folder)
"""


@pytest.mark.parametrize("alone", [True, False])
def test_the_other_package_of_lightning_does_as_well(tmp_path: Path, alone: bool) -> None:
    """`lightning` is made of the same sources, in which the packages' names are other ones: so it is here, too."""
    for name, renamed in (("pytorch_lightning", "pytorch"), ("lightning_fabric", "fabric")):
        source, copy = Path(importlib.import_module(name).__file__ or "").parent, tmp_path / "lightning" / renamed
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        for file in copy.rglob("*.py"):
            text = file.read_text().replace("pytorch_lightning", "lightning.pytorch")
            file.write_text(text.replace("lightning_fabric", "lightning.fabric"))
    (tmp_path / "lightning" / "__init__.py").touch()
    here = Path(__file__).parent
    program = OTHER_NAME.format(tests=str(here.parent), here=str(here), alone=alone)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "run")],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr.decode()


# ---------------------------------------------------------------------- what is refused

REFUSED: dict[str, dict[str, Any]] = {
    "precision": {"precision": "bf16-mixed"},
    "accumulate_grad_batches": {"accumulate_grad_batches": 2},
    "gradient_clip_val": {"gradient_clip_val": 1.0},
    "overfit_batches": {"overfit_batches": 2},
    "limit_train_batches": {"limit_train_batches": 3},
    "reload_dataloaders_every_n_epochs": {"reload_dataloaders_every_n_epochs": 1},
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_of_the_trainer_that_do_not_fit_are_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"Trainer\({name}=...\) is not available"):
        fit(tmp_path, **REFUSED[name])


def test_several_devices_are_refused(tmp_path: Path) -> None:
    class Trainer:
        precision, accumulate_grad_batches, gradient_clip_val, gradient_clip_algorithm = "32-true", 1, None, None
        overfit_batches, limit_train_batches, fast_dev_run, reload_dataloaders_every_n_epochs = 0.0, 1.0, False, 0
        world_size, strategy, callbacks = 2, type("DDPStrategy", (), {})(), ()

    refuse_trainer = pytest.importorskip("sparsedp.integrations.lightning").refuse_trainer

    with pytest.raises(UnsupportedError, match="not with DDPStrategy on 2"):
        refuse_trainer(Trainer(), Ordinary())


CALLBACKS: dict[str, dict[str, Any]] = {
    "StochasticWeightAveraging": {"swa_lrs": 0.1},
    "EMAWeightAveraging": {},
    "LearningRateFinder": {},
    "BatchSizeFinder": {},
    "BackboneFinetuning": {},
    "GradientAccumulationScheduler": {"scheduling": {1: 2}},
    "ModelPruning": {"pruning_fn": "l1_unstructured"},
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_that_write_or_try_are_refused_by_name(tmp_path: Path, name: str) -> None:
    callback = getattr(lightning.callbacks, name)(**CALLBACKS[name])
    module = Ordinary()
    module.train_dataloader, module.batch_size = data, BATCH  # type: ignore[method-assign]
    match = rf"Callback ({name}|WeightAveraging|BaseFinetuning) is not available in private training"
    with pytest.raises(UnsupportedError, match=match):
        trainer_of(tmp_path, callback_of(), callback).fit(module)


def test_the_tuner_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, callback_of())
    with pytest.raises(UnsupportedError, match="LearningRateFinder"):
        lightning.tuner.Tuner(trainer).lr_find(Ordinary(), data())


class Manual(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Clips(Ordinary):
    def configure_gradient_clipping(self, *arguments: Any, **keywords: Any) -> None:
        raise AssertionError("not to be called")


class Two(Ordinary):
    def configure_optimizers(self) -> Any:
        return super().configure_optimizers()["optimizer"], torch.optim.SGD(self.parameters(), lr=0.1)


class Skips(Ordinary):
    def training_step(self, batch: list[Tensor], index: int) -> Any:
        return None


class StepsTwice(Ordinary):
    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any) -> None:
        optimizer.step(closure)
        optimizer.step(closure)


class Normed(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)


class MeansOfTheBatch(Ordinary):
    def forward(self, *inputs: Tensor) -> Tensor:
        out = self.model(*inputs)
        return out - out.mean()


class UsesAWeightInTheLoss(Ordinary):
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return super().training_step(batch, index) * self.model.out.weight.sum()


MODULES: dict[type, str] = {
    Manual: "automatic_optimization=False",
    Clips: "configure_gradient_clipping",
    Two: "multiple optimizers|gives 2 optimizers",
    Skips: r"without a backward\(\)",
    StepsTwice: "already had its step",
    Normed: "'norm' .BatchNorm1d.*batch statistics",
    MeansOfTheBatch: r"mean",
    UsesAWeightInTheLoss: "'model.out.weight'",
}


@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
def test_modules_that_do_not_fit_are_refused(tmp_path: Path, kind: type) -> None:
    module = kind()
    with pytest.raises((SparseDPError, RuntimeError), match=MODULES[kind]):
        trainer_of(tmp_path, callback_of()).fit(module, data())


def test_a_refusal_names_the_line_of_the_users_file(tmp_path: Path) -> None:
    with pytest.raises(SparseDPError) as caught:
        trainer_of(tmp_path, callback_of()).fit(MeansOfTheBatch(), data())
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "out - out.mean()" in text)
    assert f"{Path(__file__).name}:{line}" in str(caught.value).replace('", line ', ":").replace(", line ", ":")


def test_loaders_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="train loader is list"):
        trainer_of(tmp_path, callback_of()).fit(Ordinary(), [data(), data()])


def test_a_callback_trains_once_and_two_do_not_train(tmp_path: Path) -> None:
    callback, _, trainer = fit(tmp_path)
    with pytest.raises(SparseDPError, match="trained already"):
        trainer.fit(Ordinary(), data())
    with pytest.raises(
        RuntimeError, match="more than one stateful callback of type `PrivacyCallback`"
    ):  # Lightning's own
        fit(tmp_path, callback_of())
    with pytest.raises(ValueError, match="either target_epsilon or noise_multiplier"):
        PrivacyCallback(settings=SETTINGS)
    with pytest.raises(TypeError, match="PrivacySettings"):
        PrivacyCallback(settings={}, noise_multiplier=1.0)  # type: ignore[arg-type]
    assert callback.statement().steps == 10


def test_loaders_of_the_module_and_of_a_datamodule_and_double_precision(tmp_path: Path) -> None:
    class Data(lightning.LightningDataModule):
        def train_dataloader(self) -> Any:
            return data()

    callback = callback_of()
    trainer_of(tmp_path, callback).fit(Ordinary(), datamodule=Data())
    assert callback.engine.ledger.steps == 10
    callback, module = callback_of(), Ordinary()
    trainer_of(tmp_path, callback, precision="64-true").fit(module, data())
    assert callback.engine.ledger.steps == 10 and module.model.table.weight.dtype == torch.float64
    callback = callback_of()
    trainer_of(tmp_path, callback, fast_dev_run=2).fit(Ordinary(), data())
    assert callback.engine.ledger.steps == 2


def test_batches_without_examples(tmp_path: Path) -> None:
    callback = callback_of()
    trainer_of(tmp_path, callback, max_epochs=4).fit(Ordinary(), loader_of(*clicks(4), batch_size=1))
    assert callback.engine.ledger.steps == 16


def test_a_logger_that_sends_is_warned_of(tmp_path: Path) -> None:
    class Remote(lightning.loggers.CSVLogger):
        pass

    with pytest.warns(sparsedp.SparseDPWarning, match="Remote may send it"):
        fit(tmp_path, logger=Remote(tmp_path))


def test_epsilon_is_logged(tmp_path: Path) -> None:
    callback, _, _ = fit(tmp_path, logger=lightning.loggers.CSVLogger(tmp_path, name="", version=""))
    text = (tmp_path / "metrics.csv").read_text().splitlines()
    column = text[0].split(",").index("epsilon_epoch" if "epsilon_epoch" in text[0] else "epsilon")
    values = [float(row.split(",")[column]) for row in text[1:] if row.split(",")[column]]
    assert values == sorted(values) and values[-1] == pytest.approx(callback.epsilon())


def test_metrics_of_the_module(tmp_path: Path) -> None:
    """torchmetrics' metrics are modules that keep counts of private data."""
    torchmetrics = pytest.importorskip("torchmetrics")

    class Measured(Ordinary):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = torchmetrics.classification.BinaryAccuracy()

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            *inputs, target = batch
            logits = self(*inputs)
            self.accuracy(logits.detach(), target.int())
            self.log("accuracy", self.accuracy, on_step=True, on_epoch=True, batch_size=len(target))
            return binary_cross_entropy_with_logits(logits, target)

    callback, module = callback_of(), Measured()
    trainer = trainer_of(tmp_path, callback)
    trainer.fit(module, data())
    assert callback.engine.ledger.steps == 10
    assert not any("accuracy" in name for name in module.state_dict())  # its counts do not leave with the weights
    trainer.save_checkpoint(tmp_path / "last.ckpt")


# ---------------------------------------------------------------------- language models: what one text moves


class Language(lightning.LightningModule):
    """GPT-2 or BERT with losses of units, as docs/lightning.md has it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        sizes = {"vocab_size": 30, "pad_token_id": 0}
        if kind == "ForCausalLM":
            config = transformers.GPT2Config(
                n_embd=8, n_layer=1, n_head=2, n_positions=8, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1,
                eos_token_id=1, **sizes,
            )  # fmt: skip
            self.model = transformers.GPT2LMHeadModel(config)
        else:
            config = transformers.BertConfig(
                hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, max_position_embeddings=8,
                hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes,
            )  # fmt: skip
            self.model = transformers.BertForSequenceClassification(config)
        self.kind, self.moves, self.sizes = kind, [flat(self)], []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        from sparsedp.integrations.unit_losses import losses_of_units

        ids, labels = batch
        self.sizes.append(len(ids))
        outputs = self.model(input_ids=ids, attention_mask=(ids != 0).long())
        return losses_of_units(self.kind, outputs, {"labels": labels}).sum()

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.moves.append(flat(self))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in module.parameters()])


def language_run(
    kind: str, ids: Tensor, labels: Tensor, folder: Path, clip: float, batch: int = 4, physical: Any = 2, **limits: Any
) -> Language:
    settings = PrivacySettings(max_grad_norm=clip, loss_reduction="sum")
    callback = PrivacyCallback(
        settings=settings, engine=sparsedp.PrivacyEngine(seed=5), noise_multiplier=0.0, max_physical_batch=physical
    )
    module = Language(kind)
    trainer_of(folder, callback, precision="64-true", **limits).fit(module, loader_of(ids, labels, batch_size=batch))
    assert callback.engine.ledger.steps == len(module.moves) - 1
    return module


@pytest.mark.parametrize("kind", ["ForCausalLM", "ForSequenceClassification"])
def test_a_text_moves_a_step_by_the_bound_at_most(tmp_path: Path, kind: str) -> None:
    """Texts of a repeated token, of one token and of nothing but padding, in physical batches of two."""
    ids = torch.randint(3, 30, (8, 6), generator=torch.Generator().manual_seed(2))
    ids[0], ids[1, 1:], ids[2] = 7, 0, 0
    labels = ids.masked_fill(ids == 0, -100) if kind == "ForCausalLM" else torch.arange(8) % 2
    clip = 0.05
    whole = language_run(kind, ids, labels, tmp_path, clip, max_steps=1, max_epochs=1)
    assert len(whole.sizes) > 1 and max(whole.sizes) == 2
    largest = 0.0
    for unit in range(8):
        without = labels.clone()
        without[unit] = -100
        other = language_run(kind, ids, without, tmp_path, clip, max_steps=1, max_epochs=1)
        largest = max(largest, float((whole.moves[1] - other.moves[1]).norm()))
    assert clip * 0.99 < largest <= clip * (1 + 1e-6)


def test_empty_batches_of_texts_count_and_move_nothing(tmp_path: Path) -> None:
    ids = torch.tensor([[5, 6, 0], [7, 7, 7], [8, 0, 0], [9, 3, 4]])
    module = language_run(
        "ForSequenceClassification", ids, torch.tensor([1, 0, 1, 0]), tmp_path, 0.05, 1, None, max_epochs=6
    )
    moved = [float((after - before).norm()) for before, after in itertools.pairwise(module.moves)]
    assert len(moved) == 24 and min(moved) == 0 and 0 < max(moved) <= 4 * 0.05 * (1 + 1e-6)


class Adapted(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.lora_A = nn.Linear(4, 2)  # merged, say: not used


def test_an_adapter_that_trains_nothing_is_refused(tmp_path: Path) -> None:
    callback = callback_of()
    with pytest.raises(SparseDPError, match=r"any of the 2 trained lora parameters of adapters, 'lora_A.weight'"):
        trainer_of(tmp_path, callback).fit(Adapted(), data())
    assert callback.engine.ledger.steps == 3
