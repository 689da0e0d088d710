"""`sparsedp export --format`: files that answer as the model does, hold its weights and nothing else, and serve."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from examples import serve
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from sparsedp.cli.config.datasets import Data
from sparsedp.cli.main import main
from sparsedp.cli.model_files import FORMATS, TorchScript, require_only_weights, write_model_file
from sparsedp.errors import SparseDPError
from sparsedp.models import DLRM, PCTR, DPFormer, DualEncoder, FeatureDualEncoder, RecurrentRecommender

formats = pytest.mark.parametrize("format", FORMATS)

CONFIG = """
data: {kind: 'served_mine:data'}
model: {kind: 'served_mine:Model'}
loss: binary_cross_entropy
optimizer: {name: SGD, lr: 0.5}
training: {epochs: 1, batch_size: 20, check: false, threads: 1, init_seed: 1}
privacy: {noise_multiplier: 1.0, max_grad_norm: 1.0}
"""
CODE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def data():
    ids = torch.arange(60) % 20
    return TensorDataset(ids, torch.ones(60), (ids % 2).float())

class Model(nn.Module):
    def __init__(self, training):
        super().__init__()
        self.table, self.out = nn.Embedding(20, 4), nn.Linear(4, 1)

    def forward(self, ids, weight):
        return self.out(self.table(ids)).squeeze(1) * weight
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a finished run in it, of a user's own model."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "mine.yaml").write_text(CONFIG)
    (folder / "served_mine.py").write_text(CODE)
    threads, path = torch.get_num_threads(), list(sys.path)
    assert main(["train", str(folder / "mine.yaml"), "--run-dir", str(folder / "run"), "--quiet"]) == 0
    yield folder
    torch.set_num_threads(threads)
    sys.path[:] = path
    sys.modules.pop("served_mine", None)


def export(run: Path, name: str, *more: str) -> int:
    return main(["export", str(run / "run"), "--to", str(run / name), "--code", str(run / "mine.yaml"), *more])


def logits_of(run: Path, ids: Tensor, weight: Tensor) -> Tensor:
    weights = torch.load(run / "run" / "release" / "model.pt", weights_only=True)
    return (weights["table.weight"][ids] @ weights["out.weight"].T + weights["out.bias"]).squeeze(1) * weight


@formats
def test_a_release_answers_as_the_weights_do(run: Path, format: str) -> None:
    assert export(run, format, "--format", format) == 0
    folder = run / format
    names = {path.name for path in folder.iterdir()}
    released = {path.name for path in (run / "run" / "release").iterdir()}
    assert names == released - {"model.pt"} | {"serving.json", f"model.{format}"} and "statement.json" in names
    about = json.loads((folder / "serving.json").read_text())
    assert [(one["name"], one["shape"], one["dtype"]) for one in about["inputs"]] == [
        ("ids", [None], "int64"), ("weight", [None], "float32"),
    ]  # fmt: skip
    answer = FORMATS[format]().load(folder / f"model.{format}")
    for ids in (torch.arange(20), torch.tensor([19]), torch.tensor([3, 3])):
        weight = torch.rand(len(ids))
        torch.testing.assert_close(answer([ids, weight]).detach(), logits_of(run, ids, weight))
    content = (folder / f"model.{format}").read_bytes()
    for of_this_machine in ("site-packages", str(run), str(Path(__file__).parents[2])):
        assert of_this_machine.encode() not in content


@formats
def test_serving(run: Path, format: str) -> None:
    """Over HTTP, on a free port of this machine."""
    name = f"served-{format}"
    assert export(run, name, "--format", format) == 0
    with serve.make_server(run / name, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            address = f"http://127.0.0.1:{server.server_port}/"
            status, answer = ask(address, {"ids": [3, 19], "weight": [1.0, 2]})
            wanted = logits_of(run, torch.tensor([3, 19]), torch.tensor([1.0, 2.0]))
            assert status == 200
            np.testing.assert_allclose(answer["output"], wanted, rtol=1e-5)
            for wrong in (
                {"ids": [3]}, {"ids": [3], "weight": [1, 2]}, {"ids": [[3]], "weight": [1]}, {"ids": [0.5], "weight": [1]},
                {"ids": [-1], "weight": [1]}, {"ids": [20], "weight": [1]}, {"ids": [], "weight": []}, [], {"ids": "a"},
                {"ids": [1], "weight": [1], "top": 3},
            ):  # fmt: skip
                status, answer = ask(address, wrong)
                assert status == 400 and answer["error"], wrong
        finally:
            server.shutdown()
            thread.join()


def test_the_best_items_alone() -> None:
    about = {"inputs": [{"name": "history", "shape": [None, 2], "dtype": "int64"}]}
    scores = np.array([[-np.inf, 1.0, 3.0, 2.0], [-np.inf, 5.0, 4.0, 5.0]])

    def reply(**request: Any) -> dict[str, Any]:
        return serve.reply(lambda inputs: scores, about, {"history": [[1, 2], [3, 0]], **request})

    assert reply(top=2) == {"items": [[2, 3], [1, 3]], "scores": [[3.0, 2.0], [5.0, 5.0]]}
    assert json.loads(json.dumps(reply(), allow_nan=False))["output"][0] == [None, 1.0, 3.0, 2.0]
    for top in (0, 4, "2", True):
        with pytest.raises(ValueError, match="top"):
            reply(top=top)


def ask(address: str, request: Any) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(address, json.dumps(request).encode(), timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_serving_as_a_program(run: Path) -> None:
    """The example as it is typed; it asks for nothing of this package."""
    assert export(run, "typed", "--format", "torchscript") == 0
    code = f"import sys; sys.modules['sparsedp'] = None; sys.argv = ['serve', {str(run / 'typed')!r}, '--port', '0']; "
    code += f"sys.path.insert(0, {str(Path(serve.__file__).parent)!r}); import serve; serve.main()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[0]
            assert ask(address, {"ids": [1], "weight": [1]})[0] == 200
        finally:
            process.terminate()


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--set", "data.options.a=1"], "are for --format"),
        (["--format", "onnx", "--set", "optimizer.lr=1"], "optimizer.lr"),
    ],
)
def test_options_that_do_not_fit(run: Path, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run / "run"), "--to", str(run / "no"), *argv]) == 2
    assert message in capsys.readouterr().err and not (run / "no").exists()


def test_a_missing_package_is_named(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert export(run, "no", "--format", "onnx") == 2
    assert "pip install 'sparsedp[onnx]'" in capsys.readouterr().err and not (run / "no").exists()


# ---------------------------------------------------------------------------- the models of the package


def as_data(training: TensorDataset) -> Data:
    return Data(training, None, default_collate)


def sequences(length: int) -> TensorDataset:
    history = torch.randint(1, 12, (8, length))
    return TensorDataset(history, history)


def clicks() -> TensorDataset:
    return TensorDataset(torch.rand(8, 13), torch.randint(3, (8, 26)), torch.ones(8))


def with_bags() -> TensorDataset:
    numbers, categories, label = clicks().tensors
    return TensorDataset(numbers, categories, torch.randint(12, (8, 4)), torch.randint(12, (8, 2)), label)


MODELS = {
    "dlrm": lambda: (DLRM([3] * 26, dim=4, bottom=[8], top=[8]), clicks()),
    "bags": lambda: (PCTR([3] * 26, hidden=8, hidden_layers=1, bags=[(12, 0), (12, 0)]), with_bags()),
    "transformer": lambda: (DPFormer(11, 5, dim=8, blocks=1), sequences(5)),
    "reattention": lambda: (_with_errors(DPFormer(11, 5, dim=8, blocks=2, reattention=True)), sequences(5)),
    "gru": lambda: (RecurrentRecommender(11, 5, cell="gru", dim=8), sequences(5)),
    "dual": lambda: (DualEncoder(11, dim=8, hidden=[8]), sequences(5)),
}


def _with_errors(model: DPFormer) -> DPFormer:
    model.track_errors(noise_multiplier=1.0, batch_size=8, frequencies=torch.full((12,), 0.5))
    return model


@pytest.mark.parametrize(
    "kind, format",
    [
        pytest.param(kind, format, marks=pytest.mark.slow if format == "onnx" and kind != "dual" else ())
        for kind in MODELS
        for format in FORMATS
    ],
)
def test_models_of_the_package(kind: str, format: str, tmp_path: Path) -> None:
    """On inputs that they were not traced with, in batches of other sizes."""
    torch.manual_seed(0)
    model, training = MODELS[kind]()
    file, path = FORMATS[format](), tmp_path / "model"
    write_model_file(file, model, as_data(training), path)
    answer = file.load(path)
    for count in (1, 8):
        *inputs, _ = next(iter(DataLoader(training, batch_size=count)))
        with torch.no_grad():
            wanted = model.score_next(*inputs) if hasattr(model, "score_next") else model(*inputs)
        torch.testing.assert_close(answer(inputs).detach(), wanted, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------- what is refused


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 30)

    def forward(self, history: Tensor) -> Tensor:
        return self.table(history).sum((1, 2))


class Half(Plain):
    """With weights of two bytes, and an extra state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.bfloat16))

    def forward(self, history: Tensor) -> Tensor:
        return super().forward(history) * self.scale

    def get_extra_state(self) -> Any:
        return {"version": 1}

    def set_extra_state(self, state: Any) -> None: ...


