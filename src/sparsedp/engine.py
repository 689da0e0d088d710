"""PrivacyEngine: makes a module, its optimizer and its loader private, and answers for the result."""

from __future__ import annotations

import logging
import os
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from numbers import Real
from typing import IO, TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from sparsedp import checkpoint, concerns, leaving
from sparsedp.accounting.ledger import Ledger
from sparsedp.accounting.registry import find_accountant
from sparsedp.callbacks import StepsTold, require_callback
from sparsedp.capture import Capture, Draws, PublicInputs
from sparsedp.check import CheckReport
from sparsedp.distributed import checkpoint as checkpoint_of_several
from sparsedp.distributed.torchrec_optimizers import refuse_optimizers_of_torchrec
from sparsedp.distributed.training import Together, together, unwrapped
from sparsedp.distributed.whole_file import write_state_dict
from sparsedp.errors import CheckpointError, ConfigError, SparseDPError, SparseDPWarning, UnsupportedError
from sparsedp.fallback import fallback_tables
from sparsedp.fused import replace_fused, restore_fused
from sparsedp.kernels.threads import let_waiting_threads_sleep
from sparsedp.mechanisms import Mechanism, PublicCounts
from sparsedp.noise import GaussianNoise, RandomKey
from sparsedp.optimizer import PrivateOptimizer
from sparsedp.plan import PrivacyPlan
from sparsedp.prediction import (
    TouchStatistics,
    find_auto_threshold,
    predict,
    statistics_from_counts,
    statistics_from_data,
    statistics_from_release,
)
from sparsedp.preparation import Preparation
from sparsedp.progress import Progress, no_progress
from sparsedp.promise import Promise
from sparsedp.refusals import private_parameters, refuse_module, refuse_optimizer, warn_of_compiled_parts
from sparsedp.sampling import PrivateLoader
from sparsedp.settings import ExecutionSettings, PrivacySettings, SettingsKeywords, read_settings, takes_settings
from sparsedp.several_optimizers import as_one, optimizer_state_bytes, parts_of
from sparsedp.signature import read_key, sign_order
from sparsedp.statement import PrivacyStatement
from sparsedp.tables import TableSpec, find_tables, table_specs
from sparsedp.validation import PrivateValidation

if TYPE_CHECKING:
    from typing_extensions import Unpack

_log = logging.getLogger("sparsedp")  # events of interest; what a user must know is warned of or raised
_NOISE, _SAMPLING, _FORWARD, _FUNCTIONS, _VALIDATION = 0, 1, 2, 3, 4  # the purposes that the engine's key is split into


class HasNote(Protocol):
    """Something that the statement may have to mention, such as `sparsedp.advise` gives."""

    @property
    def note(self) -> str | None: ...


