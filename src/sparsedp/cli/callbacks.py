"""The callbacks that a configuration names: made for a run, and told what is written into its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparsedp.callbacks import PRIVATE, PUBLIC, call, finite_values, require_callback
from sparsedp.cli.config.config import Config
from sparsedp.cli.progress import Reporter
from sparsedp.errors import ConfigError, one_line

_PUBLIC = {"lr", "table_lr", "epsilon", "span", "validation"}  # of the values of a row of metrics.jsonl


class Callbacks:
    """A callback that fails is named and not called again: the training, whose budget is spent, goes on."""

    def __init__(self, config: Config, run_dir: Path, reporter: Reporter) -> None:
        self._reporter = reporter
        self._config, self._run_dir = config, run_dir
        self._callbacks: dict[str, Any] = {}
        self._rows: list[dict[str, Any]] = []  # that were written and not told yet
        self._losses: list[float] = []  # of the logged steps of this epoch
        self._latest: dict[str, float] = {}

    def begin(self) -> None:
        for i, name in enumerate(self._config.callbacks):
            self._callbacks[name] = _make(name, f"callbacks[{i}]", self._config, self._run_dir)

    def note(self, row: dict[str, Any]) -> None:
        """A row of metrics.jsonl. It is told later: this may be called while signals are held back."""
        if self._callbacks and row["kind"] in ("step", "evaluation", "validation"):
            self._rows.append(row)

    def tell_steps(self, epsilon: float) -> None:
        rows, self._rows = self._rows, []
        for row in rows:
            values = values_of_row({"epsilon": epsilon, **row})
            if "private/loss" in values and row["kind"] == "step":
                self._losses.append(values["private/loss"])
            self._latest |= values
            self._call("on_step", row["step"], values)

    def tell_epoch(self, epoch: int) -> None:
        mean = {"private/loss": sum(self._losses) / len(self._losses)} if self._losses else {}
        self._losses = []
        kept = {name: v for name, v in self._latest.items() if name == "public/epsilon" or "held_out/" in name}
        self._call("on_epoch", epoch, kept | mean)

    def tell_end(self, values: dict[str, float]) -> None:
        self._call("on_end", {**self._latest, **values})

    def _call(self, method: str, *arguments: Any) -> None:
        for name, callback in list(self._callbacks.items()):
            try:
                call(callback, method, *arguments)
            except Exception as error:
                del self._callbacks[name]
                self._reporter.alert(
                    f"The callback {name} failed in {method}, and is not called again: {one_line(error)}"
                )


def values_of_row(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a row of metrics.jsonl by their names for callbacks."""
    held_out = "held_out/" if row["kind"] == "evaluation" else ""
    values: dict[str, Any] = {}
    for key, value in row.items():
        if key == "tables":
            for table, counts in value.items():
                values |= {f"{PRIVATE}tables/{table}/{name}": count for name, count in counts.items()}
        elif key == "periods":
            for period, metrics in value.items():
                values |= {f"{PRIVATE}held_out/period {period}/{name}": number for name, number in metrics.items()}
        elif key not in ("kind", "step", "period"):
            of_period = f"period {row['period']}/" if "period" in row else ""
            values[PUBLIC + key if key in _PUBLIC else PRIVATE + held_out + of_period + key] = value
    return finite_values(values)


def _make(name: str, key: str, config: Config, run_dir: Path) -> Any:
    if name == "tensorboard":
        from sparsedp.integrations.tensorboard import TensorBoard

        return TensorBoard(run_dir / "private" / "tensorboard")
    made = config.code.find(name, key)(config.to_dict(), run_dir)
    try:
        return require_callback(made)
    except TypeError as error:
        raise ConfigError(f"{key}: {name}: {error}") from error
