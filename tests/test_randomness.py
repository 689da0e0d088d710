"""Everything random on a private path comes from the stream cipher: in the code, and in whole runs of every mechanism.

numpy's and torch's generators can be run backwards from a few outputs. With them, two released counts of rows that an attacker
knew were enough to subtract the noise of all others.
"""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

import sparsedp
from sparsedp import DPSGD, EANA, FEST, AdaFEST, ExponentialSelection, FrequencyRelease, LazyDP, Stream
from sparsedp.grid import grid_of
from sparsedp.mechanisms import Mechanism
from sparsedp.nn import CandidateSampler
from sparsedp.noise import RandomKey
from sparsedp.sampling import PrivateLoader
from sparsedp.sampling.workers import torch_generator
from support import Clicks, clicks, make_private

SOURCE = Path(sparsedp.__file__).parent

# ---------------------------------------------------------------------- in the code

# Functions, methods and classes of numpy, torch and Python that draw random numbers, or make what draws them.
DRAWS = {
    "default_rng", "RandomState", "SeedSequence", "MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64", "Generator", "rand",
    "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli", "multinomial",
    "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_", "kaiming_normal_",
    "kaiming_uniform_", "xavier_normal_", "xavier_uniform_", "trunc_normal_", "orthogonal_", "sparse_", "manual_seed",
}  # fmt: skip
# What may be there all the same, and why: file or folder, the names, the reason.
ALLOWED: list[tuple[str, set[str], str]] = [
    ("data/generated.py", {"np.random"}, "public data, made up"),
    ("data/generatedsequences.py", {"np.random"}, "public data, made up"),
    ("data/generatedtimelines.py", {"np.random"}, "public data, made up"),
    (
        "data/table.py",
        {"np.random"},
        "which rows are held out, under the user's seed, before anything private begins",
    ),
    ("cli/validation.py", {"np.random"}, "the halves of the held-out data, by their places alone"),
    ("cli/evaluation.py", {"Generator"}, "a loader in the data's order draws nothing that is used"),
    ("cli/looks.py", {"Generator"}, "a loader in the data's order draws nothing that is used"),
    ("cli/configs/", set(), "an example's data, made up, and its initial weights"),
    (
        "cli/model_files.py",
        {"Generator", "manual_seed", "rand", "randint"},
        "made-up inputs that an exported model is tried on",
    ),
    ("cli/prepare.py", {"manual_seed"}, "initial weights"),
    (
        "distributed/on_disk.py",
        {"rand", "randn", "randint", "rand_like", "randn_like"},
        "names of functions, not called",
    ),
    ("models/", {"normal_", "uniform_", "xavier_uniform_"}, "initial weights"),
    ("nn/recurrent.py", {"uniform_"}, "initial weights"),
    ("nn/candidates.py", {"Generator", "rand"}, "a generator that the user gives, for tests"),
    ("capture/global_generators.py", {"np.random", "random"}, "looks whether a forward pass used the global ones"),
    ("convex/estimators.py", {"randint"}, "a seed of scikit-learn's random_state, for tests: the statement says so"),
    ("explain.py", {"np.random", "random"}, "puts the global ones back to where they were"),
    ("sampling/workers.py", {"Generator", "np.random", "random"}, "what data sets draw, under states from the cipher"),
]


def draws_in(source: str) -> set[str]:
    """The names of what draws random numbers in some code; `random` stands for Python's module, `np.random` for numpy's."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules = {alias.name for alias in node.names}
            found |= modules & {"random"} | {"np.random" for name in modules if name.startswith("numpy.random")}
        elif isinstance(node, ast.ImportFrom):
            module, names = node.module or "", {alias.name for alias in node.names}
            found |= {module} & {"random"} | (names & DRAWS if module.startswith("torch") else set())
            if module.startswith("numpy.random") or (module == "numpy" and "random" in names):
                found.add("np.random")
        elif isinstance(node, ast.Attribute):
            if _is(node, "random", "np", "numpy"):
                found.add("np.random")
            elif (node.attr in DRAWS and not _is(node.value, "random", "np", "numpy")) or _is(node, "poisson", "torch"):
                found.add(node.attr)
    return found


def _is(node: ast.AST, attribute: str, *names: str) -> bool:
    """Whether it is that attribute of something with one of these names."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr == attribute
        and isinstance(node.value, ast.Name)
        and node.value.id in names
    )


