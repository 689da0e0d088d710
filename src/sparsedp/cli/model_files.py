"""A trained model as one file that runs without this package: TorchScript or ONNX.

Writing such a file takes along whatever tensors the model holds, and where its code lies. So the file is looked through before it
may leave: beside the weights of the release it may hold nothing. And it is read back and asked, with batches of several sizes: it
has to answer as the model does. No example of the data is used for this, but inputs of their shapes, because tracing can write
values that a model has computed into the file.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import shutil
import warnings
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsedp.cli.config.datasets import Data
from sparsedp.errors import SparseDPError, one_line
from sparsedp.models import DLRM, DPFormer

Answer = Callable[[Sequence[Tensor]], Tensor]

# Buffers that are no part of the weights and hang on the model's sizes alone. Others may hold what the data told.
_OF_SIZES: Mapping[type[nn.Module], tuple[str, ...]] = {DPFormer: ("future",), DLRM: ("pairs",)}
_SMALL = 64  # bytes of the largest constant that is no weight: a shape, or a factor in the model's code
_BATCHES = (3, 1, 5)  # the first is traced
_LARGEST_ONNX = 2**31 - 2**20  # of protobuf


class ModelFile(ABC):
    """A format. `name` is that of the file in a release."""

    name: str

    @abstractmethod
    def write(self, module: nn.Module, inputs: Sequence[Tensor], names: Sequence[str], path: Path) -> None: ...

    @abstractmethod
    def contents(self, path: Path) -> Iterator[tuple[str, bytes]]:
        """Every tensor and list of numbers in the file: where it is, and its bytes."""

    @abstractmethod
    def load(self, path: Path) -> Answer: ...


class TorchScript(ModelFile):
    """For `torch.jit.load`, in Python or C++."""

    name = "model.torchscript"

    def write(self, module: nn.Module, inputs: Sequence[Tensor], names: Sequence[str], path: Path) -> None:
        traced_file = path.with_name(f"{path.name}.traced")
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # of tracing, of which other batches show what it did; and that torch.export is newer
            traced = torch.jit.trace(module, tuple(inputs), check_trace=False)
            torch.jit.save(traced, traced_file)
        with zipfile.ZipFile(traced_file) as archive, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as kept:
            for item in archive.infolist():
                # Not where the code lies on this machine, and not the inputs.
                if not item.filename.endswith(".debug_pkl") and "/traced_inputs" not in item.filename:
                    with archive.open(item) as source, kept.open(item.filename, "w", force_zip64=True) as copy:
                        shutil.copyfileobj(source, copy)
        traced_file.unlink()

    def contents(self, path: Path) -> Iterator[tuple[str, bytes]]:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.rpartition("/")[
                    2
                ].isdigit():  # data/0 and constants/0, beside code, and the tree of what is where
                    yield f"tensor {name}", archive.read(name)

    def load(self, path: Path) -> Answer:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that torch.export is newer
            loaded = torch.jit.load(path)
        return lambda inputs: loaded(*inputs)


class Onnx(ModelFile):
    """For ONNX Runtime and others."""

    name = "model.onnx"

    def __init__(self) -> None:
        try:
            import onnx
            import onnxruntime
            import onnxscript  # noqa: F401 (torch.onnx needs it)
        except ImportError as error:
            raise SparseDPError(
                f"--format onnx needs packages that are not here: pip install 'sparsedp[onnx]' ({error})"
            ) from error
        self.onnx, self.runtime = onnx, onnxruntime

    def write(self, module: nn.Module, inputs: Sequence[Tensor], names: Sequence[str], path: Path) -> None:
        size = sum(tensor.nbytes for tensor in module.state_dict().values())
        if size > _LARGEST_ONNX:
            raise SparseDPError(f"An ONNX file holds at most 2 GiB, and the weights have {size:,} bytes")
        batch = torch.export.Dim("batch")
        with warnings.catch_warnings(), _without_log("torch.onnx"):  # of what packages that are not here could do
            warnings.simplefilter("ignore")  # about torch's own older formats
            program = torch.onnx.export(
                module,
                tuple(inputs),
                input_names=list(names),
                output_names=["output"],
                dynamic_shapes={"inputs": tuple({0: batch} for _ in inputs)},
                dynamo=True,
                optimize=False,  # constants would be folded, and weights not be found again
                verbose=False,
            )
        assert program is not None
        model = program.model_proto
        for message in self._messages(model):  # where the code lies on this machine
            for told in ("metadata_props", "doc_string"):
                if told in message.DESCRIPTOR.fields_by_name:
                    message.ClearField(told)
        self.onnx.save(model, str(path))

    def contents(self, path: Path) -> Iterator[tuple[str, bytes]]:
        for message in self._messages(self.onnx.load(str(path))):
            if message.DESCRIPTOR.name == "TensorProto":
                yield f"tensor {message.name or 'of a constant'}", self.onnx.numpy_helper.to_array(message).tobytes()
            elif message.DESCRIPTOR.name == "AttributeProto":
                yield f"attribute {message.name}", repr([*message.floats, *message.ints, *message.strings]).encode()

    def load(self, path: Path) -> Answer:
        options = self.runtime.SessionOptions()
        options.log_severity_level = 3  # errors: its warnings are about constants that it does not fold
        session = self.runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        names = [one.name for one in session.get_inputs()]

        def answer(inputs: Sequence[Tensor]) -> Tensor:
            (output,) = session.run(None, {name: tensor.numpy() for name, tensor in zip(names, inputs)})
            return torch.from_numpy(output)

        return answer

    def _messages(self, message: Any) -> Iterator[Any]:
        """The message and all within it."""
        yield message
        for field, value in message.ListFields():
            if field.type == field.TYPE_MESSAGE:
                for one in value if field.is_repeated else [value]:
                    yield from self._messages(one)


FORMATS: Mapping[str, Callable[[], ModelFile]] = {"torchscript": TorchScript, "onnx": Onnx}


@dataclass(frozen=True)
class Question:
    """What is asked of a model that serves: the module, and the names, shapes and types of its inputs."""

    module: nn.Module
    asks: str  # in words
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]  # of one example
    dtypes: tuple[torch.dtype, ...]

    @staticmethod
    def of(model: nn.Module, data: Data) -> Question:
        batch = data.examples(2)
        if isinstance(batch, Mapping) or not all(isinstance(part, Tensor) for part in batch):
            raise SparseDPError(
                "Batches of these data are not (inputs..., target), all of them tensors, so that it is not known what a model "
                "that serves is to be asked"
            )
        inputs = batch[:-1]
        method, asks = "forward", "forward() of the model"
        if hasattr(model, "score_next"):
            method, asks = "score_next", "the scores of all items as the next one, column 0 being padding"
        return Question(
            Asked(model, method).eval(),
            asks,
            _argument_names(getattr(model, method), len(inputs)),
            tuple(tuple(part.shape[1:]) for part in inputs),
            tuple(part.dtype for part in inputs),
        )

    def made_up(self, count: int) -> list[Tensor]:
        """Inputs that nobody's data are in: numbers from 0 to 1, ids 0 and 1."""
        generator = torch.Generator().manual_seed(count)
        return [
            torch.rand(count, *shape, generator=generator, dtype=dtype)
            if dtype.is_floating_point
            else torch.randint(2, (count, *shape), generator=generator).to(dtype)
            for shape, dtype in zip(self.shapes, self.dtypes)
        ]

    def to_dict(self) -> dict[str, Any]:
        """What those who ask have to know, as JSON. The first dimension of each tensor is the batch."""
        inputs = [
            {"name": name, "shape": [None, *shape], "dtype": str(dtype).removeprefix("torch.")}
            for name, shape, dtype in zip(self.names, self.shapes, self.dtypes)
        ]
        return {"answers": self.asks, "inputs": inputs}


