"""TF-Privacy: `DPSequential` with its fast clipping (norms without gradients, two backward passes), its step compiled to a graph.

"dense" adds noise to every row. "sparse" is sparsity-preserving DP-SGD, as DP-AdaFEST: rows are selected by a noisy count and
noise is added to those, with the threshold and the ratio of the two noises that SparseDP's AdaFEST has here. It came after
TF-Privacy 0.9.0, the last release, so it takes an environment with TF-Privacy's source. XLA is off: with it, steps with dense
noise took half as long again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from problem import Case, Problem
from worker import Peer, importing, job, main

with importing():
    import tensorflow as tf
    import tensorflow_privacy
    from tensorflow_privacy.privacy.fast_gradient_clipping import layer_registry
    from tensorflow_privacy.privacy.keras_models import dp_keras_model

    if job()["variant"] == "sparse":
        try:
            from tensorflow_privacy.privacy.sparsity_preserving_noise import layer_registry as selecting
        except ImportError as error:
            raise ImportError(
                f"TF-Privacy {tensorflow_privacy.__version__} has no sparsity_preserving_noise"
            ) from error

keras = tf.keras
tf.config.threading.set_intra_op_parallelism_threads(job()["threads"])


def make_private(variant: str, layers: list[Any], loss: Any, problem: Problem, threshold: float) -> Any:
    options = {}
    if variant == "sparse":
        ratio = problem.noise_ratio
        options["sparsity_preserving_dpsgd_config"] = dp_keras_model.SparsityPreservingDPSGDConfig(
            sparse_selection_privacy_budget_fraction=ratio
            / (1 + ratio),  # deviations of map and gradient are as ratio : 1
            sparse_selection_threshold=threshold,
            sparse_selection_layer_registry=selecting.make_default_layer_registry(),
        )
    model = dp_keras_model.DPSequential(
        l2_norm_clip=problem.clip,
        noise_multiplier=problem.noise_multiplier,
        layer_registry=layer_registry.make_default_layer_registry(),
        use_xla=False,
        layers=layers,
        **options,
    )
    model.compile(optimizer=keras.optimizers.SGD(problem.lr), loss=loss)
    return model


def table(rows: int, dim: int, values: Callable[[], Any], length: int) -> Any:
    return keras.layers.Embedding(
        rows, dim, embeddings_initializer=lambda shape, dtype: values(), input_length=length, name="emb"
    )


def dense(weights: Any, name: str, activation: str | None = None) -> Any:
    """PyTorch's weights are [outputs, inputs], Keras' the other way round."""
    kernel, bias = weights[f"{name}.weight"].T, weights[f"{name}.bias"]
    return keras.layers.Dense(
        kernel.shape[1],
        activation=activation,
        kernel_initializer=lambda shape, dtype: tf.constant(kernel),
        bias_initializer=lambda shape, dtype: tf.constant(bias),
        name=name,
    )


def make_step(variant: str, problem: Problem) -> Callable[[int], None]:
    block = problem.block()
    repeats = -(-problem.rows // len(block))
    layers = [
        keras.layers.Input((problem.ids,), dtype=tf.int32),
        table(problem.rows, problem.dim, lambda: tf.tile(block, (repeats, 1))[: problem.rows], problem.ids),
        keras.layers.Flatten(),
        dense(problem.layers(), "hidden", "relu"),
        dense(problem.layers(), "out"),
    ]
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model = make_private(variant, layers, loss, problem, problem.threshold())
    batches = [(tf.constant(ids, tf.int32), tf.constant(target[:, None])) for ids, target in problem.batches()]
    train = tf.function(lambda ids, target: model.train_step((ids, target)))
    compiled = train.get_concrete_function(*batches[0])

    def step(number: int) -> None:
        compiled(*batches[number % len(batches)])["loss"].numpy()

    return step


def epsilon(variant: str, problem: Problem) -> tuple[float, str]:
    """Epsilon, from the text of TF-Privacy's own statement."""
    statement = tensorflow_privacy.compute_dp_sgd_privacy_statement(
        number_of_examples=problem.examples,
        batch_size=problem.batch,
        num_epochs=problem.steps * problem.batch / problem.examples,
        noise_multiplier=problem.noise_multiplier,
        delta=problem.delta,
        used_microbatching=False,
    )
    match = re.search(r"Epsilon assuming Poisson sampling \(\*\):\s+([0-9.]+|inf)", statement)
    assert match is not None, statement
    return float(match[1]), "rdp"


class TiedOutput(tf.keras.layers.Layer):
    """Logits of all rows of a table, as a layer that owns the table too."""

    def __init__(self, emb: Any) -> None:
        super().__init__(name="tied")
        self.emb = emb

    def call(self, inputs: Any) -> Any:
        return tf.matmul(tf.reduce_sum(inputs, 1), self.emb.embeddings, transpose_b=True)


class AddPositions(tf.keras.layers.Layer):
    def __init__(self, values: np.ndarray) -> None:
        super().__init__(name="pos")
        self.embeddings = self.add_weight(
            "embeddings", shape=values.shape, initializer=lambda shape, dtype: tf.constant(values)
        )

    def call(self, inputs: Any) -> Any:
        return inputs + tf.gather(self.embeddings, tf.range(tf.shape(inputs)[1]))[None]


def clipped_sum(variant: str, case: Case) -> dict[str, np.ndarray]:
    """The two ties are a layer of one's own, and a Lambda layer, which does not own the table that it uses."""
    weights, length = case.weights, case.ids.shape[1]
    rows, dim = weights["emb.weight"].shape
    emb = table(rows, dim, lambda: tf.constant(weights["emb.weight"]), length)
    summed, flat = keras.layers.Lambda(lambda x: tf.reduce_sum(x, 1)), keras.layers.Flatten()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if case.kind == "module tie":
        layers = [TiedOutput(emb)]
    elif case.kind == "functional tie":
        layers = [summed, keras.layers.Lambda(lambda x: tf.matmul(x, emb.embeddings, transpose_b=True))]
    elif case.kind == "bag":
        layers = [summed, dense(weights, "out")]
    elif case.kind == "positions":
        layers = [AddPositions(weights["pos.weight"]), flat, dense(weights, "out")]
    elif case.kind == "model":
        layers = [flat, dense(weights, "hidden", "relu"), dense(weights, "out")]
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
    else:
        layers = [flat, dense(weights, "out")]
    exact = Problem(rows=1, batch=len(case.ids), lr=1.0, noise_multiplier=0.0, clip=case.clip)
    layers = [keras.layers.Input((length,), dtype=tf.int32), emb, *layers]
    model = make_private(variant, layers, loss, exact, 0.0)
    before = _weights(model)
    model.train_step((tf.constant(case.ids, tf.int32), tf.constant(case.target[:, None])))
    return {name: len(case.ids) * (before[name] - value) for name, value in _weights(model).items()}


def _weights(model: Any) -> dict[str, np.ndarray]:
    """The weights by PyTorch's names; a table that two layers own counts as the first one's."""
    variables = {
        variable.ref(): (layer.name, variable) for layer in reversed(model.layers) for variable in layer.weights
    }
    weights = {}
    for layer, variable in variables.values():
        value = variable.numpy()
        weights[f"{layer}.bias" if "bias" in variable.name else f"{layer}.weight"] = (
            value.T if "kernel" in variable.name else value
        )
    return weights


if __name__ == "__main__":
    versions = {"tensorflow-privacy": tensorflow_privacy.__version__, "tensorflow": tf.__version__}
    main(Peer(lambda: versions, make_step, epsilon, clipped_sum))