@pytest.mark.parametrize(
    "source",
    [
        "import numpy as np\ndef f(): return np.random.default_rng(0).normal()",
        "import numpy\nnumpy.random.rand(3)",
        "from numpy.random import Generator, SFC64",
        "from numpy import random",
        "import numpy.random as anything",
        "import random",
        "from random import shuffle",
        "import torch\nx = torch.randn(3)",
        "from torch import rand",
        "def f(x): return x.exponential_()",
        "import torch as t\ng = t.Generator(device='cpu')",
        "import torch\ntorch.nn.init.normal_(w)",
        "def f(tensor): tensor.view(-1).normal_(0, 1)",
        "import torch\ntorch.distributions.Gumbel(0, 1); torch.manual_seed(3)",
    ],
)
def test_the_search_finds_generators(source: str) -> None:
    assert draws_in(source)


def test_the_search_passes_the_cipher() -> None:
    assert not draws_in(
        "g = key.generator(0)\ng.standard_normal(3) + g.gumbel(3) + g.random(3)\nnp.sort(g.choice(3, 2))"
    )


def test_no_other_generator_is_in_the_code() -> None:
    """Each exception has a reason, and is needed."""
    needed = set()
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        for found in draws_in(path.read_text()):
            places = [place for place, names, _ in ALLOWED if name.startswith(place) and (not names or found in names)]
            assert places, (
                f"{name} draws with {found!r}: draw from RandomKey.generator, or say here why it protects nobody"
            )
            needed.add((places[0], found))
    for place, names, _ in ALLOWED:
        for found in names or {"Generator"}:
            assert (place, found) in needed, f"{place} does not draw with {found!r} any more: drop the exception"


# ---------------------------------------------------------------------- in runs

NUMPY = [
    "Generator", "default_rng", "RandomState", "SeedSequence", "MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64", "beta", "binomial", "bytes", "chisquare", "choice", "exponential", "gamma", "geometric", "gumbel", "laplace",
    "multinomial", "normal", "permutation", "poisson", "rand", "randint", "randn", "random", "random_sample", "shuffle",
    "standard_exponential", "standard_normal", "uniform",
]  # fmt: skip
TORCH = ["rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli",
         "multinomial", "poisson", "dropout"]  # fmt: skip
TENSOR = ["normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_",
          "bernoulli", "multinomial"]  # fmt: skip
PYTHON = ["random", "randint", "randrange", "choice", "choices", "shuffle", "sample", "uniform", "gauss", "normalvariate",
          "expovariate", "betavariate", "getrandbits", "Random"]  # fmt: skip
# Where generators with states from the cipher are made, and where torch draws from them the seed of a loader's workers.
EXCEPTIONS = ("sparsedp/sampling/workers.py", "torch/utils/data/dataloader.py", "torch/utils/data/_utils/worker.py")


class Forbidden(AssertionError):
    pass


