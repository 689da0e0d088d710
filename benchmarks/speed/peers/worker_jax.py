"""JAX Privacy: its `clipped_grad` and `gaussian_privatizer` in one compiled step that reuses the weights' memory (donated).

The gradient of a table is dense, and every example's is written out by `vmap`. Without `microbatch_size` most tables here
would not fit into memory; a small one was as quick as any. Other options are JAX Privacy's defaults (`nan_safe` is on).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from problem import Case, Problem
from worker import Peer, importing, main

with importing():
    import jax
    import jax.numpy as jnp
    import jax_privacy
    from jax_privacy import accounting, noise_addition

Weights = dict[str, Any]
MICROBATCH = 8


def _linear(weights: Weights, name: str, inputs: Any) -> Any:
    return weights[f"{name}.weight"] @ inputs + weights[f"{name}.bias"]


def model_loss(weights: Weights, ids: Any, target: Any) -> Any:
    """The loss of one example: ids [ids], target scalar."""
    hidden = jax.nn.relu(_linear(weights, "hidden", weights["emb.weight"][ids].reshape(-1)))
    logit = _linear(weights, "out", hidden)[0]
    return jax.nn.softplus(logit) - target * logit


def make_step(variant: str, problem: Problem) -> Callable[[int], None]:
    clipped = jax_privacy.clipped_grad(
        model_loss,
        l2_clip_norm=problem.clip,
        batch_argnums=(1, 2),
        keep_batch_dim=False,
        microbatch_size=MICROBATCH,
    )
    privatizer = noise_addition.gaussian_privatizer(stddev=problem.noise_multiplier * clipped.sensitivity())

    def update(weights: Weights, noise: Any, ids: Any, target: Any) -> tuple[Weights, Any]:
        noisy, noise = privatizer.update(clipped(weights, ids, target), noise)
        return {name: w - problem.lr / problem.batch * noisy[name] for name, w in weights.items()}, noise

    block = jnp.asarray(problem.block())
    repeats = -(-problem.rows // len(block))
    table = jax.jit(lambda block: jnp.tile(block, (repeats, 1))[: problem.rows])(block)
    weights = {"emb.weight": table, **{name: jnp.asarray(value) for name, value in problem.layers().items()}}
    state = weights, privatizer.init(weights)
    batches = [(jnp.asarray(ids, jnp.int32), jnp.asarray(target)) for ids, target in problem.batches()]
    compiled = jax.jit(update, donate_argnums=(0, 1)).lower(*state, *batches[0]).compile()

    def step(number: int) -> None:
        nonlocal state
        state = jax.block_until_ready(compiled(*state, *batches[number % len(batches)]))

    del table, weights
    return step


def epsilon(variant: str, problem: Problem) -> tuple[float, str]:
    """Epsilon by the accountant of JAX Privacy's own training loop (`keras_api`)."""
    accountant = accounting.DpsgdTrainingAccountant(dp_accountant_config=accounting.PldAccountantConfig())
    parameters = accounting.DpParams(
        noise_multipliers=problem.noise_multiplier,
        batch_size=problem.batch,
        num_samples=problem.examples,
        delta=problem.delta,
    )
    return float(accountant.compute_epsilon(problem.steps, parameters)), "pld"


def case_loss(case: Case) -> Callable[..., Any]:
    def loss(weights: Weights, ids: Any, target: Any) -> Any:
        embedded = weights["emb.weight"][ids]
        if case.kind.endswith("tie"):
            logits = weights["emb.weight"] @ embedded.sum(0)
        elif case.kind == "bag":
            logits = _linear(weights, "out", embedded.sum(0))
        elif case.kind == "positions":
            logits = _linear(weights, "out", (embedded + weights["pos.weight"]).reshape(-1))
        else:
            logits = _linear(weights, "out", embedded.reshape(-1))
        return jax.nn.logsumexp(logits) - logits[target]

    return model_loss if case.kind == "model" else loss


def clipped_sum(variant: str, case: Case) -> dict[str, np.ndarray]:
    clipped = jax_privacy.clipped_grad(
        case_loss(case), l2_clip_norm=case.clip, batch_argnums=(1, 2), keep_batch_dim=False
    )
    weights = {name: jnp.asarray(value) for name, value in case.weights.items()}
    return {name: np.asarray(value) for name, value in clipped(weights, case.ids, case.target).items()}


if __name__ == "__main__":
    versions = {"jax-privacy": jax_privacy.__version__, "jax": jax.__version__}
    main(Peer(lambda: versions, make_step, epsilon, clipped_sum))
