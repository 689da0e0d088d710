"""What the performance budget asks for, beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from benchmarks.speed.markdown import markdown_table, number

Results = Mapping[str, Mapping[str, Any]]
Ratios = Iterable[tuple[str, float]]  # where, and the ratio of best times there


class Line(NamedTuple):
    what: str
    most: float | None  # None: there is a least instead
    least: float | None
    find: Callable[[Results], Ratios]

    @property
    def asked(self) -> str:
        return f"at most {self.most:g}" if self.most is not None else f"at least {self.least:g}"

    def met(self, value: float) -> bool:
        return value <= self.most if self.most is not None else self.least is not None and value >= self.least


def _rows(results: Results, part: str) -> list[Mapping[str, Any]]:
    return results.get(part, {}).get("rows", [])


def _against_plain(results: Results) -> Ratios:
    for row in _rows(results, "step"):
        if row["mechanism"] in ("adafest", "eana") and row["model"] == "pctr":
            yield f"pCTR {row['mechanism']}", row["ratio"]["best"]
    for row in _rows(results, "bound"):
        if row["variant"] == "lazydp" and row["workload"] == "pctr":
            yield "pCTR lazydp", row["ratio_to_plain"]["best"]
    for row in _rows(results, "lazydp"):
        if row["base"] and row["variant"] in ("lazydp", "adafest", "eana"):
            yield f"DLRM {row['variant']}", row["ratio_to_sgd"]["best"]


def _light(results: Results) -> Ratios:
    for row in _rows(results, "dual"):
        if row["base"] and row["variant"] in ("lazydp", "adafest", "eana"):
            yield f"dual encoder {row['variant']}", row["ratio_to_sgd"]["best"]
    for row in _rows(results, "peers"):
        if row["variant"] in ("lazydp", "adafest", "eana"):
            yield f"the peers' model {row['variant']}, {row['rows']:,} rows", row["ratio_to_plain"]["best"]


def _epochs(results: Results) -> Ratios:
    for row in _rows(results, "epoch"):
        if row["variant"] != "plain":
            threads = f"{row['threads']} thread{'s'[: row['threads'] > 1]}"
            yield f"two towers {row['variant']}, {threads}", row["ratio_to_plain"]["best"]


def _against_own(results: Results) -> Ratios:
    for row in _rows(results, "bound"):
        if row["variant"] in ("lazydp", "adafest", "eana") and row["ratio_to_tuned"] is not None:
            yield f"{row['title']} {row['variant']}", row["ratio_to_tuned"]["best"]
    for row in _rows(results, "tied"):
        if row["base"] and row["variant"] == "softmax" and "ratio_to_chunked" in row:
            yield "tied, table_softmax_loss", row["ratio_to_chunked"]["best"]


def _over_rows(results: Results) -> Ratios:
    rows = _rows(results, "vocabulary")
    sizes = sorted({row["rows"] for row in rows})
    for variant in ("adafest", "eana"):
        times = {row["rows"]: row["best"] for row in rows if row["variant"] == variant}
        if len(times) > 1:
            yield f"{variant}, {sizes[-1]:,} / {sizes[0]:,} rows", times[sizes[-1]] / times[sizes[0]]


def _dense_over_sparse(results: Results) -> Ratios:
    rows = [row for row in _rows(results, "vocabulary") if row["variant"] == "adafest"]
    if rows:
        last = max(rows, key=lambda row: row["rows"])
        yield f"{last['rows']:,} rows", last["dpsgd_over_this"]["best"]


def _tied(results: Results) -> Ratios:
    for row in _rows(results, "tied"):
        if "length" in row["varied"] and row["variant"] in ("logits", "softmax"):
            loss = {"logits": "full logits", "softmax": "table_softmax_loss"}[row["variant"]]
            yield f"{loss}, length {row['setting']['length']}", row["ratio_to_plain"]["best"]


def _lazy_over_eana(results: Results) -> Ratios:
    for row in _rows(results, "lazydp"):
        if row["base"] and row["variant"] == "lazydp" and "ratio_to_eana" in row:
            yield "DLRM", row["ratio_to_eana"]["best"]


def _memory(results: Results) -> Ratios:
    rows = [row for row in _rows(results, "vocabulary") if "memory" in row]
    largest = max((row["rows"] for row in rows), default=0)
    for row in rows:
        if row["rows"] == largest and row["variant"] in ("adafest", "eana"):
            yield f"{row['variant']}, {largest:,} rows", row["memory"] / (4 * results["vocabulary"]["dim"] * largest)


def _sharded(results: Results, ratio: Callable[[Mapping[str, Any]], float | None]) -> Ratios:
    for row in _rows(results, "distributed"):
        setting, value = row["setting"], ratio(row)
        if row["variant"] != "plain" and setting["ids"] == 1 and value is not None:
            yield f"{setting['model']} {setting['sharding']} {row['variant']}", value


def _language(results: Results, way: str) -> Ratios:
    for row in _rows(results, "language"):
        if row["way"] == way and row["variant"] in ("dpsgd", "adafest"):
            yield f"{row['model']} {row['variant']}", row["ratio_to_plain"]["best"]


def _language_table(results: Results) -> Ratios:
    tables = results.get("language", {}).get("tables", [])
    most = max((row["rows"] for row in tables), default=0)
    for row in tables:
        if row["rows"] == most and row["variant"] == "adafest":
            yield f"adafest, {most:,} / {min(other['rows'] for other in tables):,} rows", row["ratio_to_fewest"]["best"]


def _language_memory(results: Results) -> Ratios:
    for row in _rows(results, "language"):
        if row["variant"] in ("dpsgd", "adafest") and "memory_ratio" in row:
            yield f"{row['model']}, {row['way']}, {row['variant']}", row["memory_ratio"]


LINES = (
    Line("private step / plain PyTorch, pCTR and DLRM", 1.05, None, _against_plain),
    Line("private step / plain PyTorch, light models", 1.5, None, _light),
    Line("whole epoch, private / plain PyTorch with its DataLoader", 0.5, None, _epochs),
    Line("private step / the same without privacy on our code", 1.25, None, _against_own),
    Line("step at most rows / step at fewest, one table", 1.1, None, _over_rows),
    Line("dense DP-SGD / AdaFEST, one table, most rows", None, 400.0, _dense_over_sparse),
    Line("tied sequence model, private / not", 1.25, None, _tied),
    Line("language models with LoRA, private / plain", 1.35, None, lambda results: _language(results, "lora")),
    Line("language models in full, private / plain", 1.5, None, lambda results: _language(results, "full")),
    Line("language models' table, most words / fewest", 1.1, None, _language_table),
    Line("language models, peak memory, private / plain", 1.3, None, _language_memory),
    Line("LazyDP / EANA", 1.1, None, _lazy_over_eana),
    Line(
        "sharded, private / TorchRec, one id a feature",
        1.25,
        None,
        lambda results: _sharded(results, lambda row: row["ratio_to_plain"]["best"]),
    ),
    Line(
        "sharded, bytes sent, private / TorchRec",
        1.1,
        None,
        lambda results: _sharded(results, lambda row: row["bytes_ratio_to_plain"]),
    ),
    Line("peak memory beyond the table, share of it", 0.02, None, _memory),
)


def page(results: Results) -> str:
    """Every place that the budget is measured at; "" if there is none."""
    lines = [
        [line.what, where, line.asked, number(value), "yes" if line.met(value) else "no"]
        for line in LINES
        for where, value in line.find(results)
    ]
    if not lines:
        return ""
    table = markdown_table(("what", "where", "budget", "measured", "met"), lines)
    why = _WHY if any(line[-1] == "no" for line in lines) else ""
    note = _quick_note(results)
    return "\n\n".join(filter(None, ["# The budget", note, f"{table}{why}"]))


def section(results: Results) -> str:
    """One line for each number of the budget, over all of its places; "" if none was measured."""
    lines = []
    for line in LINES:
        values = [value for _, value in line.find(results)]
        if values:
            measured = number(min(values))
            if number(max(values)) != measured:
                measured += f" to {number(max(values))}"
            met = sum(map(line.met, values))
            answer = "yes" if met == len(values) else "no" if not met else f"{met} of {len(values)}"
            lines.append([line.what, line.asked, measured, answer])
    if not lines:
        return ""
    table = markdown_table(("what", "budget", "measured", "met"), lines)
    behind = "[The budget](budget.md), place by place, and why what is not met is not."
    return f"{table}\n\n{' '.join(filter(None, [behind, _quick_note(results)]))}"


def _quick_note(results: Results) -> str:
    quick = any(result.get("command", "").endswith("--quick") for result in results.values())
    return "Parts were run with `--quick`, at sizes for which the budget is not meant." if quick else ""


_WHY = """

What is not met, and why. A private step has a plain one's matrix products, which are most of it, so it cannot be faster by
more than what plain PyTorch wastes on sparse gradients. In [What a step has to take](bound.md), every stage stands beside the
least that this machine could take for it, and beside plain PyTorch's: norms read all activations and gradients once more, the
distinct rows have to be found, and Python takes its time for each operation that is captured and each table that is settled,
26 times in a step of pCTR or DLRM. AdaFEST's step on one table, beside dense DP-SGD's, is nearly all Python and calls of torch:
its largest tensors have a quarter of a megabyte.

A whole epoch of two towers: [batches](epoch.md) are a tenth of it or less, the rest are steps of a light model.

Sharded steps of the light model: TorchRec's take 7 to 13 ms, with 6 messages. A private one has 11 to 15, as rows are selected,
summed and agreed upon by all ranks after the backward pass, and each waits for the slowest rank
([where the time goes](distributed.md)).

Memory of language models that are trained in full meets its limit with little to spare: until the clip factors are known, a
private step keeps the input and the gradient of the output of every layer, which autograd frees layer by layer, and the
allocator does not give all that is free back to the system between forward, backward and step. `max_physical_batch` lets a part
of the batch at a time need this room."""