class Asked(nn.Module):
    """A model as it is asked when it serves: by a method of it, however many inputs that takes."""

    def __init__(self, model: nn.Module, method: str) -> None:
        super().__init__()
        self.model, self.method = model, method

    def forward(self, *inputs: Tensor) -> Any:
        return self.model(*inputs) if self.method == "forward" else getattr(self.model, self.method)(*inputs)


def write_model_file(file: ModelFile, model: nn.Module, data: Data, path: Path) -> Question:
    """Writes the model into `path` and says how it is asked. Refuses models whose file would answer otherwise or hold more."""
    try:
        question = Question.of(model, data)
        file.write(question.module, question.made_up(_BATCHES[0]), question.names, path)
        require_only_weights(file, model, path)
        _require_same_answers(file, question, path)
    except Exception as error:  # torch has many
        raise SparseDPError(
            f"{type(model).__name__} cannot be exported as {path.name}: {one_line(error).rstrip('.')}. The weights alone can "
            "(--format weights), for the model in Python."
        ) from error
    return question


def require_only_weights(file: ModelFile, model: nn.Module, path: Path) -> None:
    """Raises if the file holds a tensor that is none of the model's weights; small ones are shapes and factors."""
    allowed = [value for value in model.state_dict().values() if isinstance(value, Tensor)]
    for kind, names in _OF_SIZES.items():
        allowed += [part.get_buffer(name) for part in model.modules() if type(part) is kind for name in names]
    digests = {_digest(_bytes(tensor)) for tensor in allowed}
    for where, content in file.contents(path):
        if len(content) > _SMALL and _digest(content) not in digests:
            raise SparseDPError(
                f"{where} of {len(content):,} bytes in the file is none of the weights: a buffer with persistent=False, another "
                "tensor that the model holds, or one that it was made of. No statement covers it. Compute it in forward(), or "
                "make it a persistent buffer before training"
            )


def _require_same_answers(file: ModelFile, question: Question, path: Path) -> None:
    answer = file.load(path)
    for count in _BATCHES:
        inputs = question.made_up(count)
        with torch.no_grad():
            wanted = question.module(*inputs)
        if not isinstance(wanted, Tensor) or wanted.shape[:1] != (count,):
            raise SparseDPError(f"it does not return one tensor with a row for each of {count} examples")
        try:
            torch.testing.assert_close(answer(inputs).detach(), wanted, rtol=1e-4, atol=1e-5, equal_nan=True)
        except Exception as error:
            raise SparseDPError(
                f"for a batch of {count} the file does not answer as the model does (what hangs on values or sizes in Python, "
                f"such as `if` or len(), is written down as it was for one batch): {one_line(error)}"
            ) from error


@contextmanager
def _without_log(name: str) -> Iterator[None]:
    """Without a library's warnings in its log."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _argument_names(function: Callable[..., Any], count: int) -> tuple[str, ...]:
    """The names of the first `count` arguments; those of `*more` are more_0, more_1 and so on."""
    names: list[str] = []
    for one in inspect.signature(function).parameters.values():
        if one.kind is one.VAR_POSITIONAL:
            names += [f"{one.name}_{i}" for i in range(count - len(names))]
        elif one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD):
            names.append(one.name)
    if len(names) < count:
        raise SparseDPError(f"it takes {len(names)} inputs, and the data have {count}")
    return tuple(names[:count])


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()  # numpy has no bfloat16


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
