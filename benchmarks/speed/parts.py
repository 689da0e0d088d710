"""The parts of the benchmark, in the order in which they run and are shown, and where to find what each of them has."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

PARTS = {
    "step": "a private step against a plain PyTorch one, with a breakdown by stage",
    "epoch": "a whole epoch, batches included, against plain PyTorch's with a DataLoader",
    "vocabulary": "one table of 10^5 to 10^7 rows under every mechanism (DP-AdaFEST's Table 4)",
    "lazydp": "DLRM under SGD, DP-SGD(B, R, F), LazyDP, EANA and AdaFEST (LazyDP's figures 10, 11, 13 and 14)",
    "tied": "a Transformer with tied item tables, private and not (DPFormer's figure 3)",
    "language": "MiniLM and MPNet with LoRA or in full, and vocabularies of 262,144 words, private and not",
    "dual": "a dual encoder under SGD, DP-SGD, EANA, LazyDP and AdaFEST (EANA's Table 3)",
    "bound": "the stages of plain and private steps against the least that they could take on this machine",
    "growth": "how a step's time grows with batch, tables, dim, rows and length, as fitted exponents",
    "peers": "SparseDP beside FBGEMM, Opacus, JAX Privacy and TF-Privacy on one table of 10^4 to 10^7 rows",
    "distributed": "private steps with TorchRec's sharded tables against TorchRec's own, in two processes, and what they send",
    "memory": "a table of half of the machine's memory, trained, settled, saved and loaded",
    "noise": "normal numbers from ChaCha8 against torch's own",
}


def options_of(part: str) -> ModuleType:
    """Its command: `add_arguments(parser)`, `measure(args)` and `show(console, result)`."""
    return import_module(f"benchmarks.speed.{part}.options")


def page_of(part: str) -> ModuleType:
    """`page(result, plots)`: its result in Markdown."""
    return import_module(f"benchmarks.speed.{part}.page")


def plots_of(part: str) -> ModuleType:
    """`write_plots(result, folder)`, which returns the files' names. Loads matplotlib."""
    return import_module(f"benchmarks.speed.{part}.plots")