class PrivacyEngine:
    """One engine trains one module.

    `accountant` is "pld" (tight), "rdp", "dp_accounting" (that library's own PLD), or the name of another that was registered
    (`sparsedp.accounting.register_accountant`). With a `seed` a run can be repeated exactly, for tests; its statement then says
    that the result must not be released. A delta above 0.01 is refused unless `allow_large_delta`.

    With a `ledger_key`, a secret of at least 16 bytes or the path of a file that holds one (and is made if there is none),
    checkpoints are signed: one that was edited, or that was written on data in other periods or of other users, is refused.

    Where several processes train together (`docs/distributed.md`), they wait for each other for at most `rank_timeout` seconds;
    in `long_work`, and so in checkpoints and exports, for as long as the others live.

    `progress` (`sparsedp.progress.Progress`) is told how far the tasks are that may take long: counting the data, and settling a
    large table.
    """

    def __init__(
        self,
        accountant: str = "pld",
        seed: int | None = None,
        *,
        allow_large_delta: bool = False,
        ledger_key: bytes | str | os.PathLike[str] | None = None,
        progress: Progress = no_progress,
        rank_timeout: float = 60.0,
    ) -> None:
        self._promise = Promise(accountant, allow_large_delta)
        self._seed = seed
        self._signing_key = None if ledger_key is None else read_key(ledger_key)
        self._progress = progress
        self._rank_timeout = timedelta(seconds=rank_timeout)
        self._key = RandomKey.from_os() if seed is None else RandomKey.from_seed(seed)
        self._plan: PrivacyPlan | None = None
        self._module: nn.Module | None = None
        self._optimizer: PrivateOptimizer | None = None
        self._loader: PrivateLoader | None = None
        self._lineage = checkpoint.Lineage()  # the checkpoints that were written or read here
        self._capture: Capture | None = None
        self._recurrent: list[nn.Module] = []  # layers of torch that run as ours
        self._at_close: list[Callable[[], None]] = []
        self._run: Together | None = None  # of several processes; None: this one trains alone

    # ------------------------------------------------------------------ making things private

    @takes_settings
    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        data_loader: DataLoader,
        noise_multiplier: float,
        **settings: Unpack[SettingsKeywords],
    ) -> tuple[nn.Module, PrivateOptimizer, PrivateLoader]:
        """The same module, and the optimizer and the loader to use from now on.

        The loader's batch size becomes the expected one, and the divisor of the gradient. `noise_multiplier=0`
        clips without noise: no privacy, and the statement says so. `settings` are those of `sparsedp.settings`.
        `optimizer` may be a list of several, each with its own parameters: they become one.
        """
        if isinstance(noise_multiplier, bool) or not isinstance(noise_multiplier, Real):
            kind = "None" if noise_multiplier is None else f"a {type(noise_multiplier).__name__}"
            raise ConfigError(
                f"noise_multiplier must be a number of at least 0, such as 1.0, not {kind}: the noise decides what may be "
                "promised. To have it found for an epsilon: make_private_with_epsilon(target_epsilon=...)."
            )
        read, single = read_settings(settings, "make_private"), as_one(optimizer)
        with self._replaced(module, single, read[1]) as inner:
            if read[0].validation is not None and noise_multiplier > 0:
                raise UnsupportedError(
                    "validation is for make_private_with_epsilon: a run that stops early has the epsilon of its whole plan, "
                    "which says how long it may be."
                )
            plan, loader = self._prepare(inner, single, data_loader, noise_multiplier, *read)
            concerns.warn(concerns.of_plan(plan), stacklevel=4)
            return module, *self._install(plan, inner, single, loader)

    @takes_settings
    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        data_loader: DataLoader,
        target_epsilon: float,
        target_delta: float,
        epochs: int | None = None,
        steps: int | None = None,
        **settings: Unpack[SettingsKeywords],
    ) -> tuple[nn.Module, PrivateOptimizer, PrivateLoader]:
        """As `make_private`, with the least noise that keeps `epochs` epochs, or `steps` steps, within the target."""
        if (epochs is None) == (steps is None):
            raise ValueError("Give either epochs or steps: how long the run is planned to be.")
        for name, length in (("epochs", epochs), ("steps", steps)):
            if length is not None and (not isinstance(length, int) or length < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, not {length!r}")
        read, single = read_settings(settings, "make_private_with_epsilon"), as_one(optimizer)
        with self._replaced(module, single, read[1]) as inner:
            plan, loader = self._prepare(inner, single, data_loader, 1.0, *read)
            self._promise.require_delta(target_delta, plan.dataset_size)
            planned = steps if epochs is None else epochs * loader.steps_per_epoch
            assert planned is not None
            plan = plan.calibrated(
                target_epsilon=target_epsilon, target_delta=target_delta, steps=planned, progress=self._progress
            )
            concerns.warn(concerns.of_plan(plan), stacklevel=4)
            return module, *self._install(plan, inner, single, loader)

    @contextmanager
    def _replaced(self, module: nn.Module, optimizer: Optimizer, execution: ExecutionSettings) -> Iterator[nn.Module]:
        """The module to train, of which parts run as others; not if what happens inside fails.

        torch's recurrent layers run as ours, if that is wanted, and images stand for TorchRec's sharded collections.
        """
        inner = unwrapped(module)
        refuse_optimizers_of_torchrec(optimizer, inner)
        layers = replace_fused(inner) if execution.replace_recurrent else []
        try:
            with together(inner, optimizer, self._rank_timeout) as run:
                if run is not None and self._plan is None:
                    self._run, self._key = run, run.share_key(self._key)
                yield inner
        except BaseException:
            restore_fused(layers)
            raise
        self._recurrent = layers

    def _prepare(
        self, module: nn.Module, optimizer: Optimizer, data_loader: DataLoader, noise_multiplier: float,
        settings: PrivacySettings, execution: ExecutionSettings,
    ) -> tuple[PrivacyPlan, PrivateLoader]:  # fmt: skip
        """Checks everything and changes nothing."""
        if self._plan is not None:
            raise SparseDPError("This engine already trains a module. Make a new PrivacyEngine for another run.")
        if any(isinstance(part, PrivateOptimizer) for part in parts_of(optimizer)):
            raise UnsupportedError("The optimizer is private already.")
        refuse_module(module)
        warn_of_compiled_parts(module)
        refuse_optimizer(optimizer, module, settings.mechanism, self._held())
        parameters = private_parameters(module, optimizer, self._held())
        trained = {name for name, p in parameters.items() if p.requires_grad}
        settings.mechanism.refuse_tables(find_tables(module) & trained)
        users = settings.users_of(data_loader.dataset)
        if execution.own_data and self._run is None:
            raise UnsupportedError("own_data is for several processes that train together; this one trains alone.")
        if isinstance(settings.validation, PrivateValidation) and self._run is not None:
            raise UnsupportedError(
                "A private validation set is for one process; several that train together cannot look at it yet. Leave "
                "validation out, or validate on public data."
            )
        share = None if self._run is None else self._run.share(data_loader.dataset, users, execution.own_data)
        loader = PrivateLoader(
            data_loader,
            key=self._key.child(_SAMPLING),
            poisson=settings.poisson_sampling,
            max_physical_batch=execution.max_physical_batch,
            stream=settings.stream,
            users=users,
            public_inputs=settings.public_inputs,
            progress=self._progress,
            share=share,
        )
        plan = PrivacyPlan.of(
            settings,
            loader,
            parameters,
            noise_multiplier=noise_multiplier,
            accountant=self.accountant,
            seeded=self._key.seeded,
        )
        return plan, loader

    def _install(
        self, plan: PrivacyPlan, module: nn.Module, optimizer: Optimizer, loader: PrivateLoader
    ) -> tuple[PrivateOptimizer, PrivateLoader]:
        parameters, run = private_parameters(module, optimizer, self._held()), self._run
        public = PublicInputs(plan.public_inputs, loader.layout.constant_tensors)
        generator = self._key.child(_FUNCTIONS).generator()
        capture = Capture(module, parameters, lambda: loader.current, self._draws(), public, generator)
        tables = table_specs(parameters, find_tables(module))
        plan = self._with_threshold_found(plan, module, capture, loader, tables)
        ranks = None
        if run is not None:
            ranks = run.begin(plan, module, tables, loader, self._key)
        noise = GaussianNoise(self._key.child(_NOISE))
        preparation = Preparation(
            plan, module, capture, loader, self.ledger,
            tables=lambda: private.private_step.trained_tables(), key=lambda: private.noise.key, ranks=ranks,
            find_threshold=self._find_released_threshold,
        )  # fmt: skip
        if plan.stream is not None:
            self.ledger.composition = plan.stream.composition
        private = PrivateOptimizer(
            inner=optimizer,
            module=module,
            parameters=parameters,
            tables=tables,
            plan=plan,
            capture=capture,
            noise=noise,
            ledger=self.ledger,
            current_batch=lambda: loader.current,
            preparation=preparation,
            ranks=ranks,
            held=None if run is None else run.held_parameters(parameters),
            first_steps=concerns.FirstSteps(plan) if run is None else None,
        )
        private.private_step.progress = self._progress
        let_waiting_threads_sleep()
        for parameter in parameters.values():
            parameter.grad = None
        capture.attach()
        try:
            leaving.watch(module, capture.require_unwritten)
        except BaseException:
            capture.detach()
            raise
        capture.before_read = private.owner.attach()
        if run is not None and ranks is not None:
            run.settle_before_reads(private.owner, ranks, tables)
        _log.debug(
            "Plan: %s, noise multiplier %.4g, rate %.3g", plan.mechanism.name, plan.noise_multiplier, plan.sample_rate
        )
        self._capture = capture
        self._plan, self._module, self._optimizer, self._loader = plan, module, private, loader
        return private, loader

    def _with_threshold_found(
        self,
        plan: PrivacyPlan,
        module: nn.Module,
        capture: Capture,
        loader: PrivateLoader,
        tables: Mapping[str, TableSpec],
    ) -> PrivacyPlan:
        """The plan with a number for AdaFEST's threshold="auto", if it may be found from the data or from public counts."""
        look = plan.mechanism.looks_at
        trained = {name: table for name, table in tables.items() if dict(module.named_parameters())[name].requires_grad}
        if look is None:
            self._judge_by_public_counts(plan, module, trained)
        if look is None or look == "release":
            return plan
        if isinstance(look, PublicCounts):
            return self._found(plan, statistics_from_counts(plan, trained, look.counts, look.units))
        self._refuse_to_look()
        capture.attach()
        try:
            statistics = statistics_from_data(plan, module, capture, loader, trained, plan.mechanism.inputs)
        finally:
            capture.detach()
        return self._found(plan, statistics)

    def _judge_by_public_counts(self, plan: PrivacyPlan, module: nn.Module, trained: Mapping[str, TableSpec]) -> None:
        """Warns where settings will keep little, if counts are given. Without, the data alone would tell, and looking costs."""
        public = plan.mechanism.public_counts
        if public is None or not set(trained) <= set(public.counts) or fallback_tables(module):
            return
        counts = {name: public.counts[name] for name in trained}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SparseDPWarning)  # of the choice, which is made again when it counts
                statistics = statistics_from_counts(plan, trained, counts, public.units)
        except ValueError:
            if plan.mechanism.prepares:  # which refuses its counts in its own words
                return
            raise
        concerns.warn(concerns.of_prediction(plan, predict(plan, statistics), statistics), stacklevel=6)

    def _found(self, plan: PrivacyPlan, statistics: TouchStatistics) -> PrivacyPlan:
        plan = find_auto_threshold(plan, statistics)
        concerns.warn(concerns.of_prediction(plan, predict(plan, statistics), statistics), stacklevel=6)
        return plan

    def _find_released_threshold(self) -> PrivacyPlan:
        """The same from the frequencies that the run releases, which that pays for."""
        plan, tables = self.plan, self.trained_tables()
        assert plan.frequencies is not None
        released = self.release_frequencies()
        self._replan(self._found(plan, statistics_from_release(plan, tables, plan.frequencies, released)))
        return self.plan

    def _replan(self, plan: PrivacyPlan) -> None:
        """Takes over a plan that differs from the one at hand in a threshold that was found."""
        _, optimizer, _ = self._parts()
        self._plan = optimizer.plan = optimizer.private_step.plan = plan
        optimizer.preparation.replan(plan)

    def _refuse_to_look(self) -> None:
        if self._run is not None and self._run.count > 1:
            raise UnsupportedError(
                "The data are not looked at in several processes: give public counts and units, or look at them in one process."
            )

    def _held(self) -> Mapping[str, nn.Parameter]:
        """The parameters that the optimizer has in place of those of the module: this process's shards of tables."""
        return {} if self._run is None else self._run.held

    def _draws(self) -> Draws:
        """The random numbers of forward passes, such as dropout's masks: others in every step."""
        rank = () if self._run is None or self._run.count == 1 else (self._run.rank,)
        return Draws(self._key.child(_FORWARD, *rank), lambda: self.ledger.steps)

    def close(self) -> None:
        """Makes the module an ordinary one again. The statement stays.

        What a module keeps beside parameters and buffers, and changed in training, still cannot leave it (`leaving.py`).
        """
        if self._capture is not None:
            self._capture.detach()
        if self._optimizer is not None:
            self._optimizer.owner.detach()
        if self._module is not None:
            leaving.unwatch(self._module)
        restore_fused(self._recurrent)
        if self._run is not None:
            self._run.close()
            if self._optimizer is not None:
                self._optimizer.name_again(self._run.exchanged)
        while self._at_close:
            self._at_close.pop(0)()

    def long_work(self) -> AbstractContextManager[None]:
        """Around what may take longer on one of several processes than `rank_timeout`, such as an evaluation on rank 0 alone.

        All of them enter it. At its end they wait for each other, for as long as all live: one that is killed or stopped is
        named after `rank_timeout` seconds. In one process it does nothing.
        """
        return nullcontext() if self._run is None else self._run.long_work.piece()

    def settle(self) -> None:
        """Gives every row the noise that LazyDP still owes it. Whatever lets weights out does this by itself."""
        self._parts()[1].owner.settle_all()

    def pending(self) -> dict[str, int]:
        """For each table, how many of its rows are owed noise; nothing with mechanisms other than LazyDP."""
        return self._parts()[1].owner.pending()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "An engine cannot be copied or pickled: a copy would draw the same noise again. Save a checkpoint."
        )

    def prepare(self) -> None:
        """Runs now, not at the next step, what a mechanism does ahead of its steps, such as FEST's selection."""
        _, optimizer, loader = self._parts()
        optimizer.preparation.prepare(loader.next_span)

    def release_frequencies(self) -> dict[str, Tensor]:
        """For each table the share of units that looks up each row, (rows,) float64, with noise; the same at every call.

        Planned by `make_private(frequencies=FrequencyRelease(...))`. The first call goes over the data and is charged to
        the ledger. A share is an estimate: it may be negative, or above 1.
        """
        return self._parts()[1].preparation.release_frequencies()

    def validate(self, values: Any, users: Any = None) -> float:
        """One look at the private validation set: the mean of its units' values, with noise. It is charged to the ledger.

        Planned by `make_private_with_epsilon(validation=PrivateValidation(...))`. `values` are one number for each example of
        the whole set, such as its loss under the model in eval(): a tensor, or those of its batches one after another. With
        unit="user", `users` says whose each example is; a user counts with the mean of their clipped values.
        """
        self._parts()
        validation = self.plan.validation
        if not isinstance(validation, PrivateValidation):
            raise SparseDPError(
                "No private validation is planned: give make_private_with_epsilon validation=sparsedp.PrivateValidation(...)."
            )
        return validation.look(values, users, self.plan.unit, self.ledger, self._key.child(_VALIDATION))

    def touch_statistics(
        self,
        counts: Mapping[str, Any] | None = None,
        units: float | None = None,
        inputs: Callable[[Any], Any] | None = None,
        plan: PrivacyPlan | None = None,
    ) -> TouchStatistics:
        """What `sparsedp.prediction` predicts steps from, before training and without a cost to the budget.

        With public `counts`, for each table how many of `units` units touch each row, the data are not looked at.
        Otherwise rows are counted on them without noise: what follows from it is for the developer, not for release.
        `inputs(batch)` gives the module's arguments; by default a tuple without its last element, or a dict. `plan` is this
        engine's, or the same with another mechanism.
        """
        module, _, loader = self._parts()
        tables, plan = self.trained_tables(), self.plan if plan is None else plan
        if counts is None:
            self._refuse_to_look()
        if (counts is None) != (units is None):
            raise ValueError("counts and units go together: of `units` units, counts[table][row] touch the row")
        if counts is not None and units is not None:
            if plan.mechanism.prepares and fallback_tables(module):
                raise UnsupportedError("Counts cannot tell how many units will use a fallback row: look at the data.")
            return statistics_from_counts(plan, tables, counts, units)
        assert self._capture is not None
        return statistics_from_data(plan, module, self._capture, loader, tables, inputs or plan.mechanism.inputs)

    def trained_tables(self) -> dict[str, TableSpec]:
        """The tables that are trained at present, by name."""
        return self._parts()[1].private_step.trained_tables()

    def lasting_bytes(self) -> int | None:
        """Of the module's parameters and the state that its optimizer will keep of them; None if that cannot be tried."""
        module, optimizer, _ = self._parts()
        state = optimizer_state_bytes(optimizer.inner)
        parameters = {p.data_ptr(): p.nbytes for p in module.parameters()}
        return None if state is None else sum(parameters.values()) + state

    def refuse(self, mechanism: Mechanism) -> None:
        """Raises `UnsupportedError` if the run could not have this mechanism in place of its own."""
        module, optimizer, _ = self._parts()
        refuse_optimizer(optimizer.inner, module, mechanism, self._held())
        mechanism.refuse_tables(self.trained_tables())

    # ------------------------------------------------------------------ answering for it

    @property
    def accountant(self) -> str:
        """The name of the accountant that epsilons come from."""
        return self._promise.accountant

    @accountant.setter
    def accountant(self, name: str) -> None:
        self._promise.accountant = find_accountant(name).name

    @property
    def ledger(self) -> Ledger:
        """What really ran."""
        return self._promise.ledger

    @property
    def plan(self) -> PrivacyPlan:
        if self._plan is None:
            raise SparseDPError("There is no plan yet: call make_private or make_private_with_epsilon first.")
        return self._plan

    def get_epsilon(self, delta: float | None = None) -> float:
        """What the steps that really ran have cost; 0 before the first.

        `delta` defaults to the plan's target or, without one, to 0.1 / N rounded down to one digit, N the number of units.
        With `validation`, what the whole plan costs, from the first step on: when it ends depends on what it learned.
        """
        return self._promise.epsilon(self._plan, delta)

    def statement(self, delta: float | None = None) -> PrivacyStatement:
        """What may be promised about the model as it is now."""
        return self._promise.statement(
            self.plan,
            delta,
            seeded=self._key.seeded,
            signed=self._signing_key is not None,
            drawn=self._parts()[2].drawn,
            several=self._run is not None and self._run.count > 1,
        )

    def add_callback(self, callback: Any, every: int = 1) -> None:
        """Tells `callback` (`sparsedp.callbacks`) of every step whose number `every` divides, of epochs, and of `close()`.

        Its values are those of the optimizer's `last_step`, learning rates and the epsilon spent; the loss is your loop's.
        Where several processes train together, that of rank 0 alone is told.
        """
        require_callback(callback, every)
        _, optimizer, loader = self._parts()
        if self._run is None or self._run.rank == 0:
            told = StepsTold(callback, every, optimizer, loader, self.ledger, self.get_epsilon)
            optimizer.after_step.append(told.after_step)
            self._at_close.append(told.at_end)

    def add_note(self, note: str) -> None:
        """Adds to what the statement does not cover, such as a vocabulary counted on private data."""
        self._promise.notes.append(note)

    def add_advice(self, advice: HasNote) -> None:
        """Lets the statement say what the choice of the mechanism looked at: `engine.add_advice(sparsedp.advise(...))`."""
        if advice.note is not None:
            self.add_note(advice.note)

    def describe_unit(self, text: str) -> None:
        """Lets the statement say what an example or a user is in these data, where that is not plain."""
        self._promise.unit_is = text

    def add_check(self, report: CheckReport) -> None:
        """Lets the statement say that `sparsedp.check` passed: `engine.add_check(sparsedp.check(...))`."""
        self._promise.checked = max(self._promise.checked, report.units)

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(self, path: str | os.PathLike[str], extra: dict[str, Any] | None = None) -> None:
        """Writes weights, optimizer, ledger, plan and position, atomically. `extra` holds plain values of the caller's.

        Where several processes train together all of them call it, with the same path, which becomes a folder. It can be
        loaded into another number of processes, another sharding, and into one process, and a file of one process into several.

        The noise and sampling keys are written only if the engine is seeded: in a file, they would let its
        reader subtract the noise. An unseeded run that is resumed goes on with fresh randomness, which has the
        same law.
        """
        module, optimizer, _ = self._parts()
        run = self._run
        with self.long_work():
            state = self._state(extra)
            _log.debug("Checkpoint after step %d: %s", self.ledger.steps, os.fspath(path))
            if run is None:
                checkpoint.save(path, self._whole(state), self._signing_key)
            else:
                self._lineage.add(self.ledger, run.from_rank_0(secrets.token_hex(16)))
                checkpoint_of_several.save(path, state, self._signing_key, run, module, optimizer)

    def checkpoint_dict(self, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        """What `save_checkpoint` writes, for a file of the caller's own: plain values and tensors, which `torch.save` takes.

        The tensors are those that are trained, not copies: write them before the next step.
        """
        if self._run is not None:
            raise UnsupportedError(
                "checkpoint_dict is for one process: several write a checkpoint with save_checkpoint."
            )
        return checkpoint.content_of(self._whole(self._state(extra)), self._signing_key)

    def load_checkpoint_dict(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """`load_checkpoint` of what `checkpoint_dict` gave, as it was read from a file."""
        if self._run is not None:
            raise UnsupportedError(
                "load_checkpoint_dict is for one process: several read a checkpoint with load_checkpoint."
            )
        state = checkpoint.state_of(
            {**content, "model": dict(content.get("model", {}))}, "The checkpoint", plan=self.plan, seed=self._seed,
            key=self._signing_key, order=self._order(),
        )  # fmt: skip
        return self._restore(state, None)

    def _state(self, extra: dict[str, Any] | None) -> checkpoint.State:
        """All of a checkpoint but tensors."""
        _, optimizer, loader = self._parts()
        optimizer.require_fully_loaded()
        return checkpoint.State(
            plan=self.plan, lineage=self._lineage, model={}, optimizer={}, loader=loader.state_dict(),
            prepared=optimizer.preparation.state, seed=self._seed, extra=extra or {}, notes=self._promise.notes,
            order=self._order(),
        )  # fmt: skip

    def _whole(self, state: checkpoint.State) -> checkpoint.State:
        """With the tensors, and the ledger as it is now."""
        module, optimizer, _ = self._parts()
        self._lineage.add(self.ledger)
        state.model, state.optimizer = module.state_dict(), optimizer.named_state_dict()
        return state

    def save_state_dict(self, target: str | os.PathLike[str] | IO[bytes]) -> None:
        """Writes the module's state_dict, settled, into one plain file for `torch.load`: the same from one process and several.

        Where several processes train together all of them call it, and rank 0 writes `target`, piece by piece: no process
        ever has a whole table.
        """
        module, optimizer, _ = self._parts()
        optimizer.require_fully_loaded()
        with self.long_work():
            optimizer.owner.settle_all()
            if self._run is None:
                torch.save(module.state_dict(), target)
            else:
                write_state_dict(target, module, self._run)

    def load_checkpoint(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Continues a run with the same plan; returns the caller's `extra`. If anything is wrong, nothing changes.

        The whole file is read and checked first, and then copied into the model, both piece by piece.
        Steps that this engine took and that are not in the checkpoint stay in the ledger: they were seen.
        """
        with self.long_work(), nullcontext() if self._run is None else self._run.failing_together():
            return self._load_checkpoint(path)

    def _load_checkpoint(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        self._parts()
        of_several = checkpoint_of_several.is_of_several(path)
        read = checkpoint_of_several.load if of_several else checkpoint.load
        state = read(path, plan=self.plan, seed=self._seed, key=self._signing_key, order=self._order())
        extra = self._restore(state, path if of_several or self._run is not None else None)
        _log.debug("Loaded the checkpoint after step %d: %s", self.ledger.steps, os.fspath(path))
        return extra

    def _restore(self, state: checkpoint.State, path: str | os.PathLike[str] | None) -> dict[str, Any]:
        """Puts a checkpoint in place that was read and checked; `path`: one that several processes wrote, or read now."""
        module, optimizer, loader = self._parts()
        if (
            self.plan.frequencies is not None
            and state.prepared.released
            and self.ledger.setups(None, self.plan.frequencies.event)
            and state.lineage.last[0] not in self._lineage.ledgers
        ):
            raise CheckpointError(
                "This engine has released frequencies already, and the checkpoint holds those of its run: both would have to "
                "be paid for. Call load_checkpoint before release_frequencies or estimate_errors."
            )
        assert self._capture is not None
        with optimizer.owner.replaced(), self._capture.replacing():
            loaded = leaving.loading(module)
            common = self._lineage.common(state.lineage)
            if path is not None:
                copy_tensors = checkpoint_of_several.restore(
                    path, state, common, module, optimizer, self.ledger, loader, self._run
                )
            else:
                copy_tensors = checkpoint.restore(state, common, module, optimizer, self.ledger, loader)
            self._lineage.join(state.lineage)
            self._promise.resumed = True
            self._promise.add_notes(state.notes)
            if not self._key.seeded:
                # Going back to an earlier step with the same key would put the same noise on another gradient.
                self._key = RandomKey.from_os() if self._run is None else self._run.share_key(RandomKey.from_os())
                optimizer.noise.key = self._key.child(_NOISE)
                loader.rekey(self._key.child(_SAMPLING))
            self._capture.draws = self._draws()
            copy_tensors()
            loaded()
            if state.plan != self.plan:  # the threshold that the run found on what it released
                self._replan(state.plan)
        return state.extra

    def _order(self) -> str | None:
        """Which examples belong together, signed; None without a key: a plain digest would tell, to whoever tries them all."""
        loader = self._parts()[2]
        if self._signing_key is None:
            return None
        spans = () if loader.stream is None else loader.stream.spans
        users = () if loader.users is None else (loader.users.begin, loader.users.order)
        order = sign_order(self._signing_key, [*spans, *users])
        if self._run is None or loader.share.begin is None:
            return order
        return " ".join(self._run.gather(order))  # each rank has data of its own

    def _parts(self) -> tuple[nn.Module, PrivateOptimizer, PrivateLoader]:
        if self._module is None or self._optimizer is None or self._loader is None:
            raise SparseDPError("No module is private yet: call make_private or make_private_with_epsilon first.")
        return self._module, self._optimizer, self._loader
