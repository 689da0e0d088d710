"""What a batch or forward() holds without an axis of units is the same for every batch, declared public, or refused by name."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset

import sparsedp
from sparsedp import SparseDPError, UnitsMixedError, UnsupportedError
from support import Apply, loader_of, make_private

ROWS, DIM, SIZE = 20, 4, 40
REFUSED = (UnsupportedError, UnitsMixedError)


class Texts(Dataset):
    """Ids of several lengths, and a label."""

    def __init__(self, size: int = SIZE, lengths: Callable[[int], int] = lambda i: 1 + i % 7) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = [torch.randint(1, ROWS, (lengths(i),), generator=generator) for i in range(size)]
        self.labels = torch.randint(2, (size,), generator=generator).float()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.ids[index], self.labels[index]


def padded(examples: list, length: int = 8) -> dict[str, Any]:
    ids = pad_sequence([F.pad(ids, (0, length - len(ids))) for ids, _ in examples], batch_first=True)
    return {"ids": ids, "label": torch.stack([label for _, label in examples])}


def texts(collate: Callable, data: Dataset | None = None, batch_size: int = 8, **options: Any) -> DataLoader:
    return DataLoader(data or Texts(), batch_size=batch_size, shuffle=True, collate_fn=collate, **options)


class Reader(nn.Module):
    """Mean of the embeddings of each text's own ids; whatever else it is given goes through `meet`."""

    def __init__(self, meet: Callable[..., Tensor] = lambda out, other: out) -> None:
        super().__init__()
        self.table, self.out, self.meet = nn.Embedding(ROWS, DIM, padding_idx=0), nn.Linear(DIM, 1), meet

    def forward(self, ids: Tensor, other: Any = None) -> Tensor:
        valid = (ids > 0)[..., None]
        pooled = (self.table(ids) * valid).sum(1) / valid.sum(1)
        return self.meet(self.out(pooled).squeeze(-1), other)


def bce(out: Tensor, label: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(out, label)


# ------------------------------------------------------------------ what collate_fn puts into a batch

Fields = namedtuple("Fields", "inputs other")


@dataclass
class Both:
    inputs: dict
    other: Any


class Attributes:
    def __init__(self, inputs: dict, other: Any) -> None:
        self.inputs, self.other = inputs, other


CONTAINERS: dict[str, tuple[Callable[[dict, Any], Any], str]] = {
    "dict": (lambda inputs, other: {**inputs, "other": other}, "batch['other']"),
    "tuple": (lambda inputs, other: (inputs["ids"], other, inputs["label"]), "batch[1]"),
    "list in a dict": (lambda inputs, other: {**inputs, "more": [inputs["ids"], other]}, "batch['more'][1]"),
    "named tuple": (Fields, "batch.other"),
    "dataclass": (Both, "batch.other"),
    "mapping": (lambda inputs, other: UserDict(inputs, other=other), "batch['other']"),
    "object": (Attributes, "batch.other"),
    "nested": (
        lambda inputs, other: (inputs, Both({}, (None, {"x": Attributes({}, other)}))),
        "batch[1].other[1]['x'].other",
    ),
}
# Each depends on who is in the batch: (ids, label) -> value.
DIVISORS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "number of valid tokens": lambda ids, label: (ids > 0).sum(),
    "the same as a Python number": lambda ids, label: int((ids > 0).sum()),
    "the same as a numpy number": lambda ids, label: np.int64((ids > 0).sum()),
    "the same as an array": lambda ids, label: np.asarray((ids > 0).sum()),
    "the same in a vector": lambda ids, label: (ids > 0).sum().reshape(1),
    "mean": lambda ids, label: ids.float().mean(),
    "batch maximum": lambda ids, label: float((ids > 0).sum(1).max()) + 0.1 * float(ids.sum()),
    "sum of weights, in half precision": lambda ids, label: ids.float().mean().to(torch.bfloat16),
    "frequencies of ids": lambda ids, label: torch.bincount(ids.flatten(), minlength=ROWS),
    "a mean of each column": lambda ids, label: ids.float().mean(0),
    "number of examples": lambda ids, label: len(ids),
    "number of examples, as a tensor": lambda ids, label: torch.tensor(len(ids)),
    "text": lambda ids, label: f"{int(ids.sum())} tokens",
    "something else at times": lambda ids, label: None if int(ids.sum()) % 2 else 1.0,
    "names": lambda ids, label: {int(i): 1 for i in ids[:, 0]},
}
CONSTANTS: dict[str, Any] = {
    "tensor": torch.tensor(0.5), "vector": torch.arange(8), "square": torch.ones(8, 8).tril(), "number": 3, "text": "clicks",
    "array": np.arange(3.0), "nothing": None, "not a number": float("nan"), "list": ["a", "b"],
}  # fmt: skip


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("divisor", DIVISORS)
def test_a_divisor_in_a_batch_is_refused_by_name(container: str, divisor: str) -> None:
    build, path = CONTAINERS[container]

    def collate(examples: list) -> Any:
        inputs = padded(examples)
        return build(inputs, DIVISORS[divisor](inputs["ids"], inputs["label"]))

    with pytest.raises(UnsupportedError) as caught:
        make_private(Reader(), texts(collate))
    assert f"collate_fn puts {path} into a batch" in str(caught.value)
    # Whoever says that it does not depend on the data may have it, and the statement tells so.
    engine, *_ = make_private(Reader(), texts(collate), public_inputs=(path,))
    assert path in str(engine.statement())


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("container", CONTAINERS)
def test_what_is_the_same_for_every_batch_passes(container: str, workers: int) -> None:
    build, path = CONTAINERS[container]
    for constant in CONSTANTS.values() if workers == 0 else [torch.tensor(0.5)]:
        collate = _With(build, constant)
        builds_empty = container not in ("object", "nested")  # what is not known cannot be built empty
        loader = make_private(Reader(), texts(collate, batch_size=1 if builds_empty else 20, num_workers=workers))[-1]
        kinds = set()
        for batch in loader:
            kinds.add(min(loader.current.units, 1))
            other = eval(path, {"batch": batch})  # as the error would name it
            assert type(other) is type(constant)
            np.testing.assert_equal(np.asarray(other), np.asarray(constant))
        assert kinds == ({0, 1} if builds_empty else {1})  # also in empty batches


