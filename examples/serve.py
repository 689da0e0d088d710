"""Answers requests with a model that `sparsedp export RUN --format torchscript` (or onnx) wrote. It does not need sparsedp.

Run: python examples/serve.py FOLDER [--port 8000]
Ask: curl -d '{"user": [3, 4], "item": [1, 1]}' http://127.0.0.1:8000/     the inputs' names are in FOLDER/serving.json

An input is a list with an entry for each example. The answer is {"output": [...]}, with an entry for each example; of a model
that ranks items, {"history": [...], "top": 10} asks for the ten best alone: {"items": [...], "scores": [...]}.
"""

import argparse
import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

LARGEST = 10_000_000  # bytes of a request
Model = Callable[[list[np.ndarray]], np.ndarray]


def load(folder: Path, about: dict[str, Any]) -> Model:
    path = folder / about["file"]
    if about["format"] == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        names = [one.name for one in session.get_inputs()]
        return lambda inputs: session.run(None, dict(zip(names, inputs)))[0]

    import torch

    module = torch.jit.load(path)

    @torch.no_grad()
    def answer(inputs: list[np.ndarray]) -> np.ndarray:
        return module(*map(torch.from_numpy, inputs)).numpy()

    return answer


def read_inputs(request: Any, wanted: list[dict[str, Any]]) -> list[np.ndarray]:
    """The arrays of a request, checked; what is raised is told to who asked."""
    names = [one["name"] for one in wanted]
    if not isinstance(request, dict) or set(request) - {"top"} != set(names):
        raise ValueError(f"expected an object with {', '.join(names)}")
    arrays = []
    for one in wanted:
        array = np.asarray(request[one["name"]])
        shape = one["shape"][1:]
        if array.ndim != 1 + len(shape) or list(array.shape[1:]) != shape or not len(array):
            raise ValueError(
                f"{one['name']}: expected a list of {'numbers' if not shape else f'arrays of shape {shape}'}"
            )
        is_whole = one["dtype"].startswith("int")
        if array.dtype.kind not in ("i" if is_whole else "if") or (is_whole and array.min() < 0):
            raise ValueError(f"{one['name']}: expected {'whole numbers from 0' if is_whole else 'numbers'}")
        arrays.append(array.astype(one["dtype"]))
    if len({len(array) for array in arrays}) > 1:
        raise ValueError("the inputs have different numbers of examples")
    return arrays


def reply(model: Model, about: dict[str, Any], request: Any) -> dict[str, Any]:
    output = model(read_inputs(request, about["inputs"]))
    top = request.get("top")
    if top is None:
        return {"output": np.where(np.isfinite(output), output.astype(object), None).tolist()}  # JSON has no infinity
    if output.ndim != 2 or type(top) is not int or not 1 <= top < output.shape[1]:
        raise ValueError("top: expected a number of items, of a model that ranks them")
    best = np.argsort(-output, axis=1, kind="stable")[:, :top]
    return {"items": best.tolist(), "scores": np.take_along_axis(output, best, axis=1).tolist()}


def make_server(folder: Path, port: int) -> ThreadingHTTPServer:
    """On this machine alone; port 0 is any that is free."""
    about = json.loads((folder / "serving.json").read_text())
    model = load(folder, about)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                length = int(self.headers.get("Content-Length", 0))
                if length > LARGEST:
                    raise ValueError(f"the request has more than {LARGEST:,} bytes")
                status, answer = 200, reply(model, about, json.loads(self.rfile.read(length)))
            except Exception as error:  # an id that is too large, say: the model's own words
                status, answer = (
                    400,
                    {"error": str(error).strip().splitlines()[-1] if str(error) else type(error).__name__},
                )
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what sparsedp export wrote")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    with make_server(args.folder, args.port) as server:
        print(f"http://127.0.0.1:{server.server_port}/ answers", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
