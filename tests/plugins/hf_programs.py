"""Programs as written by users of transformers.Trainer, with small models and in-memory data."""

from __future__ import annotations

from typing import Any

import datasets
import torch
import transformers
from torch import Tensor

ROWS, BATCH, STEPS, SEED = 61, 8, 20, 42
_VOCABULARY = 50


def rows(count: int = ROWS, seed: int = 1) -> datasets.Dataset:
    """Return sentences of unequal length with a label each, and an unused column."""
    generator = torch.Generator().manual_seed(seed)

    def number(least: int, above: int) -> int:
        return int(torch.randint(least, above, (), generator=generator))

    sentences = [[number(1, _VOCABULARY) for _ in range(number(3, 12))] for _ in range(count)]
    labels = [number(0, 3) for _ in range(count)]
    return datasets.Dataset.from_dict({"input_ids": sentences, "label": labels, "row": list(range(count))})


def padded(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad the sentences of a batch."""
    assert all(set(sample) <= {"input_ids", "label"} for sample in samples)  # the others are removed
    sentences = [torch.tensor(sample["input_ids"]) for sample in samples]
    inputs = torch.nn.utils.rnn.pad_sequence(sentences, batch_first=True)
    batch = {"input_ids": inputs, "attention_mask": (inputs != 0).long()}
    return (
        {**batch, "labels": torch.tensor([sample["label"] for sample in samples])} if "label" in samples[0] else batch
    )


def spoken(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad the sentences of a batch, and use them as labels, too."""
    batch = padded([{"input_ids": sample["input_ids"]} for sample in samples])
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def arguments(kind: Any = transformers.TrainingArguments, **changes: Any) -> Any:
    given = {
        "output_dir": "out",
        "per_device_train_batch_size": BATCH,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "warmup_steps": 5,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "use_cpu": True,
    }
    return kind(**{**given, **changes})


def classifier(dropout: float = 0.0) -> Any:
    size: dict[str, Any] = {
        "vocab_size": _VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 16,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "num_labels": 3,
    }
    return transformers.BertForSequenceClassification(transformers.BertConfig(**size))


def causal() -> Any:
    size: dict[str, Any] = {"vocab_size": _VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    other = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**size, **other}))


def pair() -> Any:
    size: dict[str, Any] = {"vocab_size": _VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2}
    other = {"num_heads": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**{**size, **other}))


def make_classifier(*, kind: Any = transformers.Trainer, dropout: float = 0.0, **changes: Any) -> Any:
    model, made = classifier(dropout), arguments(**changes)
    return kind(model=model, args=made, train_dataset=rows(), eval_dataset=rows(13, seed=2), data_collator=padded)


def make_unfused() -> Any:
    return make_classifier(optim="adamw_torch")


def accuracy(prediction: Any) -> dict[str, Any]:
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


def make_measured() -> Any:
    trainer = make_classifier()
    trainer.compute_metrics = accuracy
    return trainer


def make_causal(*, kind: Any = transformers.Trainer, **changes: Any) -> Any:
    return kind(model=causal(), args=arguments(**changes), train_dataset=rows(), data_collator=spoken)


def make_pair(*, kind: Any = transformers.Seq2SeqTrainer, **changes: Any) -> Any:
    made = arguments(transformers.Seq2SeqTrainingArguments, **changes)
    return kind(model=pair(), args=made, train_dataset=rows(), data_collator=spoken)
