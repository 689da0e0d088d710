"""transformers' TrainingArguments, field by field: what is refused in private training, and what is as in an ordinary Trainer.

A field that nobody has decided about, of a later transformers, is refused where it is not at its default.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from sparsedp.errors import UnsupportedError

_ROUNDS = "types below float32 round a unit's gradient by the others'; train in float32"
_EVALUATES = "it would change the type of the weights that are trained"
_REDUCES = "it adds up gradients that are not clipped"
_HIDES = "capture would not see the uses of parameters"
_DIVIDES = "PrivateTrainer trains in one process on one device"
REFUSED = {  # fields, and why they are refused where they are set
    "fp16": _ROUNDS,
    "bf16": _ROUNDS,
    "tf32": _ROUNDS,
    "fp16_full_eval": _EVALUATES,
    "bf16_full_eval": _EVALUATES,
    "max_grad_norm": "it would clip the batch's gradient; give each unit's bound as PrivacySettings(max_grad_norm=...)",
    "train_sampling_strategy": "batches are Poisson samples; leave it at 'random'",
    "data_seed": "batches are drawn from the engine's key; PrivacyEngine(seed=...) repeats a test",
    "accelerator_config.dispatch_batches": "the private loader reads by itself",
    "accelerator_config.split_batches": "the private loader reads by itself",
    "accelerator_config.gradient_accumulation_kwargs": "gradient_accumulation_steps says how a batch is divided",
    "parallelism_config": _DIVIDES,
    "deepspeed": _REDUCES,
    "fsdp": _REDUCES,
    "torch_compile": _HIDES,
    "optim": "it moves weights during backward, by gradients that are not clipped",
    "optim_target_modules": "its optimizers take gradients where they arrive; private ones arrive in the step",
    "neftune_noise_alpha": "its noise depends on the lengths of all texts of a batch",
    "gradient_checkpointing": "capture sees a use of a parameter once; lower per_device_train_batch_size to save memory",
    "label_smoothing_factor": "it divides by the valid tokens of the whole batch",
    "use_liger_kernel": _HIDES,
    "auto_find_batch_size": "the expected batch size is public; lower per_device_train_batch_size to save memory",
    "dataloader_drop_last": "Poisson samples have no last batch",
    "include_num_input_tokens_seen": "a count of the data's tokens would leave with the trainer's state",
    "load_best_model_at_end": "weights would come back without their ledger; load the checkpoint you choose after training",
    "save_only_model": "a checkpoint without the ledger cannot be resumed; save_model() writes the model alone",
    "hub_strategy": "checkpoints hold private state; push the model alone",
    "enable_jit_checkpoint": "it would write in the middle of a step",
}
# What the private loader, optimizer and loop make of them is said in docs/transformers.md.
_MAPPED = {
    "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps", "ignore_data_skip",
    "report_to", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor",
    "dataloader_multiprocessing_context", "dataloader_in_order", "remove_unused_columns", "push_to_hub", "accelerator_config",
}  # fmt: skip
_AS_IN_TRAINER = {
    # optimizer and schedule
    "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim_args", "weight_decay", "adam_beta1",
    "adam_beta2", "adam_epsilon",
    # logging, evaluation, checkpoints, the hub
    "output_dir", "logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node", "logging_nan_inf_filter",
    "log_level", "log_level_replica", "disable_tqdm", "run_name", "project", "trackio_space_id", "trackio_bucket_id",
    "trackio_static_space_id", "eval_strategy", "eval_steps", "eval_delay", "per_device_eval_batch_size", "prediction_loss_only",
    "eval_on_start", "eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps", "include_for_metrics",
    "batch_eval_metrics", "save_strategy", "save_steps", "save_on_each_node", "save_total_limit", "hub_token", "hub_private_repo",
    "hub_model_id", "hub_always_push", "hub_revision", "metric_for_best_model", "greater_is_better",
    "restore_callback_states_from_checkpoint", "label_names", "skip_memory_metrics", "debug",
    # the process
    "full_determinism", "seed", "use_cpu", "use_cache", "torch_empty_cache_steps", "do_train", "do_eval", "do_predict",
    "resume_from_checkpoint",
    # details of what is refused, or of several processes, which are
    "average_tokens_across_devices", "gradient_checkpointing_kwargs", "torch_compile_backend", "torch_compile_mode",
    "liger_kernel_config", "length_column_name", "fsdp_config", "local_rank", "ddp_find_unused_parameters", "ddp_bucket_cap_mb",
    "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend", "ddp_timeout",
}  # fmt: skip
DECIDED = _MAPPED | _AS_IN_TRAINER | {name.partition(".")[0] for name in REFUSED}


def refuse_arguments(args: Any) -> None:
    """Raises for what would break the guarantee, or what would be ignored."""
    accelerator = args.accelerator_config
    strategy = str(getattr(args, "train_sampling_strategy", "random")).rpartition(".")[2].lower()
    optimizer = str(getattr(args.optim, "value", args.optim)).lower()
    wanted = {
        "fp16": args.fp16,
        "bf16": args.bf16,
        "tf32": args.tf32,
        "fp16_full_eval": args.fp16_full_eval,
        "bf16_full_eval": args.bf16_full_eval,
        "max_grad_norm": args.max_grad_norm not in (None, 0, 1.0),
        "train_sampling_strategy": strategy not in ("random", "sequential"),
        "data_seed": args.data_seed is not None,
        "accelerator_config.dispatch_batches": getattr(accelerator, "dispatch_batches", None),
        "accelerator_config.split_batches": getattr(accelerator, "split_batches", False),
        "accelerator_config.gradient_accumulation_kwargs": getattr(accelerator, "gradient_accumulation_kwargs", None),
        "parallelism_config": getattr(args, "parallelism_config", None),
        "deepspeed": args.deepspeed,
        "fsdp": args.fsdp,
        "torch_compile": args.torch_compile,
        "optim": "lomo" in optimizer or optimizer.endswith("layerwise"),
        "optim_target_modules": args.optim_target_modules,
        "neftune_noise_alpha": args.neftune_noise_alpha,
        "gradient_checkpointing": args.gradient_checkpointing,
        "label_smoothing_factor": args.label_smoothing_factor,
        "use_liger_kernel": args.use_liger_kernel,
        "auto_find_batch_size": args.auto_find_batch_size,
        "dataloader_drop_last": args.dataloader_drop_last,
        "include_num_input_tokens_seen": str(args.include_num_input_tokens_seen) not in ("no", "False"),
        "load_best_model_at_end": args.load_best_model_at_end,
        "save_only_model": args.save_only_model and args.save_strategy != "no",
        "hub_strategy": args.push_to_hub and "checkpoint" in str(args.hub_strategy).lower(),
        "enable_jit_checkpoint": getattr(args, "enable_jit_checkpoint", False),
    }
    for name, is_wanted in wanted.items():
        if is_wanted:
            raise UnsupportedError(f"TrainingArguments.{name} is not available in private training: {REFUSED[name]}.")
    for field in fields_of(type(args)):
        if field.name not in DECIDED and not _is_default(field, getattr(args, field.name)):
            raise UnsupportedError(
                f"TrainingArguments.{field.name} is new in this version of transformers, and what it does in private training is "
                "not known: leave it at its default."
            )
    if args.world_size > 1 or args.n_gpu > 1:
        raise UnsupportedError(f"{_DIVIDES}. For tables that outgrow it, see docs/distributed.md.")


def fields_of(kind: type) -> list[dataclasses.Field]:
    """The fields that transformers has, without those of somebody's subclass."""
    own = next((base for base in kind.__mro__ if base.__module__.partition(".")[0] == "transformers"), kind)
    return list(dataclasses.fields(own)) if dataclasses.is_dataclass(own) else []


def _is_default(field: dataclasses.Field, value: Any) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return bool(value is field.default or value == field.default)
