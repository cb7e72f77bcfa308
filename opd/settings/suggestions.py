"""Guess what a user meant by an unknown name: the nearest known name, or our name for a setting of another tool."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

FOREIGN_KEYS = {
    "learning_rate": "trainer.lr",
    "weight_decay_rate": "trainer.weight_decay",
    "max_steps": "trainer.steps",
    "num_steps": "trainer.steps",
    "total_steps": "trainer.steps",
    "batch_size": "trainer.samples_per_step",
    "train_batch_size": "trainer.samples_per_step",
    "per_device_train_batch_size": "trainer.samples_per_step",
    "global_batch_size": "trainer.samples_per_step",
    "lr_scheduler": "trainer.lr_scheduler_type",
    "scheduler": "trainer.lr_scheduler_type",
    "warmup": "trainer.warmup_steps",
    "num_warmup_steps": "trainer.warmup_steps",
    "gradient_clipping": "trainer.max_grad_norm",
    "clip_grad": "trainer.max_grad_norm",
    "beta1": "trainer.adam_beta1",
    "beta2": "trainer.adam_beta2",
    "max_tokens": "rollout.max_new_tokens",
    "max_completion_length": "rollout.max_new_tokens",
    "max_length": "rollout.max_model_len",
    "max_seq_length": "rollout.max_model_len",
    "context_length": "rollout.max_model_len",
    "num_generations": "rollout.n",
    "tensor_model_parallel_size": "rollout.tensor_parallel_size",
    "tp_size": "rollout.tensor_parallel_size",
    "model_name_or_path": "student.model",
    "base_model": "student.model",
    "model_name": "student.model",
    "teacher": "experts",
    "loss": "objective.kind",
    "loss_type": "objective.kind",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "eval_steps": "evaluate.every",
    "logging_dir": "logging.tensorboard",
    "gpus": "cluster.trainer_gpus",
}
"""Key in other tools -> our key, written from the top of a pipeline."""

NO_KEY = {
    "epochs": "remove the key: there are no epochs; trainer.steps counts optimiser steps",
    "num_epochs": "remove the key: there are no epochs; trainer.steps counts optimiser steps",
    "num_train_epochs": "remove the key: there are no epochs; trainer.steps counts optimiser steps",
    "output_dir": "remove the key: `--run-dir` says where a run goes, by default runs/NAME",
    "gradient_accumulation_steps": "remove the key: trainer.micro_batch_tokens decides how a step is divided",
    "bf16": "write trainer.dtype: bfloat16, and rollout.dtype and teachers.dtype likewise",
    "fp16": "write trainer.dtype: bfloat16; float16 is not trained in",
    "top_p": "remove the key: responses have to be samples of the student's own distribution",
    "top_k": "remove the key: responses have to be samples of the student's own distribution",
    "colocate": "remove the key: cluster.rollout_gpus, teacher_gpus and trainer_gpus below 1 put the roles on the same GPUs",
    "device": "remove the key: cluster.trainer_gpus, rollout_gpus and teacher_gpus say who has a GPU",
    "zero_stage": "remove the key: ranks always shard weights, gradients and optimiser, which is stage 3",
    "score_early": "remove the key: teachers score a step once it is written; it saved no time where it was measured",
    "partial_rollout": "remove the key: a response is written to its end by the weights that began it",
    "report_to": "write logging.wandb, logging.mlflow or logging.tensorboard",
}
"""Key in other tools for which we have none -> what to do instead, as the `fix` of an error."""


def find_nearest(word: str, candidates: Iterable[str]) -> str | None:
    """Return the known name that is most like `word`, whatever the case of letters; None if none is like it."""
    # Reversed, so that of names that differ only in case the first one wins.
    names = {name.casefold(): name for name in reversed(list(candidates))}
    near = difflib.get_close_matches(word.casefold(), names, n=1)
    return names[near[0]] if near else None


def did_you_mean(word: str, candidates: Iterable[str], otherwise: str) -> str:
    """Return the `fix` of an error about an unknown name: the nearest known name, or `otherwise` if none is near."""
    near = find_nearest(word, candidates)
    return f"did you mean `{near}`?" if near else otherwise


def suggest_key(key: str, keys: Collection[str]) -> str:
    """Return the `fix` of an error about an unknown key in a section that has the keys `keys`."""
    foreign_names = {name: path.rpartition(".")[2] for name, path in FOREIGN_KEYS.items()}
    for name in keys:
        if name == foreign_names.get(key) or foreign_names.get(name) == key:
            return f"did you mean `{name}`?"
    return did_you_mean(key, keys, NO_KEY.get(key, "remove the key"))


def suggest_key_elsewhere(key: str, all_keys: Iterable[str]) -> str | None:
    """Return the `fix` of an error about a key that belongs in another section; None if no section has it.

    `all_keys` are all keys, written from the top with dots. Only keys at the top and keys of top-level sections are
    suggested; below these too many keys have the same name.
    """
    named = FOREIGN_KEYS.get(key)
    paths = [path for path in all_keys if path == named or (path.rpartition(".")[2] == key and path.count(".") <= 1)]
    return f"did you mean `{named if named in paths else paths[0]}`?" if paths else None