class WithBuffer(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("told", torch.rand(30), persistent=False)

    def forward(self, history: Tensor) -> Tensor:
        return super().forward(history) + self.told.sum()


class WithAttribute(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.told = [torch.rand(30)]

    def forward(self, history: Tensor) -> Tensor:
        return super().forward(history) + self.told[0].sum()


class ByBatch(Plain):
    def forward(self, history: Tensor) -> Tensor:
        return super().forward(history) * len(history)


class ByValue(Plain):
    def forward(self, history: Tensor) -> Tensor:
        return super().forward(history) * float(history.sum())


class ADict(Plain):
    def forward(self, history: Tensor) -> Any:
        return {"logits": super().forward(history)}


@formats
@pytest.mark.parametrize("kind", [WithBuffer, WithAttribute])
def test_what_is_not_of_the_weights_is_refused(kind: type[nn.Module], format: str, tmp_path: Path) -> None:
    with pytest.raises(SparseDPError, match=f"{kind.__name__} cannot be exported .*none of the weights"):
        write_model_file(FORMATS[format](), kind(), as_data(sequences(4)), tmp_path / "model")


@formats
def test_what_a_model_knows_beside_its_tensors_stays(format: str, tmp_path: Path) -> None:
    model = Plain()
    model.names, model.table.counts = ["alice", "bob"], {"carol": 77_777_777}  # type: ignore[assignment]
    path = tmp_path / "model"
    write_model_file(FORMATS[format](), model, as_data(sequences(4)), path)
    content = path.read_bytes()
    assert not any(
        word in content for word in (b"alice", b"names", b"carol", b"counts", (77_777_777).to_bytes(4, "little"))
    )
    assert b"traced_inputs" not in content


@pytest.mark.parametrize("kind", [ByBatch, ByValue, ADict])
def test_a_file_that_would_answer_otherwise_is_refused(kind: type[nn.Module], tmp_path: Path) -> None:
    with pytest.raises(SparseDPError, match=f"{kind.__name__} cannot be exported"):
        write_model_file(TorchScript(), kind(), as_data(sequences(4)), tmp_path / "model")


def test_rows_of_titles_do_not_leave(tmp_path: Path) -> None:
    """Which words an item's title has is in a buffer that is no part of the weights."""
    model = FeatureDualEncoder(11, {"unigrams": torch.randint(20, (12, 3))}, 20, 4, dim=8, hidden=[8])
    with pytest.raises(SparseDPError, match="none of the weights"):
        write_model_file(TorchScript(), model, as_data(sequences(4)), tmp_path / "model")


def test_other_types_of_weights(tmp_path: Path) -> None:
    model = Half()
    write_model_file(TorchScript(), model, as_data(sequences(4)), tmp_path / "model")
    history = torch.tensor([[1, 2, 3, 4]])
    torch.testing.assert_close(TorchScript().load(tmp_path / "model")([history]), model(history))


@formats
def test_weights_of_another_model_are_found(format: str, tmp_path: Path) -> None:
    """The check looks at values: a file with one number changed is refused."""
    model, file, path = Plain(), FORMATS[format](), tmp_path / "model"
    write_model_file(file, model, as_data(sequences(4)), path)
    require_only_weights(file, model, path)
    with torch.no_grad():
        model.table.weight[0, 0] += 1
    with pytest.raises(SparseDPError, match="none of the weights"):
        require_only_weights(file, model, path)
