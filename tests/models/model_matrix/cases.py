"""Every case of the matrix, package by package."""

from model_matrix import (
    deepctr_models,
    hf,
    peft_models,
    pytorch_widedeep_models,
    recbole_models,
    rechub_models,
    torchfm_models,
    torchrec_models,
    xtransformers_models,
)

CASES = [
    *hf.CASES,
    *recbole_models.CASES,
    *torchfm_models.CASES,
    *deepctr_models.CASES,
    *pytorch_widedeep_models.CASES,
    *rechub_models.CASES,
    *peft_models.CASES,
    *xtransformers_models.CASES,
    *torchrec_models.CASES,
]