@pytest.fixture
def forbidden(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A function from whose call on all generators but the cipher raise."""

    def forbid(owner: Any, name: str, label: str) -> None:
        real = getattr(owner, name)

        def raises(*args: Any, **options: Any) -> Any:
            caller = sys._getframe(1).f_code.co_filename
            from_cipher = not caller.endswith("dataloader.py") or options.get("generator") is not None
            if caller.endswith(EXCEPTIONS) and from_cipher:
                return real(*args, **options)
            raise Forbidden(f"{label}.{name} was called by {caller}")

        monkeypatch.setattr(owner, name, raises)

    def begin() -> None:
        for owner, names, label in (
            (np.random, NUMPY, "np.random"), (torch, [*TORCH, "Generator"], "torch"), (torch.Tensor, TENSOR, "Tensor"),
            (random, PYTHON, "random"), (nn.functional, ["dropout"], "functional"),
        ):  # fmt: skip
            for name in names:
                forbid(owner, name, label)

    yield begin
    monkeypatch.undo()


MECHANISMS: dict[str, Callable[[], Mechanism]] = {
    "dpsgd": DPSGD,
    "lazydp": LazyDP,
    "lazydp one by one": lambda: LazyDP(aggregate=False),
    "eana": EANA,
    "fest": lambda: FEST(k=20, epsilon=1.0),
    "fest gumbel": lambda: FEST(k=20, epsilon=1.0, method="gumbel", split="tables"),
    "adafest": lambda: AdaFEST(threshold=1.0),
    "adafest+": lambda: AdaFEST(threshold=1.0, preselect=FEST(k=20, epsilon=1.0)),
    "exponential": lambda: ExponentialSelection(k=10),
}


def train(run: tuple, epochs: int = 1) -> None:
    _, module, optimizer, loader = run
    for _ in range(epochs):
        for ids, x, y in loader:
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(module(ids, x), y).backward()
            optimizer.step()


def whole_run(start: Callable[[], tuple], folder: Path, begin: Callable[[], None]) -> tuple:
    """A run of two epochs that is saved, and resumed in another engine; nothing but the cipher draws."""
    first, second = start(), start()
    begin()
    first[0].prepare()
    train(first)
    first[0].save_checkpoint(folder / "checkpoint.pt")
    second[0].load_checkpoint(folder / "checkpoint.pt")
    train(second)
    second[1].state_dict()
    assert second[0].ledger.steps == 2 * len(second[3])
    return second


@pytest.mark.parametrize("unit", ["example", "user"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_whole_run_draws_from_the_cipher_alone(
    mechanism: str, unit: str, tmp_path: Path, forbidden: Callable[[], None]
) -> None:
    data = DataLoader(TensorDataset(*clicks(60)), batch_size=10)
    users = {"users": np.arange(60) // 3, "max_examples_per_user": 2} if unit == "user" else {}

    def start() -> tuple:
        return make_private(Clicks(), data, seed=None, mechanism=MECHANISMS[mechanism](), unit=unit, **users)

    whole_run(start, tmp_path, forbidden)


@pytest.mark.parametrize("frequencies", ["all", "first", "running"])
def test_a_stream_draws_from_the_cipher_alone(frequencies: Any, tmp_path: Path, forbidden: Callable[[], None]) -> None:
    data = DataLoader(TensorDataset(*clicks(60)), batch_size=10)
    selection = FEST(k=20, epsilon=1.0, frequencies=frequencies)

    def start() -> tuple:
        return make_private(
            Clicks(), data, seed=None, mechanism=AdaFEST(threshold=1.0, preselect=selection),
            stream=Stream(np.arange(60) // 20, "sequential"),
        )  # fmt: skip

    whole_run(start, tmp_path, forbidden)


def test_other_paths_draw_from_the_cipher_alone(tmp_path: Path, forbidden: Callable[[], None]) -> None:
    """Workers, shuffled batches, released frequencies, candidates, statistics ahead of training."""
    data = DataLoader(TensorDataset(*clicks(60)), batch_size=10, shuffle=True, num_workers=1)

    def start() -> tuple:
        return make_private(
            Clicks(), data, seed=None, poisson_sampling=False, frequencies=FrequencyRelease(epsilon=1.0)
        )

    engine = whole_run(start, tmp_path, forbidden)[0]
    engine.release_frequencies()
    engine.touch_statistics()
    CandidateSampler(1000, 5)(torch.zeros(4, dtype=torch.long))


class Careless(DPSGD):
    """A mechanism that draws with numpy, as somebody might write one."""

    name = "careless"
    selects = True

    def select(self, batch: Any, step: Any) -> Any:
        return {name: torch.from_numpy(np.random.default_rng(0).permutation(3)) for name in step.tables}


def test_a_run_with_another_generator_is_caught(forbidden: Callable[[], None]) -> None:
    run = make_private(Clicks(), DataLoader(TensorDataset(*clicks(20)), batch_size=10), mechanism=Careless())
    forbidden()
    with pytest.raises(Forbidden, match=r"np.random.default_rng was called by .*test_randomness"):
        train(run)
    for draw in (lambda: torch.randn(2), lambda: torch.empty(2).normal_(), lambda: random.random(), torch.Generator):
        with pytest.raises(Forbidden):
            draw()


# ---------------------------------------------------------------------- released numbers lie on a grid


def distance(values: torch.Tensor, grid: float) -> float:
    scaled = values.double() / grid
    return float((scaled - scaled.round()).abs().max())


def test_released_frequencies_lie_on_the_grid(tmp_path: Path) -> None:
    release = FrequencyRelease(epsilon=0.5, clip=2.0)
    engine, _, _, _ = make_private(
        Clicks(rows=500), DataLoader(TensorDataset(*clicks(60, rows=500)), batch_size=10), seed=None, frequencies=release
    )  # fmt: skip
    shares = engine.release_frequencies()["table.weight"]
    std = release.noise_multiplier * 2.0
    multiples = (shares * 60 / grid_of(std)).round()
    assert torch.equal(multiples * grid_of(std) / 60, shares)  # rounded before it is divided
    assert len(multiples.unique()) > 400 and float(multiples.abs().max()) > 500
    assert (shares * 60).std() == pytest.approx(std, rel=0.2)  # counts differ much less than their noise
    engine.save_checkpoint(tmp_path / "checkpoint.pt")
    memory = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["prepared"]["released"]
    assert torch.equal(memory["table.weight"], shares)


def test_running_sums_of_a_checkpoint_lie_on_the_grid(tmp_path: Path) -> None:
    """One span's units may count for less than one, when they count for all spans: rounding comes after that, too."""
    selection = FEST(k=20, epsilon=0.7, count_clip=0.3, frequencies="running")
    run = make_private(
        Clicks(rows=500), DataLoader(TensorDataset(*clicks(60, rows=500)), batch_size=10), seed=None,
        mechanism=selection, stream=Stream(np.arange(60) // 20, "sequential"),
    )  # fmt: skip
    std = selection.setup_event().noise_multiplier * 0.3  # type: ignore[union-attr]
    train(run)
    assert len(run[2].preparation.state.scopes) == 3
    run[0].save_checkpoint(tmp_path / "checkpoint.pt")
    sums = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["prepared"]["released"]["table.weight"]
    assert (
        sums.dtype == torch.float64 and distance(sums, grid_of(std)) == 0 and distance(sums, 7 / 3 * grid_of(std)) > 0
    )
    assert sums.std() == pytest.approx(3**0.5 * std, rel=0.2)


# ---------------------------------------------------------------------- what data sets draw


class Augmented(Dataset):
    """Each example is its index, with what three generators and torch's seed for workers say."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[int, float, float, float, float]:
        worker = get_worker_info()
        return index, float(torch.rand(())), float(np.random.rand()), random.random(), worker.seed if worker else 0.5


def augmented(key: RandomKey, workers: int = 0, **options: Any) -> Any:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    return PrivateLoader(DataLoader(Augmented(), batch_size=8, num_workers=workers, **options), key=key)


def columns(loader: Any) -> np.ndarray:
    """What one pass yields, (5, examples)."""
    return np.concatenate([np.stack([column.double().numpy() for column in batch]) for batch in loader], 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_public_seeds_do_not_decide_what_data_sets_draw(workers: int) -> None:
    public = torch.Generator().manual_seed(0)
    one, two = (columns(augmented(RandomKey.from_os(), workers, generator=public.clone_state())) for _ in range(2))
    for mine, other in zip(one[1:4], two[1:4]):
        assert len(set(mine)) == len(mine) and not set(mine) & set(other)
    if workers:
        assert not set(one[4]) & set(two[4])
    loader = augmented(RandomKey.from_seed(0), workers)
    first, second = columns(loader), columns(loader)
    assert not set(first[1]) & set(second[1])  # each pass anew
    assert np.array_equal(columns(augmented(RandomKey.from_seed(0), workers)), first)  # and for tests, the same


def test_all_of_a_torch_generators_state_comes_from_the_key() -> None:
    """torch keeps only 32 bits of a seed; two keys that agree in a 32-bit seed must still differ everywhere."""
    made = [torch_generator(RandomKey.from_seed(seed).generator()) for seed in (1, 2)]
    one, two = (generator.get_state().numpy()[24 : 24 + 8 * 624].view(np.uint64) for generator in made)
    assert (one != two).mean() > 0.99 and len(np.unique(one)) > 600
    # What a user's worker_init_fn may seed other generators with.
    assert made[0].initial_seed() != made[1].initial_seed() and max(g.initial_seed() for g in made) > 2**32


def test_states_from_the_cipher_make_good_torch_generators() -> None:
    generator = torch_generator(RandomKey.from_seed(0).generator())
    drawn = torch.randn(100_000, generator=generator)
    assert abs(float(drawn.mean())) < 0.02 and abs(float(drawn.std()) - 1) < 0.02
    assert len(torch.randint(1 << 60, (1000,), generator=generator).unique()) == 1000


@pytest.mark.parametrize("workers", [0, 1])
def test_the_users_generators_go_on_as_if_nothing_had_been(workers: int) -> None:
    loader = augmented(RandomKey.from_os(), workers)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    columns(loader)
    next(iter(loader.counting(Augmented(), batch_size=7)))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1] and np.random.get_state()[1].tolist() == before[2]


@pytest.mark.parametrize("limit", [None, 3])
def test_a_resumed_pass_draws_the_same(limit: int | None) -> None:
    """For runs with a seed; without one the key is new and so is everything."""
    whole = [tuple(map(torch.Tensor.tolist, batch)) for batch in _limited(limit)]
    loader, seen = _limited(limit), []
    for batch in loader:
        seen.append(tuple(map(torch.Tensor.tolist, batch)))
        if loader.current.last and loader.current.step == 2:
            break
    state, resumed = loader.state_dict(), _limited(limit)
    resumed.load_state_dict(state)
    assert seen + [tuple(map(torch.Tensor.tolist, batch)) for batch in resumed] == whole


def _limited(limit: int | None) -> Any:
    return PrivateLoader(DataLoader(Augmented(), batch_size=8), key=RandomKey.from_seed(3), max_physical_batch=limit)


@pytest.mark.parametrize("workers", [0, 1])
def test_counts_of_the_data_have_secret_draws_too(workers: int) -> None:
    drawn = []
    for _ in range(2):
        loader = augmented(RandomKey.from_os(), workers)
        drawn.append(np.concatenate([batch[1].numpy() for batch in loader.counting(Augmented(), batch_size=7)]))
    assert len(drawn[0]) == 40 and not set(drawn[0]) & set(drawn[1])
    assert len(set(drawn[0])) >= 36


def _then(worker: int) -> None:
    random.seed(5)


def test_the_users_worker_init_fn_has_the_last_word() -> None:
    drawn = columns(augmented(RandomKey.from_os(), 1, worker_init_fn=_then))
    random.seed(5)
    assert drawn[3][0] == random.random()
