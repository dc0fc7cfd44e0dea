"""A transformers.Trainer's program trains to the same losses in worldsize; unsupported programs are refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers

from tests.plugins import hf_programs as programs
from tests.plugins.hf_reference import ACCUMULATED, config, recipe, trained_by_transformers, values
from worldsize.core import ConfigError
from worldsize.testing.port import same_losses


@pytest.fixture(autouse=True)
def folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to an empty folder: a Trainer creates its output_dir in the current one."""
    monkeypatch.chdir(tmp_path)


def test_losses_and_weights_are_those_of_the_trainer() -> None:
    make = programs.make_causal
    same_losses(recipe(make), trained_by_transformers(make), config())


def test_accumulated_gradients_are_those_of_the_trainer() -> None:
    """Batches have unequal lengths, so a mean of means would be a different gradient."""
    make = partial(programs.make_causal, **ACCUMULATED)
    own = recipe(make, run=values(logical_ranks=4))
    same_losses(own, trained_by_transformers(make, 4), config(4), tolerance=2e-6)


def test_the_evaluated_loss_is_that_of_the_trainer() -> None:
    own, trainer = recipe(programs.make_classifier), programs.make_classifier()
    model, data = own.model().eval(), own.data("test")
    trainer.model.load_state_dict(model.state_dict())
    total = torch.zeros(2, dtype=torch.float64)
    for first in range(0, len(data), 8):
        rows = [data[index] for index in range(first, min(first + 8, len(data)))]
        with torch.no_grad():
            total += torch.stack(own.evaluate(model, own.collate(rows))["loss"]).double()
    assert float(total[0] / total[1]) == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-6)


class Weighted(transformers.Trainer):
    """A Trainer with a custom loss, as in programs that weight classes."""

    def compute_loss(  # type: ignore[override]
        self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weights = torch.tensor([1.0, 2.0, 3.0])
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels, weight=weights)
        return (loss, outputs) if return_outputs else loss


def test_a_loss_of_the_programs_own_is_computed() -> None:
    own, trainer = recipe(partial(programs.make_classifier, kind=Weighted)), programs.make_classifier(kind=Weighted)
    model, data = own.model(), own.data("train")
    batch = own.collate([data[index] for index in range(5)])
    assert torch.equal(own.loss(model, batch), trainer.compute_loss(model, dict(batch)))  # type: ignore[arg-type]


def test_weights_decay_and_biases_and_norms_do_not() -> None:
    own = recipe(programs.make_classifier)
    model = own.model()
    decaying, others = own.optimizer(model).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert decaying["weight_decay"] == 0.1
    assert all("bias" not in names[id(each)] and "LayerNorm" not in names[id(each)] for each in decaying["params"])
    assert others["weight_decay"] == 0.0
    assert len(decaying["params"]) + len(others["params"]) == len(names)


def test_initial_weights_follow_from_the_seed_and_random_numbers_stay_as_they_were() -> None:
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    first, again = (recipe(programs.make_classifier).model().state_dict() for _ in range(2))
    other = recipe(programs.make_classifier, run=values(seed=7), run_decides=True).model().state_dict()
    assert torch.equal(torch.random.get_rng_state(), state)
    name = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])


def test_a_process_of_several_builds_the_trainer_as_if_it_were_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    own = recipe(partial(programs.make_classifier, use_cpu=False))
    assert {parameter.device.type for parameter in own.model().parameters()} == {"cpu"}
    assert not torch.distributed.is_initialized()


def test_a_stream_of_datasets_loses_its_columns_too() -> None:
    def make() -> Any:
        trainer = programs.make_causal()
        stream = trainer.train_dataset.to_iterable_dataset()
        return transformers.Trainer(trainer.model, trainer.args, programs.spoken, stream)

    own = recipe(make)
    rows = list(own.data("train").take(3))
    assert "row" in rows[0]
    assert set(own.collate(rows)) == {"input_ids", "attention_mask", "labels"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torch_compile": True, "torch_compile_backend": "eager"}, r"TrainingArguments\(torch_compile=True\)"),
        ({"neftune_noise_alpha": 5.0}, r"TrainingArguments\(neftune_noise_alpha=5.0\).*Remove it"),
        ({"average_tokens_across_devices": False}, "over the tokens of all devices"),
        ({"full_determinism": True}, "reproducibility=deterministic"),
        ({"optim": "adafactor"}, r"TrainingArguments\(optim='adafactor'\)"),
        (
            {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"},
            "the learning rate must depend only on the step",
        ),
        ({"deepspeed_of_a_later_version": True}, "unexpected keyword"),
        ({"learning_rate": 0.5}, r"have lr=0.5; the run has lr=0.001. Set lr=0.5, or recipe.run_decides=true"),
        ({"max_steps": -1, "num_train_epochs": 2}, "Set epochs=2,? ?or recipe.run_decides"),
        ({"bf16": True, "max_grad_norm": 0}, "Set clip_norm=null precision=bf16, or"),
        ({"per_device_train_batch_size": 3}, "Set batch_size=3, or"),
        (ACCUMULATED, "Set logical_ranks=4, or"),
    ],
)
def test_arguments_that_would_not_be_carried_out_are_refused(changes: dict[str, Any], message: str) -> None:
    error = TypeError if "unexpected" in message else ConfigError
    with pytest.raises(error, match=message):
        recipe(partial(programs.make_classifier, **changes))


class Stepping(transformers.Trainer):
    def training_step(self, *arguments: Any, **options: Any) -> Any:
        return super().training_step(*arguments, **options)


class Told(transformers.TrainerCallback):
    pass


def with_callback() -> Any:
    trainer = programs.make_classifier()
    trainer.add_callback(Told())
    return trainer


def stopping_early() -> Any:
    trainer = programs.make_classifier()
    trainer.add_callback(transformers.EarlyStoppingCallback())
    return trainer


def with_optimizer() -> Any:
    trainer = programs.make_classifier()
    trainer.create_optimizer()
    return trainer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(programs.make_classifier, kind=Stepping), "Stepping.training_step is not called.*compute_loss"),
        (with_callback, r"callbacks=\[Told\]"),
        (stopping_early, r"callbacks=\[EarlyStoppingCallback\]"),
        (with_optimizer, r"optimizers=.*optimizer_cls_and_kwargs"),
        (programs.classifier, "returned a BertForSequenceClassification, expected a transformers.Trainer"),
    ],
)
def test_programs_with_more_than_worldsize_carries_out_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(make)


BUILT_EARLY: Any = None


def built_early() -> Any:
    return BUILT_EARLY


def test_a_trainer_that_was_built_before_the_seed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "BUILT_EARLY", programs.make_classifier())
    with pytest.raises(ConfigError, match="built at import time"):
        recipe(built_early)


def test_a_run_may_decide_where_arguments_differ() -> None:
    own = recipe(programs.make_classifier, run=values(lr=0.25, steps=3, batch_size=6), run_decides=True)
    assert {group["lr"] for group in own.optimizer(own.model()).param_groups} == {0.25}


def test_arguments_that_only_log_and_save_are_of_no_matter() -> None:
    changes: dict[str, Any] = {
        "save_steps": 7,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "output_dir": "elsewhere",
        "run_name": "n",
    }
    assert isinstance(recipe(partial(programs.make_classifier, **changes)).data("train"), datasets.Dataset)
