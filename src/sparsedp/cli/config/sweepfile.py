"""What a sweep is configured by, and the runs that it stands for. `sweeps/demo.yaml` explains the keys."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sparsedp.cli.config.config import Config, require_folder_name
from sparsedp.cli.config.limits import NotNegative, Positive, Seed
from sparsedp.cli.config.load import BUNDLED, covers, find_config, make_config, put, put_text, read_values, read_yaml
from sparsedp.cli.config.schema import SchemaError, build, keys_of, suggestion
from sparsedp.cli.config.trust import Code
from sparsedp.errors import ConfigError

BUNDLED_SWEEPS = Path(__file__).parents[1] / "sweeps"
FROZEN, NON_PRIVATE = "frozen", "non_private"
# The keys that `seeds` decides, so that no other part of a sweep may.
_SET_BY_SEEDS = {"training.init_seed", "training.seed", "name"}
_LONGEST_ID = 150


@dataclass(frozen=True)
class Group:
    """Runs of one kind: a variant or a control."""

    set: dict[str, Any] = field(default_factory=dict)
    grid: dict[str, Any] = field(default_factory=dict)
    # The axes of the sweep's `over` that it is run along: all, none or some. Null: all, and for the
    # non-private control those that are not about privacy.
    over: bool | list[str] | None = None


@dataclass(frozen=True)
class Controls:
    """What every comparison of utility needs beside it; null leaves one out."""

    non_private: Group | None = Group()
    frozen: Group | None = Group()


@dataclass(frozen=True)
class Sweep:
    base: str
    reference: str
    variants: dict[str, Any]
    name: str
    set: dict[str, Any] = field(default_factory=dict)
    seeds: list[Seed] = field(default_factory=lambda: [0])
    seeded: bool = False
    over: dict[str, Any] = field(default_factory=dict)
    controls: Controls = Controls()
    # The non-private control is tried at these multiples of its learning rates, unless `controls` sets its rates.
    control_rates: list[Positive] = field(default_factory=lambda: [0.1, 0.3, 1.0, 3.0])
    metric: (
        Literal[
            "auc", "accuracy", "log_loss", "ndcg@10", "hit@10", "loss", "precision@10", "recall@10", "mrr", "mse", "brier_score",
            "calibration_error",
        ]
        | None
    ) = None  # fmt: skip
    losses: list[Positive] = field(default_factory=lambda: [0.001, 0.005, 0.01])
    margin: NotNegative = 0.01

    def __post_init__(self) -> None:
        require_folder_name(self.name, "sweep")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise SchemaError("seeds", f"expected at least one seed, and none twice; got {self.seeds}")
        if not self.losses:
            raise SchemaError("losses", "expected at least one utility loss, such as 0.005")
        if not self.control_rates or len(set(self.control_rates)) < len(self.control_rates):
            raise SchemaError(
                "control_rates", f"expected at least one multiple, and none twice; got {self.control_rates}"
            )
        if not self.variants:
            raise SchemaError("variants", "expected at least one variant")
        taken = [name for name in self.variants if name in keys_of(Controls)]
        if taken:
            raise SchemaError(f"variants.{taken[0]}", "a control has this name; choose another one")
        groups = self.groups()
        if self.reference not in self.variants:
            names = ", ".join(self.variants)
            raise SchemaError(
                "reference",
                f"expected one of the variants ({names}); got {self.reference!r}"
                f"{suggestion(self.reference, self.variants)}",
            )
        _check_changes(self.set, "set")
        _check_axes(self.over, "over")
        for name, group in groups.items():
            where = f"{self.section(name)}.{name}"
            _check_changes(group.set, f"{where}.set")
            _check_axes(group.grid, f"{where}.grid")
            self._check_order(name, group, where)

    def groups(self) -> dict[str, Group]:
        """Controls, the reference, then the other variants."""
        variants = {name: build(Group, given or {}, f"variants.{name}") for name, given in self.variants.items()}
        first = {name: variants[name] for name in variants if name == self.reference}
        controls = {name: getattr(self.controls, name) for name in keys_of(Controls)}
        return {**{name: group for name, group in controls.items() if group is not None}, **first, **variants}

    def section(self, name: str) -> str:
        return "variants" if name in self.variants else "controls"

    def axes(self, name: str, group: Group) -> dict[str, list[Any]]:
        """The part of `over` that a group is run along."""
        if group.over is None:
            chosen = [key for key in self.over if name != NON_PRIVATE or not key.startswith("privacy.")]
        elif isinstance(group.over, bool):
            chosen = list(self.over) if group.over else []
        else:
            chosen = group.over
        return {key: self.over[key] for key in chosen}

    def _check_order(self, name: str, group: Group, where: str) -> None:
        """Refuses a key that a later part of the sweep overwrites: its values would mean nothing."""
        if isinstance(group.over, list):
            for key in group.over:
                if key not in self.over:
                    problem = f"expected keys of the sweep's own over ({', '.join(self.over)}); got {key!r}"
                    raise SchemaError(f"{where}.over", problem + suggestion(key, self.over))
        parts = {f"{where}.set": group.set, "over": self.axes(name, group), f"{where}.grid": group.grid}
        for (early, before), (late, after) in itertools.combinations(parts.items(), 2):
            for key, other in itertools.product(before, after):
                if covers(other, key):
                    hint = f"; with over: false, {name} is run once" if late == "over" else ""
                    raise SchemaError(late, f"{other} would overwrite {key} of {early}: give it in one place{hint}")

    def points(self) -> list[dict[str, Any]]:
        """Each combination of values of `over`; one without values if it is empty."""
        return list(_combinations(self.over))


@dataclass(frozen=True)
class SweepRun:
    """One run: its group, where on the axes it lies, its own settings, its seed, and its configuration."""

    id: str
    group: str
    point: dict[str, Any]  # may lack axes that the group is not run along: then it counts for all of their values
    settings: dict[str, Any]
    seed: int
    config: Config

    @property
    def data_key(self) -> str:
        """The same for runs that can share their data."""
        values = self.config.to_dict()
        training = self.config.training  # whose seeds set torch's generator
        seeds = [training.seed, training.init_seed] if self.config.data.may_use_torch_seed else None
        return json.dumps([values["data"], seeds], sort_keys=True, default=str)


def sweep_names() -> list[str]:
    return sorted(path.stem for path in BUNDLED_SWEEPS.glob("*.yaml"))


def find_sweep(source: str | Path) -> Path:
    path = Path(source)
    if path.is_file():
        return path
    if str(source) in sweep_names():
        return BUNDLED_SWEEPS / f"{source}.yaml"
    names = ", ".join(sweep_names())
    raise ConfigError(
        f"{source} is neither a file nor a bundled sweep ({names}){suggestion(str(source), sweep_names())}"
    )


def load_sweep(source: str | Path) -> tuple[Sweep, Path]:
    """The sweep in a file, or the bundled one of that name, and where it was found."""
    path = find_sweep(source)
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping with the keys {', '.join(keys_of(Sweep))}")
    values.setdefault("name", path.stem)
    try:
        return build(Sweep, values), path
    except SchemaError as error:
        raise ConfigError(f"{path.name}: {error}") from None


def expand(sweep: Sweep, path: Path, overrides: Sequence[str] = (), trust: Sequence[str] = ()) -> list[SweepRun]:
    """Every run of the sweep in the file `path`, checked. `overrides` are key=value changes for all of them.

    They may name code beside the sweep's file (not beside a base elsewhere) and of the packages `trust`.

    They are put together in this order, each part on top of those before it: the base, `set`, overrides, what makes a
    control one, the group's `set`, a point of `over`, a point of `grid`, the seed.
    """
    beside = path.parent / sweep.base
    base_path = beside if beside.is_file() else find_config(sweep.base)
    base = read_values(base_path)
    code = Code(path, tuple(trust), also_beside=(BUNDLED,) if base_path.parent == BUNDLED else ())
    where = {}
    for key, value in sweep.set.items():
        where[key] = f"{path.name}: set.{key}"
        put(base, key, copy.deepcopy(value), where[key])
    groups = sweep.groups()
    for text in overrides:
        key = put_text(base, text)
        _refuse_ignored(key, sweep, groups)
        where[key] = f"--set {key}"
    rates = _control_rates(sweep, base)
    names = _short_names(
        [
            *sweep.over,
            *(key for rate in rates for key in rate),
            *(key for group in groups.values() for key in group.grid),
        ]
    )
    runs = []
    for seed, (name, group) in itertools.product(sweep.seeds, groups.items()):
        group_key = f"{path.name}: {sweep.section(name)}.{name}"
        for point in _combinations(sweep.axes(name, group)):
            tried = rates if name == NON_PRIVATE else [{}]
            for rate, grid in itertools.product(tried, _combinations(group.grid)):
                settings = {**rate, **grid}
                values = copy.deepcopy(base)
                changed = dict(where)
                parts = {
                    group_key: _built_in(name, values),
                    f"{group_key}.set": group.set,
                    f"{path.name}: over": point,
                    f"{group_key}.grid": settings,
                }
                for part, changes in parts.items():
                    for key, value in changes.items():
                        changed[key] = f"{part}.{key}"
                        put(values, key, copy.deepcopy(value), changed[key])
                id = _run_id(name, {**point, **settings}, seed, names)
                put(values, "training.init_seed", seed, group_key)
                put(values, "training.seed", seed if sweep.seeded else None, group_key)
                values["name"] = id
                runs.append(SweepRun(id, name, point, settings, seed, make_config(values, path.name, changed, code)))
    _check(runs)
    first: dict[str, int] = {}
    for run in runs:
        first.setdefault(run.data_key, len(first))
    return sorted(runs, key=lambda run: first[run.data_key])  # stable: otherwise seed by seed


def _control_rates(sweep: Sweep, base: Mapping[str, Any]) -> list[dict[str, float]]:
    """The learning rates at which the non-private control is tried, as changes of keys; [{}] if the sweep sets them itself.

    Noise and clipping want other rates than training without them, so that a control at the private runs' rate is a weak one.
    """
    group = sweep.controls.non_private
    optimizer = base.get("optimizer")
    if group is None or not isinstance(optimizer, Mapping) or sweep.control_rates == [1.0]:
        return [{}]
    keys = ("optimizer.lr", "optimizer.table_lr", "optimizer.tables.lr")
    given = [*group.set, *group.grid, *sweep.axes(NON_PRIVATE, group)]
    if any(covers(key, other) or covers(other, key) for key in given for other in keys):
        return [{}]
    tables = optimizer.get("tables")
    own = tables if isinstance(tables, Mapping) else {}
    rates = dict(zip(keys, (optimizer.get("lr"), optimizer.get("table_lr"), own.get("lr"))))
    numbers = {key: rate for key, rate in rates.items() if isinstance(rate, (int, float))}
    return [{key: float(f"{factor * rate:.4g}") for key, rate in numbers.items()} for factor in sweep.control_rates]


def _built_in(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """What makes a control one, for the values of its base."""
    if name == FROZEN:
        return {"model.freeze_tables": True, "privacy.mechanism": {"name": "dpsgd"}}
    if name != NON_PRIVATE:
        return {}
    optimizer = values.get("optimizer")
    optimizer = optimizer if isinstance(optimizer, Mapping) else {}
    optimizer = optimizer.get("tables") or optimizer  # what moves the tables
    options = optimizer.get("options") or {}
    # Without noise, EANA is plain row-sparse training. Where an optimizer needs dense gradients, DP-SGD gives the same.
    rows = optimizer.get("name") in ("SGD", "Adagrad", "RowWiseAdagrad", "SparseAdam") and not options.get(
        "weight_decay"
    )
    return {
        "privacy.target_epsilon": None,
        "privacy.noise_multiplier": 0,
        "privacy.noise_on_mean": None,
        "privacy.max_grad_norm": 1e9,  # never clips
        "privacy.clipping": "flat",
        "privacy.mechanism": {"name": "eana" if rows else "dpsgd"},
    }


def _check(runs: list[SweepRun]) -> None:
    """What can be known to fail without reading the data."""
    ids: set[str] = set()
    for run in runs:
        if run.id in ids:
            raise ConfigError(f"two runs have the name {run.id}: a value stands twice in over or in a grid")
        ids.add(run.id)
    checked = set()
    for run in runs:
        config = run.config
        if not getattr(config.data, "held_out", True):
            raise ConfigError(
                f"{run.id}: data.held_out is {getattr(config.data, 'held_out', None)}; a sweep compares utility on held-out data"
            )
        keys = ("data", "model", "loss", "optimizer", "privacy")
        parts = json.dumps([config.to_dict()[key] for key in keys], default=str)
        if parts in checked:
            continue
        checked.add(parts)
        try:
            config.optimizer.require_settings()
            config.make_loss()
            config.make_mechanism()
            for key, address in config.addresses().items():
                config.code.find(address, key)
        except ConfigError as error:
            raise ConfigError(f"{run.id}: {error}") from None


def _check_changes(changes: Mapping[str, Any], where: str) -> None:
    for key in changes:
        if not all(key.split(".")):
            raise SchemaError(where, f"expected full keys such as training.epochs; got {key!r}")
        if any(covers(key, other) for other in _SET_BY_SEEDS):
            raise SchemaError(f"{where}.{key}", "the sweep's seeds and names decide it; leave it out")


def _check_axes(axes: Mapping[str, Any], where: str) -> None:
    _check_changes(axes, where)
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            raise SchemaError(f"{where}.{key}", f"expected a list of at least one value; got {values!r}")
        if any(value in values[:i] for i, value in enumerate(values)):
            raise SchemaError(f"{where}.{key}", f"a value stands here twice: {values}")
    for key, other in itertools.permutations(axes, 2):
        if covers(key, other):
            raise SchemaError(f"{where}.{key}", f"overlaps with {other}")


def _refuse_ignored(key: str, sweep: Sweep, groups: Mapping[str, Group]) -> None:
    """A change from the command line that some part of the sweep would overwrite."""
    parts = {"over": sweep.over}
    for name, group in groups.items():
        parts[f"{sweep.section(name)}.{name}.set"] = group.set
        parts[f"{sweep.section(name)}.{name}.grid"] = group.grid
    for where, changes in parts.items():
        for other in changes:
            if covers(other, key):
                raise ConfigError(f"--set {key}: {where} of the sweep sets {other}; change it there")
    if any(covers(other, key) or covers(key, other) for other in _SET_BY_SEEDS):
        raise ConfigError(f"--set {key}: the sweep's seeds and names decide it")


def _combinations(axes: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values))


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last part of each key, or all of it where two keys share their last part."""
    leaves = {key: key.rpartition(".")[2] for key in keys}
    shared = [leaf for leaf in leaves.values() if list(leaves.values()).count(leaf) > 1]
    return {key: key if leaf in shared else leaf for key, leaf in leaves.items()}


def _run_id(group: str, settings: Mapping[str, Any], seed: int, names: Mapping[str, str]) -> str:
    """A name that says what the run is, and that any file system takes."""
    parts = [group, *(f"{names[key]}={describe(value)}" for key, value in settings.items()), f"seed={seed}"]
    id = re.sub(r"[^A-Za-z0-9._=,+-]", "_", ",".join(parts))
    if len(id) > _LONGEST_ID or id.startswith("."):
        everything = json.dumps([group, dict(settings), seed], sort_keys=True, default=str)
        return f"{id[: _LONGEST_ID - 10].lstrip('.')}-{hashlib.sha256(everything.encode()).hexdigest()[:9]}"
    return id


def describe(value: Any) -> str:
    """A setting's value in a few characters."""
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, Mapping):
        return "{" + " ".join(f"{key}={describe(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + " ".join(map(describe, value)) + "]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
