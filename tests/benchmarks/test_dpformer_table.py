"""The DPFormer paper's Table 1: which run stands for the control that is tried at several rates."""

from __future__ import annotations

from benchmarks.dpformer.table import Run, with_one_control


def run(variant: str, chooses: float, ndcg: float) -> Run:
    return Run(variant, None, {"ndcg@10": ndcg, "validation": {"ndcg@10": chooses}}, [(30.0, ndcg)])


def test_the_control_is_the_one_that_the_validation_half_chooses() -> None:
    frozen = run("frozen", 0.9, 0.9)
    runs = [run("non_private", 0.04, 0.09), frozen, run("non_private", 0.06, 0.05), run("non_private", 0.05, 0.08)]
    assert with_one_control(runs) == [frozen, runs[2]]
    assert with_one_control([frozen]) == [frozen]
