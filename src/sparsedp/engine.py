"""PrivacyEngine: makes a module, its optimizer and its loader private, and answers for the result."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from sparsedp import checkpoint, leaving
from sparsedp.accounting.epsilon import dp_accounting_above, epsilon_of
from sparsedp.accounting.ledger import Ledger
from sparsedp.accounting.registry import find_accountant
from sparsedp.capture import Capture, Draws, PublicInputs
from sparsedp.check import CheckReport
from sparsedp.distributed import checkpoint as checkpoint_of_several
from sparsedp.distributed.training import Together, together, unwrapped
from sparsedp.errors import CheckpointError, SparseDPError, UnsupportedError
from sparsedp.fallback import fallback_tables
from sparsedp.fused import replace_fused, restore_fused
from sparsedp.noise import GaussianNoise, RandomKey
from sparsedp.optimizer import PrivateOptimizer
from sparsedp.plan import PrivacyPlan, default_delta, require_delta
from sparsedp.prediction import TouchStatistics, statistics_from_counts, statistics_from_data
from sparsedp.preparation import Preparation
from sparsedp.progress import Progress, no_progress
from sparsedp.refusals import private_parameters, refuse_module, refuse_optimizer, warn_of_compiled_parts
from sparsedp.sampling import PrivateLoader
from sparsedp.settings import ExecutionSettings, PrivacySettings, SettingsKeywords, read_settings, takes_settings
from sparsedp.signature import read_key, sign_order
from sparsedp.statement import PrivacyStatement, make_statement
from sparsedp.tables import find_tables, table_specs

if TYPE_CHECKING:
    from typing_extensions import Unpack

_NOISE, _SAMPLING, _FORWARD, _FUNCTIONS = 0, 1, 2, 3  # the purposes that the engine's key is split into


class PrivacyEngine:
    """One engine trains one module.

    `accountant` is "pld" (tight), "rdp", "dp_accounting" (that library's own PLD), or the name of another that was registered
    (`sparsedp.accounting.register_accountant`). With a `seed` a run can be repeated exactly, for tests; its statement then says
    that the result must not be released. A delta above 0.01 is refused unless `allow_large_delta`.

    With a `ledger_key`, a secret of at least 16 bytes or the path of a file that holds one (and is made if there is none),
    checkpoints are signed: one that was edited, or that was written on data in other periods or of other users, is refused.

    Where several processes train together (`docs/distributed.md`), they wait for each other for at most `rank_timeout` seconds.

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
        self.accountant = find_accountant(accountant).name
        self.ledger = Ledger()
        self._seed = seed
        self._allow_large_delta = allow_large_delta
        self._signing_key = None if ledger_key is None else read_key(ledger_key)
        self._progress = progress
        self._rank_timeout = timedelta(seconds=rank_timeout)
        self._resumed = False  # whether a checkpoint was loaded
        self._key = RandomKey.from_os() if seed is None else RandomKey.from_seed(seed)
        self._plan: PrivacyPlan | None = None
        self._module: nn.Module | None = None
        self._optimizer: PrivateOptimizer | None = None
        self._loader: PrivateLoader | None = None
        self._notes: list[str] = []
        self._unit_is: str | None = None
        self._checked = 0  # units that sparsedp.check looked at
        self._lineage = checkpoint.Lineage()  # the checkpoints that were written or read here
        self._capture: Capture | None = None
        self._recurrent: list[nn.Module] = []  # layers of torch that run as ours
        self._run: Together | None = None  # of several processes; None: this one trains alone

    # ------------------------------------------------------------------ making things private

    @takes_settings
    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader,
        noise_multiplier: float,
        **settings: Unpack[SettingsKeywords],
    ) -> tuple[nn.Module, PrivateOptimizer, PrivateLoader]:
        """The same module, and the optimizer and the loader to use from now on.

        The loader's batch size becomes the expected one, and the divisor of the gradient. `noise_multiplier=0`
        clips without noise: no privacy, and the statement says so. `settings` are those of `sparsedp.settings`.
        """
        read = read_settings(settings, "make_private")
        with self._replaced(module, optimizer, read[1]) as inner:
            plan, loader = self._prepare(inner, optimizer, data_loader, noise_multiplier, *read)
            return module, *self._install(plan, inner, optimizer, loader)

    @takes_settings
    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader,
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        **settings: Unpack[SettingsKeywords],
    ) -> tuple[nn.Module, PrivateOptimizer, PrivateLoader]:
        """As `make_private`, with the least noise that keeps `epochs` epochs within the target."""
        if not isinstance(epochs, int) or epochs < 1:
            raise ValueError(f"epochs must be a whole number of at least 1, not {epochs!r}")
        read = read_settings(settings, "make_private_with_epsilon")
        with self._replaced(module, optimizer, read[1]) as inner:
            plan, loader = self._prepare(inner, optimizer, data_loader, 1.0, *read)
            require_delta(target_delta, plan.dataset_size, self._allow_large_delta)
            plan = plan.calibrated(
                target_epsilon=target_epsilon, target_delta=target_delta, steps=epochs * loader.steps_per_epoch
            )
            return module, *self._install(plan, inner, optimizer, loader)

    @contextmanager
    def _replaced(self, module: nn.Module, optimizer: Optimizer, execution: ExecutionSettings) -> Iterator[nn.Module]:
        """The module to train, of which parts run as others; not if what happens inside fails.

        torch's recurrent layers run as ours, if that is wanted, and images stand for TorchRec's sharded collections.
        """
        inner = unwrapped(module)
        layers = replace_fused(inner) if execution.replace_recurrent else []
        try:
            with together(inner, optimizer, self._rank_timeout) as run:
                if run is not None and self._run is None:
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
        if isinstance(optimizer, PrivateOptimizer):
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
        ranks = None
        if run is not None:
            ranks = run.begin(plan, module, tables, loader, self._key)
        noise = GaussianNoise(self._key.child(_NOISE))
        preparation = Preparation(
            plan, module, capture, loader, self.ledger,
            tables=lambda: private.private_step.trained_tables(), key=lambda: private.noise.key, ranks=ranks,
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
        )
        private.private_step.progress = self._progress
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
        self._capture = capture
        self._plan, self._module, self._optimizer, self._loader = plan, module, private, loader
        return private, loader

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

    def touch_statistics(
        self,
        counts: Mapping[str, Any] | None = None,
        units: float | None = None,
        inputs: Callable[[Any], Any] | None = None,
    ) -> TouchStatistics:
        """What `sparsedp.prediction` predicts steps from, before training and without a cost to the budget.

        With public `counts`, for each table how many of `units` units touch each row, the data are not looked at.
        Otherwise rows are counted on them without noise: what follows from it is for the developer, not for release.
        `inputs(batch)` gives the module's arguments; by default a tuple without its last element, or a dict.
        """
        module, optimizer, loader = self._parts()
        tables = optimizer.private_step.trained_tables()
        if counts is None and self._run is not None and self._run.count > 1:
            raise UnsupportedError(
                "The data are not looked at in several processes: give public counts and units, or look at them in one process."
            )
        if (counts is None) != (units is None):
            raise ValueError("counts and units go together: of `units` units, counts[table][row] touch the row")
        if counts is not None and units is not None:
            if self.plan.mechanism.prepares and fallback_tables(module):
                raise UnsupportedError("Counts cannot tell how many units will use a fallback row: look at the data.")
            return statistics_from_counts(self.plan, tables, counts, units)
        assert self._capture is not None
        return statistics_from_data(
            self.plan, module, self._capture, loader, tables, inputs or self.plan.mechanism.inputs
        )

    # ------------------------------------------------------------------ answering for it

    @property
    def plan(self) -> PrivacyPlan:
        if self._plan is None:
            raise SparseDPError("There is no plan yet: call make_private or make_private_with_epsilon first.")
        return self._plan

    def get_epsilon(self, delta: float | None = None) -> float:
        """What the steps that really ran have cost; 0 before the first.

        `delta` defaults to the plan's target or, without one, to 0.1 / N rounded down to one digit, N the number of units.
        """
        return epsilon_of(self.ledger, self._delta(delta), self.accountant)

    def statement(self, delta: float | None = None) -> PrivacyStatement:
        """What may be promised about the model as it is now."""
        delta, plan = self._delta(delta), self.plan
        loader = self._parts()[2]
        epsilon = epsilon_of(self.ledger, delta, self.accountant)
        compared = find_accountant(self.accountant).compared_with_dp_accounting and math.isfinite(epsilon)
        return make_statement(
            plan,
            epsilon=epsilon,
            delta=delta,
            steps=self.ledger.steps,
            seeded=self._key.seeded,
            notes=tuple(self._notes),
            unit_is=self._unit_is,
            checked=self._checked,
            abandoned=self.ledger.abandoned,
            dp_accounting_epsilon=dp_accounting_above(self.ledger, delta, epsilon / 0.9) if compared else None,
            resumed=self._resumed,
            signed=self._signing_key is not None,
            drawn=loader.drawn,
            several=self._run is not None and self._run.count > 1,
        )

    def add_note(self, note: str) -> None:
        """Adds to what the statement does not cover, such as a vocabulary counted on private data."""
        self._notes.append(note)

    def describe_unit(self, text: str) -> None:
        """Lets the statement say what an example or a user is in these data, where that is not plain."""
        self._unit_is = text

    def add_check(self, report: CheckReport) -> None:
        """Lets the statement say that `sparsedp.check` passed: `engine.add_check(sparsedp.check(...))`."""
        self._checked = max(self._checked, report.units)

    def _delta(self, delta: float | None) -> float:
        units = None if self._plan is None else self._plan.dataset_size
        if delta is None and self._plan is not None:
            delta = self._plan.target_delta
        if delta is None and units is not None:
            delta = default_delta(units)
        if delta is None:
            raise ValueError("delta is needed: there is no plan with a target delta yet")
        return require_delta(delta, units, self._allow_large_delta)

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(self, path: str | os.PathLike[str], extra: dict[str, Any] | None = None) -> None:
        """Writes weights, optimizer, ledger, plan and position, atomically. `extra` holds plain values of the caller's.

        Where several processes train together all of them call it, with the same path, which becomes a folder. It can be
        loaded into another number of processes, another sharding, and into one process, and a file of one process into several.

        The noise and sampling keys are written only if the engine is seeded: in a file, they would let its
        reader subtract the noise. An unseeded run that is resumed goes on with fresh randomness, which has the
        same law.
        """
        module, optimizer, loader = self._parts()
        optimizer.require_fully_loaded()
        run, state = self._run, checkpoint.State(
            plan=self.plan, lineage=self._lineage, model={}, optimizer={}, loader=loader.state_dict(),
            prepared=optimizer.preparation.state, seed=self._seed, extra=extra or {}, notes=self._notes, order=self._order(),
        )  # fmt: skip
        if run is None:
            self._lineage.add(self.ledger)
            state.model, state.optimizer = module.state_dict(), optimizer.named_state_dict()
            checkpoint.save(path, state, self._signing_key)
        else:
            self._lineage.add(self.ledger, run.from_rank_0(secrets.token_hex(16)))
            checkpoint_of_several.save(path, state, self._signing_key, run, module, optimizer)

    def load_checkpoint(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Continues a run with the same plan; returns the caller's `extra`. If anything is wrong, nothing changes.

        The whole file is read and checked first, and then copied into the model, both piece by piece.
        Steps that this engine took and that are not in the checkpoint stay in the ledger: they were seen.
        """
        module, optimizer, loader = self._parts()
        of_several = checkpoint_of_several.is_of_several(path)
        read = checkpoint_of_several.load if of_several else checkpoint.load
        state = read(path, plan=self.plan, seed=self._seed, key=self._signing_key, order=self._order())
        if (
            self.plan.frequencies is not None
            and state.prepared.released
            and self.ledger.setups(None)
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
            if of_several or self._run is not None:
                copy_tensors = checkpoint_of_several.restore(
                    path, state, common, module, optimizer, self.ledger, loader, self._run
                )
            else:
                copy_tensors = checkpoint.restore(state, common, module, optimizer, self.ledger, loader)
            self._lineage.join(state.lineage)
            self._resumed = True
            self._notes += [note for note in state.notes if note not in self._notes]
            if not self._key.seeded:
                # Going back to an earlier step with the same key would put the same noise on another gradient.
                self._key = RandomKey.from_os() if self._run is None else self._run.share_key(RandomKey.from_os())
                optimizer.noise.key = self._key.child(_NOISE)
                loader.rekey(self._key.child(_SAMPLING))
            self._capture.draws = self._draws()
            copy_tensors()
            loaded()
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