class _With:
    """A collate function that workers can be sent."""

    def __init__(self, build: Callable[[dict, Any], Any], constant: Any) -> None:
        self.build, self.constant = build, constant

    def __call__(self, examples: list) -> Any:
        return self.build(padded(examples), self.constant)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_value_that_differs_later_is_refused_then(workers: int) -> None:
    """The examples that are tried do not show it: one text alone has more than 3 tokens."""

    def collate(examples: list) -> Any:
        return {**padded(examples, 10), "longest": max(3, *(len(ids) for ids, _ in examples), 0)}

    data = Texts(lengths=lambda i: 9 if i == 18 else 1 + i % 3)
    loader = make_private(Reader(), texts(collate, data, num_workers=workers))[-1]
    with pytest.raises(UnsupportedError, match=r"batch\['longest'\].*another in this batch than in those"):
        for _ in range(20):
            list(loader)


def test_rows_that_count_the_others_are_refused() -> None:
    """Leaving one example out changes the rows of others."""
    for make in (lambda n: torch.arange(n) / n, lambda n: torch.full((n,), n), lambda n: torch.full((n, 1), 1 / n)):
        with pytest.raises(UnsupportedError, match=r"from other examples.*batch\['weight'\]"):
            make_private(
                Reader(), texts(lambda examples, make=make: {**padded(examples), "weight": make(len(examples))})
            )


def test_small_data_sets_are_tried_too() -> None:
    for size in (1, 2, 3, 9):
        loader = texts(lambda examples: {**padded(examples), "n": len(examples)}, Texts(size), batch_size=1)
        with pytest.raises(UnsupportedError, match=r"batch\['n'\]"):
            make_private(Reader(), loader)
        make_private(Reader(), texts(padded, Texts(size), batch_size=1))


# ------------------------------------------------------------------ what the loop passes to forward()

MEETINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "divides each": lambda out, other: out / other,
    "divides the loss": lambda out, other: out.sum() / other,
    "multiplies the loss": lambda out, other: out.mean() * other,
    "is divided": lambda out, other: other / (1 + out.square()),
    "is added": lambda out, other: torch.relu(out + other),
    "is a power": lambda out, other: out.sigmoid() ** other,
    "chooses": lambda out, other: torch.where(other > 20, out, -out),
    "in place": lambda out, other: out.clone().mul_(other),
    "after some steps": lambda out, other: out * (1 / other.float().clamp(min=1)).sqrt().expand(len(out)),
    "as a limit": lambda out, other: torch.minimum(out, other.float()),
    "in a function": lambda out, other: torch.addcmul(out, out, other.float()),
}


def losses_of(out: Tensor, label: Tensor) -> Tensor:
    return bce(out, label) if out.ndim else out


@pytest.mark.parametrize("meeting", MEETINGS)
def test_a_number_that_the_loop_computes_is_refused_where_it_meets_units(meeting: str) -> None:
    def step(public: tuple[str, ...]) -> None:
        engine, module, optimizer, loader = make_private(Reader(MEETINGS[meeting]), texts(padded), public_inputs=public)
        for batch in loader:
            if loader.current.units < 2:
                continue
            optimizer.zero_grad()
            losses_of(module(batch["ids"], (batch["ids"] > 0).sum()), batch["label"]).backward()
            optimizer.step()
            break
        assert engine.ledger.steps == 1

    with pytest.raises(REFUSED, match=r"'other'.*no axis of units.*public_inputs=\('other',\)"):
        step(())
    step(("other",))


PARAMETER_MEETINGS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "looks up": lambda m, other: m.e(other.long() % ROWS).sum(),
    "indexes": lambda m, other: m.e.weight[other.long() % ROWS].sum(),
    "is multiplied": lambda m, other: (m.l.weight * other).sum(),
    "goes through a layer": lambda m, other: m.l(other.float().reshape(-1)[:1].expand(DIM)).sum(),
}


@pytest.mark.parametrize("meeting", PARAMETER_MEETINGS)
@pytest.mark.parametrize("other", [torch.tensor(3), torch.tensor([3, 1, 4])])
def test_and_where_it_meets_parameters(meeting: str, other: Tensor) -> None:
    model = Apply(
        lambda m, x, other: m.l(x) + PARAMETER_MEETINGS[meeting](m, other),
        e=nn.Embedding(ROWS, DIM), l=nn.Linear(DIM, 1),
    )  # fmt: skip
    _, module, optimizer, loader = make_private(model, loader_of(torch.randn(40, DIM), batch_size=20))
    (x,) = next(iter(loader))
    with pytest.raises(REFUSED, match=r"inputs\[1\]"):
        module(x, other)


def test_numbers_of_a_known_library_are_refused_as_python_numbers() -> None:
    """transformers' Trainer counts the valid tokens of the batch; some versions pass a Python number."""

    class Counts(Reader):
        def forward(self, ids: Tensor, num_items_in_batch: Any = None) -> Tensor:
            return super().forward(ids).sum() / num_items_in_batch

    _, module, optimizer, loader = make_private(Counts(), texts(padded), loss_reduction="sum")
    ids = next(iter(loader))["ids"]
    for number in ((ids > 0).sum(), int((ids > 0).sum()), float((ids > 0).sum())):
        with pytest.raises(REFUSED, match=r"num_items_in_batch.*compute_loss"):
            module(ids, num_items_in_batch=number)
    with torch.no_grad():
        module(ids, num_items_in_batch=int((ids > 0).sum()))


