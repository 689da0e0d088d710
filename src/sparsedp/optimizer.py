"""The private optimizer: torch.optim's surface around the user's optimizer, or several. Steps are private (`step.py`)."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsedp.accounting.ledger import Ledger
from sparsedp.capture import Capture, Captured, named_tensors
from sparsedp.errors import SparseDPError, SparseDPWarning, UnsupportedError
from sparsedp.movement import Movement
from sparsedp.noise import GaussianNoise
from sparsedp.plan import PrivacyPlan
from sparsedp.preparation import Preparation
from sparsedp.sampling import BatchInfo
from sparsedp.several_optimizers import require_same_optimizers
from sparsedp.step import PrivateStep, unguarded
from sparsedp.step_report import StepReport, TableStep
from sparsedp.tables import Owner, Ranks, TableSpec

__all__ = ["PrivateOptimizer", "StepReport", "TableStep"]


class FirstSteps(Protocol):
    """Somebody who looks at the first steps of a run."""

    @property
    def watching(self) -> bool: ...

    def see(self, report: StepReport | None, trained: Sequence[str], used: Set[str]) -> None: ...


_DROPPED = 3  # gradients in a row that zero_grad() may drop before somebody is told


class PrivateOptimizer(Optimizer):
    """Stands where the user's optimizer stood: `step()` makes one private step with it.

    Schedulers, `param_groups`, `state_dict` and everything else act on the wrapped optimizer, `inner`. Several are wrapped as
    one (`sparsedp.several_optimizers`): its `param_groups` are those of all, in order.
    """

    # accelerate's prepare() hands on what says so. It would otherwise leave out the steps of physical batches.
    _is_accelerate_prepared = True
    step_was_skipped = False  # which accelerate asks

    def __init__(
        self,
        inner: Optimizer,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        tables: Mapping[str, TableSpec],
        plan: PrivacyPlan,
        capture: Capture,
        noise: GaussianNoise,
        ledger: Ledger,
        current_batch: Callable[[], BatchInfo | None],
        preparation: Preparation,
        ranks: Ranks | None = None,
        held: Mapping[str, nn.Parameter] | None = None,
        first_steps: FirstSteps | None = None,
    ) -> None:
        """`ranks` and `held` are as in `PrivateStep`; `first_steps` are told of the steps that are taken first."""
        self._first_steps = first_steps
        # Not super().__init__(): it would make parameter groups of its own beside the wrapped optimizer's.
        self.inner = inner
        self.plan = plan
        self.ledger = ledger
        self.preparation = preparation
        # Parameters that are divided among processes move where they are.
        movement = Movement(dict(module.named_parameters()) if ranks is None else {}, inner)
        self.private_step = PrivateStep(
            plan, parameters, tables, inner, noise, ledger, preparation, ranks, held, movement
        )
        self.after_step: list[Callable[[], None]] = []  # called after each logical batch's step
        self.partly_loaded = False  # whether weights are in part those of a checkpoint that is being loaded
        self._parameters = dict(parameters)
        self._module = module
        self._held = dict(parameters if held is None else held)
        self._names = {id(parameter): name for name, parameter in self._held.items()}
        self._capture = capture
        self._current_batch = current_batch
        self._stepped: BatchInfo | None = None
        self._dropped = 0  # gradients since the last step() that zero_grad() dropped

    @property
    def owner(self) -> Owner:
        """Who owns the rows of the tables."""
        return self.private_step.owner

    @property
    def noise(self) -> GaussianNoise:
        return self.private_step.noise

    @noise.setter
    def noise(self, noise: GaussianNoise) -> None:
        self.private_step.noise = noise

    @property
    def stage(self) -> Callable[[str], AbstractContextManager[Any]]:
        """Entered around each stage of a step; benchmarks put a stopwatch here."""
        return self.private_step.stage

    @stage.setter
    def stage(self, stage: Callable[[str], AbstractContextManager[Any]]) -> None:
        self.private_step.stage = stage

    @property
    def prepared(self) -> dict[str, Tensor] | None:
        """The rows of each table that the mechanism chose ahead of its steps; None before it was asked."""
        return self.preparation.state.rows

    @property
    def last_step(self) -> StepReport | None:
        """What the last step did, which is worked out when somebody asks; None before the first."""
        return self.private_step.report

    # ------------------------------------------------------------------ torch.optim's surface

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    def state_dict(self) -> dict[str, Any]:
        self.owner.settle_all()  # momentum waits for its noise as weights do
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.owner.settle_all()
        self.inner.load_state_dict(state_dict)

    def named_state_dict(self) -> dict[str, Any]:
        """`state_dict` with the parameters' names in place of their numbers."""
        saved, names = self.state_dict(), self._names_in_order()
        groups = [{**group, "params": [names[i] for i in group["params"]]} for group in saved["param_groups"]]
        named = {names[key] if isinstance(key, int) else key: value for key, value in saved["state"].items()}
        return {**saved, "state": named, "param_groups": groups}

    def load_named_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `named_state_dict` gave."""
        require_same_optimizers(self.inner, state_dict)
        numbers = {name: i for i, name in enumerate(self._names_in_order())}
        # torch goes by the places in the groups, so that each parameter has to be at its own, wherever it was when saved.
        mine = [[self._names[id(parameter)] for parameter in group["params"]] for group in self.param_groups]
        theirs = [group["params"] for group in state_dict["param_groups"]]
        if [sorted(names) for names in mine] != [sorted(names) for names in theirs]:
            raise ValueError("the state has other parameter groups, or other parameters in them")
        groups = [
            {**group, "params": [numbers[name] for name in names]}
            for group, names in zip(state_dict["param_groups"], mine)
        ]
        numbered = {numbers.get(key, key): value for key, value in state_dict["state"].items()}
        self.load_state_dict({**state_dict, "state": numbered, "param_groups": groups})

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """What the wrapped optimizer moves: of a table that is divided among processes, this one's shard."""
        return dict(zip(self._names_in_order(), (p for group in self.param_groups for p in group["params"])))

    def name_again(self, exchanged: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """After the wrapped optimizer got parameters back in whose place it had others: they have the names of these."""
        self._names |= {
            id(given): self._names[id(mine)] for given, mine in exchanged.items() if id(mine) in self._names
        }

    def _names_in_order(self) -> list[str]:
        return [self._names[id(parameter)] for group in self.param_groups for parameter in group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise UnsupportedError(
            "Parameters cannot join a private optimizer after make_private, because its plan names those it protects. "
            "Build the optimizer with all of them, frozen ones included, before make_private."
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets what backward collected since the last step. Finished micro-batches stay."""
        if self._capture.has_uncollected:
            self._dropped += 1
            if self._dropped == _DROPPED:
                warnings.warn(
                    f"zero_grad() dropped the gradients of {_DROPPED} batches in a row, none of which had a step(): nothing is "
                    "trained. Call step() of the optimizer that make_private returned after each backward().",
                    SparseDPWarning,
                    stacklevel=2,
                )
        self._capture.clear()
        self.private_step.drop_gradients()

    def forget(self) -> None:
        """Drops everything of an unfinished step."""
        self._capture.clear()
        self.private_step.forget()
        self._stepped = None

    def __getattr__(self, name: str) -> Any:
        """Whatever torch.optim adds to an optimizer is the wrapped one's, such as its step hooks."""
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("A private optimizer cannot be copied or pickled: a copy would draw the same noise again.")

    def __repr__(self) -> str:
        return f"PrivateOptimizer({self.inner!r})"

    # ------------------------------------------------------------------ the private step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One private step; for all but the last physical batch of a logical one, only its clipped sum is kept.

        A `closure` does zero_grad(), forward and backward() on the current batch and gives its loss. It is called once,
        before anything else, so that `step(closure)` is `loss = closure(); step()`, and returns that loss.
        """
        loss = None
        self._refuse_divided_losses()
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batch = self._next_batch()
        with unguarded():
            tensors = named_tensors(self._module)
        self._refuse_ordinary_gradients(tensors)
        with self.stage("collect"):
            captured = self._capture.collect(tensors)
        if batch.units == 0:
            # Whatever units' uses came back are the stand-in's, which is no unit.
            captured = Captured(0, {}, terms=[] if captured is None else captured.terms)
        elif captured is None:
            raise SparseDPError("step() was called without a backward() on the current batch before it.")
        elif captured.units != batch.units or captured.owners is not batch.owners:
            raise SparseDPError(
                f"The loss is over {captured.units} units with {captured.examples} examples, the current batch has "
                f"{batch.units} with {batch.examples}."
            )
        self._stepped, taken, self._dropped = batch, self.ledger.steps, 0
        watched = self._first_steps is not None and self._first_steps.watching
        self.private_step.counts_touches = watched
        try:
            self.private_step.take(batch, captured)
        except BaseException:
            # What was collected of this logical batch must not slip into the next one.
            self.private_step.forget()
            if self.ledger.steps == taken:
                self._stepped = None
            raise
        if batch.last:
            for told in self.after_step:
                told()
            if watched and self._first_steps is not None:
                trained = [name for name, parameter in self._parameters.items() if parameter.requires_grad]
                self._first_steps.see(self.last_step, trained, self.private_step.used)
        return loss

    def require_fully_loaded(self) -> None:
        if self.partly_loaded:
            raise SparseDPError(
                "Loading a checkpoint was interrupted: some weights are its own, others are those from before. Load it again."
            )

    def _next_batch(self) -> BatchInfo:
        self.require_fully_loaded()
        batch = self._current_batch()
        if batch is None:
            raise SparseDPError(
                "No batch was drawn from the private loader yet. Iterate over the loader that make_private returned, "
                "not over the one that was passed to it."
            )
        if batch is self._stepped:
            raise SparseDPError(
                "The current batch already had its step. A second step on the same sample would cost more "
                "privacy than the "
                "ledger shows: draw a new batch from the loader for every step."
            )
        fresh = self._stepped is None or self._stepped.last
        if fresh != batch.first or (not fresh and self._stepped is not None and self._stepped.step != batch.step):
            self.private_step.forget()
            if not batch.first:
                raise SparseDPError("The physical batches of a logical batch must all be stepped, in order.")
        limit = self.plan.steps_on(batch.span)
        if batch.last and limit is not None and self.ledger.taken(batch.span) >= limit:
            where = "" if batch.span is None else f" on span {batch.span} of the stream"
            raise SparseDPError(
                f"The plan's {limit} steps{where} were taken and its privacy budget (epsilon {self.plan.target_epsilon}) "
                "is spent. After load_checkpoint, loop over the epochs that are left; to train longer, plan for more "
                "epochs from the start."
            )
        return batch

    def _refuse_divided_losses(self) -> None:
        """Raises if accelerate divides losses. It keeps its setting once a process, whoever's loop that is of."""
        state = sys.modules.get("accelerate.state")
        steps = 1 if state is None else state.GradientState().num_steps
        if steps != 1:
            self.forget()  # what backward collected is of a loss that was divided
            raise UnsupportedError(
                f"accelerate is set to gradient_accumulation_steps={steps}: accelerator.backward() divides the loss by it, and "
                "so each unit's gradient before it is clipped, while every batch of the private loader is a step of its own. "
                "Build Accelerator(gradient_accumulation_steps=1); the loader's batch_size is the expected size of a whole "
                "batch, and max_physical_batch of make_private lets the model see so many examples at a time. In a loop without "
                "accelerator.backward(), set accelerator.gradient_accumulation_steps = 1 before it."
            )

    def _refuse_ordinary_gradients(self, tensors: list[tuple[str, Tensor]]) -> None:
        with unguarded():
            # A shard that is held in place of a table is no tensor of the module.
            leaves = [(name, t) for name, t in tensors if t.is_leaf and isinstance(t, nn.Parameter)]
            ordinary = [name for name, t in (*leaves, *self._held.items()) if t.grad is not None]
        if ordinary:
            self._module.zero_grad()
            self.private_step.drop_gradients()
            raise SparseDPError(
                f"Parameter '{ordinary[0]}' has an ordinary gradient, which no clipping bounds. Leave .grad alone; "
                "backward() and step() do all that is needed. A parameter that is to be trained later must be in the "
                "optimizer, frozen, when make_private is called."
            )
        with unguarded():
            self._refuse_other_parameters(leaves)
        held = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        if held != self._names.keys():
            raise UnsupportedError(
                "The optimizer's parameters are not those that make_private saw. Build it with all of them, frozen ones "
                "included, before make_private."
            )

    def _refuse_other_parameters(self, leaves: Sequence[tuple[str, Tensor]]) -> None:
        """Raises if the module trains others than the optimizer, such as new ones in the places of those of make_private."""
        private = {id(parameter) for parameter in self._parameters.values()}
        outside = [name for name, tensor in leaves if tensor.requires_grad and id(tensor) not in private]
        if outside:
            raise UnsupportedError(
                f"Parameter '{outside[0]}' requires a gradient, but the optimizer does not have it: it was added, unfrozen or "
                "replaced after make_private, and would not be trained. Do so before make_private, and give it to the optimizer, "
                "or freeze it with requires_grad_(False)."
            )
        there = {id(tensor) for _, tensor in leaves}
        gone = [name for name, parameter in self._parameters.items() if id(parameter) not in there]
        if gone:
            raise UnsupportedError(
                f"The optimizer trains parameter '{gone[0]}' of make_private, which is not in the module any more: another "
                "tensor is in its place (weights that were tied, an adapter that was merged or loaded?), or none. Change the "
                "module before make_private."
            )