def test_declared_and_constant_masks_are_exact_also_if_as_long_as_the_batch() -> None:
    """A mask for all, (L, L): in a batch of L units its axis 0 looks like theirs."""
    length = 8

    def attend(m: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
        h = m.e(ids)
        return m.l((h @ h.mT).masked_fill(~mask, -1e9).softmax(-1) @ h).mean((1, 2))

    mask = torch.ones(length, length).tril().bool()
    for public, collate in (
        (("inputs[1]",), lambda examples: (padded(examples)["ids"], padded(examples)["label"])),
        ((), lambda examples: (padded(examples)["ids"], mask.clone(), padded(examples)["label"])),
    ):
        model = Apply(attend, e=nn.Embedding(ROWS, DIM), l=nn.Linear(DIM, 2))
        wanted = Apply(attend, e=nn.Embedding(ROWS, DIM), l=nn.Linear(DIM, 2))
        wanted.load_state_dict(model.state_dict())
        _, module, optimizer, loader = make_private(
            model, texts(collate), noise_multiplier=0.0, max_grad_norm=1e6, public_inputs=public, poisson_sampling=False,
            loss_reduction="sum",
        )  # fmt: skip
        ids, *rest, label = next(iter(loader))
        assert len(ids) == length
        (module(ids, rest[0] if rest else mask) * label).sum().backward()
        optimizer.step()
        (wanted(ids, mask) * label).sum().backward()
        for mine, own in zip(module.parameters(), wanted.parameters()):
            torch.testing.assert_close(mine, own - 0.1 * own.grad)


def test_a_part_of_the_module_may_be_called_with_tensors_of_the_module() -> None:
    """Buffers and parameters are no data, also where the part that is called first is given them as inputs."""

    class Head(nn.Module):
        def forward(self, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
            return F.linear(x, weight) * scale

    model = Apply(lambda m, x: m.head(x, m.layer.weight, m.scale), layer=nn.Linear(DIM, 20, bias=False), head=Head())
    model.register_buffer("scale", torch.tensor(2.0))
    _, module, optimizer, loader = make_private(
        model, loader_of(torch.randn(40, DIM), batch_size=20), noise_multiplier=0.0, max_grad_norm=1e6, loss_reduction="sum",
        poisson_sampling=False,
    )  # fmt: skip
    (x,) = next(iter(loader))
    before = module.layer.weight.detach().clone()
    module.head(x, module.layer.weight, module.scale).sum().backward()
    optimizer.step()
    torch.testing.assert_close(module.layer.weight, before - 0.1 * 2 * x.sum(0).expand(20, DIM))


def test_public_inputs_are_names() -> None:
    with pytest.raises(TypeError, match="sequence of names"):
        make_private(Reader(), texts(padded), public_inputs="other")


# ------------------------------------------------------------------ bags whose ids lie end to end


@dataclass
class Jagged:
    """As torchrec's: flat values and weights, and where each text begins."""

    values: Tensor
    weights: Tensor
    offsets: Tensor
    _stride: int
    _length_per_key: list[int]


def jagged(examples: list, last: bool) -> tuple[Jagged, Tensor]:
    lengths = [len(ids) for ids, _ in examples]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    values = torch.cat([ids for ids, _ in examples])
    own = Jagged(values, 1 + values.double() / 7, offsets if last else offsets[:-1], len(examples), [sum(lengths)])
    return own, torch.stack([label for _, label in examples])


def bag_of(last: bool) -> nn.Module:
    def forward(m: nn.Module, texts: Jagged) -> Tensor:
        return m.l(m.e((texts.values * 3) % ROWS, texts.offsets, texts.weights)).squeeze(-1)

    return Apply(forward, e=nn.EmbeddingBag(ROWS, DIM, mode="sum", include_last_offset=last), l=nn.Linear(DIM, 1))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("lengths", [lambda i: 1 + i % 7, lambda i: i % 3, lambda i: 2, lambda i: 1])
@pytest.mark.parametrize("mechanism", [sparsedp.DPSGD(), sparsedp.FEST(k=15, epsilon=1.0)])
@pytest.mark.parametrize("frozen", [False, True])
def test_flat_ids_with_offsets_stay_exact(last: bool, lengths: Any, mechanism: Any, frozen: bool) -> None:
    """Against the clipped sum of one unit at a time, through the loader and a step."""
    model, reference = bag_of(last).double(), bag_of(last).double()
    model.e.weight.requires_grad_(not frozen)
    reference.load_state_dict(model.state_dict())
    data = Texts(lengths=lengths)
    engine, module, optimizer, loader = make_private(
        model, texts(lambda examples: jagged(examples, last), data), noise_multiplier=0.0, max_grad_norm=0.3,
        loss_reduction="sum", mechanism=sparsedp.DPSGD() if frozen else mechanism,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
    )  # fmt: skip
    batch, label = next(iter(loader))
    loss = lambda out, label: (out.sin() * (1 + label)).sum()  # noqa: E731
    loss(module(batch), label.double()).backward()
    optimizer.step()
    total = {name: torch.zeros_like(p) for name, p in reference.named_parameters()}
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    chosen = (optimizer.prepared or {}).get("e.weight", torch.arange(ROWS))
    ends = [*batch.offsets.tolist()[: loader.current.units], len(batch.values)]
    for unit in range(loader.current.units):
        ids, weights = (value[ends[unit] : ends[unit + 1]] for value in (batch.values, batch.weights))
        offsets = torch.tensor([0, len(ids)] if last else [0])
        reference.zero_grad()
        loss(reference(Jagged(ids, weights, offsets, 1, [])), label[unit : unit + 1].double()).backward()
        own = {name: p.grad for name, p in reference.named_parameters() if name in trained}
        if not frozen:
            own["e.weight"] = torch.zeros_like(own["e.weight"]).index_copy_(0, chosen, own["e.weight"][chosen])
        norm = torch.stack([grad.square().sum() for grad in own.values()]).sum().sqrt()
        for name, grad in own.items():
            total[name] += grad * (0.3 / norm.clamp_min(0.3))
    for name, parameter in module.named_parameters():
        wanted = dict(reference.named_parameters())[name] - total[name]
        torch.testing.assert_close(parameter, wanted, rtol=1e-5, atol=1e-6)


MISUSES: dict[str, Callable[[nn.Module, Jagged], Tensor]] = {
    "a mean of everybody's ids": lambda m, own: own.values.float().mean(),
    "how many ids there are": lambda m, own: own.offsets.max(),
    "everybody's weights": lambda m, own: own.weights.sum(),
    "where the unit begins": lambda m, own: own.offsets[: m.units].float(),
    "rows by offset": lambda m, own: m.e.weight[own.offsets[: m.units] % ROWS].sum(1),
    "all rows": lambda m, own: F.embedding(own.values, m.e.weight).sum(),
}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("misuse", MISUSES)
def test_flat_ids_and_offsets_may_reach_bags_alone(last: bool, misuse: str) -> None:
    def forward(m: nn.Module, own: Jagged) -> Tensor:
        return m.l(m.e(own.values, own.offsets)).squeeze(-1) * (1 + MISUSES[misuse](m, own))

    model = Apply(forward, e=nn.EmbeddingBag(ROWS, DIM, mode="sum", include_last_offset=last), l=nn.Linear(DIM, 1))
    _, module, optimizer, loader = make_private(model, texts(lambda examples: jagged(examples, last)))
    for batch, _ in loader:
        module.units = loader.current.units
        if module.units > 2:
            with pytest.raises(REFUSED, match=r"inputs\[0\]\.(values|weights|offsets)"):
                module(batch)


def test_positions_of_examples_may_reach_bags_alone() -> None:
    """arange(batch): as offsets of bags of one id it is needed, as anything else one unit shifts everybody's."""

    def collate(examples: list) -> dict:
        return {"ids": torch.stack([ids[0] for ids, _ in examples]), "place": torch.arange(len(examples))}

    bag = Apply(lambda m, ids, place: m.l(m.e(ids, place)), e=nn.EmbeddingBag(ROWS, DIM), l=nn.Linear(DIM, 1))
    other = Apply(lambda m, ids, place: m.l(m.e(ids)) * place[:, None], e=nn.Embedding(ROWS, DIM), l=nn.Linear(DIM, 1))
    for model, refused in ((bag, False), (other, True)):
        _, module, optimizer, loader = make_private(model, texts(collate))
        batch = next(iter(loader))
        if refused:
            with pytest.raises(REFUSED, match=r"inputs\[1\]"):
                module(batch["ids"], batch["place"])
        else:
            module(batch["ids"], batch["place"]).sum().backward()
            optimizer.step()


# ------------------------------------------------------------------ check collates anew


class Divided(Reader):
    """The loss of Hugging Face's models: summed, and divided by what the batch says."""

    def forward(self, ids: Tensor, label: Tensor, num_items_in_batch: Any) -> Tensor:  # type: ignore[override]
        losses = F.binary_cross_entropy_with_logits(super().forward(ids), label, reduction="none")
        return losses.sum() / num_items_in_batch


def counted(examples: list) -> dict:
    batch = padded(examples)
    return {**batch, "num_items_in_batch": (batch["ids"] > 0).sum()}


def test_check_names_a_divisor_that_collate_makes() -> None:
    loader = texts(counted)
    with pytest.raises(UnsupportedError, match=r"batch\['num_items_in_batch'\]"):
        sparsedp.check(Divided(), lambda out, batch: out, loss_reduction="sum", data_loader=loader)
    with pytest.raises(UnsupportedError, match=r"batch\['num_items_in_batch'\]"):
        sparsedp.check(Divided(), lambda out, batch: out, next(iter(loader)), loss_reduction="sum", data_loader=loader)


def longest(examples: list) -> tuple[Tensor, Tensor]:
    """Padded to the longest example of the batch."""
    return pad_sequence([ids for ids, _ in examples], batch_first=True), torch.stack([label for _, label in examples])


def test_check_sees_padding_to_the_longest() -> None:
    model = Apply(
        lambda m, ids: m.l(m.e(ids)).squeeze(-1), e=nn.Embedding(ROWS, DIM, padding_idx=0), l=nn.Linear(DIM, 1)
    )

    def over_all(out: Tensor, label: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(out, label[:, None].expand_as(out))

    for loader in (texts(longest), make_private(Reader(), texts(longest))[-1]):
        sparsedp.check(model, over_all, longest([Texts()[i] for i in range(6)]))  # which cannot see it
        with pytest.raises(UnitsMixedError, match="padd"):
            sparsedp.check(model, over_all, data_loader=loader)
        assert sparsedp.check(Reader(), bce, data_loader=loader).units == 4  # masked


class Attentive(Reader):
    """Dropout on tokens and on attention among them, padding masked."""

    def forward(self, ids: Tensor, other: Any = None) -> Tensor:
        valid = ids > 0
        tokens = F.dropout(self.table(ids), 0.5)
        mixed = F.scaled_dot_product_attention(tokens, tokens, tokens, valid[:, None, :], dropout_p=0.5)
        pooled = (mixed * valid[..., None]).sum(1) / valid.sum(1, keepdim=True)
        return self.out(pooled).squeeze(-1)


def test_check_with_dropout_and_padding_to_the_longest() -> None:
    """A unit that is shorter alone has the masks of its own positions."""
    assert sparsedp.check(Attentive(), bce, data_loader=texts(longest)).units == 4


def test_check_needs_no_take_with_a_loader() -> None:
    for last in (False, True):
        loader = texts(
            lambda examples, last=last: (lambda own, label: (own.values, own.offsets, label))(*jagged(examples, last))
        )
        bag = nn.EmbeddingBag(ROWS, DIM, mode="sum", include_last_offset=last)
        assert sparsedp.check(bag, lambda out, y: (out.sum(1) * y).mean(), data_loader=loader).units == 4


def test_check_with_an_iterable_data_set() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            return (Texts()[i] for i in range(SIZE))

    loader = DataLoader(Stream(), batch_size=8, collate_fn=longest)
    assert sparsedp.check(Reader(), bce, data_loader=loader).units == 4


def test_check_refuses_what_it_cannot_compare() -> None:
    noisy = texts(
        lambda examples: ((ids := padded(examples)["ids"]) * (torch.rand(ids.shape) > 0.5), torch.ones(len(ids)))
    )
    with pytest.raises(SparseDPError, match="other values each time"):
        sparsedp.check(Reader(), bce, data_loader=noisy)
    with pytest.raises(SparseDPError, match="nothing to check"):
        sparsedp.check(Reader(), bce)
    with pytest.raises(SparseDPError, match="At least 2"):
        sparsedp.check(Reader(), bce, data_loader=texts(longest, Texts(1)))
    with pytest.raises(SparseDPError, match="take"):
        sparsedp.check(Reader(), bce, data_loader=texts(longest), take=lambda batch, indices: batch)
