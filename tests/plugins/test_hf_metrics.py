"""A Trainer's compute_metrics has the values of Trainer.evaluate() on the same weights, at every world size."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy
import pytest
import torch
import transformers
from sklearn.metrics import accuracy_score, f1_score
from torch import Tensor

from plugins.parameter_server.strategy import ParameterServer
from tests.plugins import hf_programs as programs
from tests.plugins.hf_reference import Make, recipe, values
from worldsize.api.custom_loop import evaluate
from worldsize.core import ConfigError, Numerics, RunContext, Strategy, World
from worldsize.data.batches import get_collate_fn
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.single import Single
from worldsize.testing.worlds import run_in_worlds

ROWS = 29  # four batches, the last one short


@pytest.fixture(autouse=True)
def folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to an empty folder: a Trainer creates its output_dir in the current one."""
    monkeypatch.chdir(tmp_path)


def scores(prediction: Any) -> dict[str, Any]:
    """Compute accuracy and F1 like a program: with numpy scalars, and one name with the Trainer's prefix."""
    chosen, labels = prediction.predictions.argmax(-1), prediction.label_ids
    return {
        "accuracy": accuracy_score(labels, chosen),
        "eval_f1": numpy.float64(f1_score(labels, chosen, average="macro", zero_division=0)),
        "rows": torch.tensor(len(labels)),
    }


def facts(prediction: Any) -> dict[str, float]:
    """Return the structure, the order and the padding of compute_metrics' input."""
    told: dict[str, float] = {}
    for name in ("predictions", "label_ids", "inputs", "losses"):
        given = getattr(prediction, name)
        arrays = [] if given is None else given if isinstance(given, tuple) else (given,)
        told[f"{name}_is_tuple"] = float(isinstance(given, tuple))
        for place, array in enumerate(arrays):
            numbers = array.astype(numpy.float64).ravel()
            told[f"{name}_{place}_sum_by_place"] = numbers @ numpy.arange(1, len(numbers) + 1)
            told[f"{name}_{place}_padding"] = (array == -100).sum()
            told |= {f"{name}_{place}_dimension_{axis}": size for axis, size in enumerate(array.shape)}
    return told


def classifier(
    *, compute: Any = scores, kind: Any = transformers.Trainer, preprocess: Any = None, **changes: Any
) -> Any:
    return kind(
        model=programs.classifier(),
        args=programs.arguments(per_device_eval_batch_size=8, **changes),
        train_dataset=programs.rows(),
        eval_dataset=programs.rows(ROWS, seed=2),
        data_collator=programs.padded,
        compute_metrics=compute,
        preprocess_logits_for_metrics=preprocess,
    )


def tagger(*, preprocess: Any = None, **changes: Any) -> Any:
    """Return a Trainer that labels each word: logits and labels are as wide as the longest of their batch."""
    config = programs.classifier().config
    config.num_labels = config.vocab_size
    return transformers.Trainer(
        model=transformers.BertForTokenClassification(config),
        args=programs.arguments(per_device_eval_batch_size=8, **changes),
        train_dataset=programs.rows(),
        eval_dataset=programs.rows(ROWS, seed=2),
        data_collator=programs.spoken,
        compute_metrics=facts,
        preprocess_logits_for_metrics=preprocess,
    )


def pair(*, kind: Any = transformers.Seq2SeqTrainer, rows: int = 24, **changes: Any) -> Any:
    """Return a Trainer whose model has two outputs, logits and the encoder's.

    Its batches are all full by default: a Seq2SeqTrainer counts a short one as a full one.
    """
    return kind(
        model=programs.pair(),
        args=programs.arguments(transformers.Seq2SeqTrainingArguments, per_device_eval_batch_size=8, **changes),
        train_dataset=programs.rows(),
        eval_dataset=programs.rows(rows, seed=2),
        data_collator=programs.spoken,
        compute_metrics=facts,
    )


def questions(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    batch = programs.padded([{"input_ids": sample["input_ids"]} for sample in samples])
    ends = torch.tensor([len(sample["input_ids"]) - 1 for sample in samples])
    return {**batch, "start_positions": ends // 2, "end_positions": ends}


def answerer(**changes: Any) -> Any:
    """Return a Trainer with two labels, the start and end of an answer."""
    config = programs.classifier().config
    config.num_labels = 2
    return transformers.Trainer(
        model=transformers.BertForQuestionAnswering(config),
        args=programs.arguments(per_device_eval_batch_size=8, remove_unused_columns=False, **changes),
        train_dataset=programs.rows().remove_columns(["label", "row"]),
        eval_dataset=programs.rows(ROWS, seed=2).remove_columns(["label", "row"]),
        data_collator=questions,
        compute_metrics=facts,
    )


class Weighted(transformers.Trainer):
    """A Trainer with a custom loss that takes the labels out of its inputs."""

    def compute_loss(  # type: ignore[override]
        self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels, weight=torch.tensor([1.0, 2.0, 3.0]))
        return (loss, {"loss": loss, **outputs}) if return_outputs else loss


def most_likely(logits: Tensor, labels: Tensor) -> Tensor:
    assert logits.shape[:-1] == labels.shape
    return logits.argmax(-1)


PROGRAMS: Mapping[str, Make] = {
    "accuracy and F1": classifier,
    "all that is given": partial(classifier, compute=facts, include_for_metrics=["inputs", "loss"]),
    "label smoothing": partial(classifier, label_smoothing_factor=0.1),
    "own loss": partial(classifier, kind=Weighted, compute=facts),
    "ragged": partial(tagger, include_for_metrics=["inputs"]),
    "ragged, preprocessed": partial(tagger, preprocess=most_likely),
    "two outputs": partial(pair, kind=transformers.Trainer, rows=ROWS),
    "two outputs of pairs": pair,
    "two labels": answerer,
}


def evaluated_by(make: Make, strategy: Strategy, world: World, precision: Any = "fp32") -> Mapping[str, float]:
    own = recipe(make, run=values(precision=precision))
    replica = strategy.replica(own, RunContext(world, Numerics(precision=precision)))
    return evaluate(replica, own.data("test"), world, batch_size=8, collate=get_collate_fn(own))


def alone() -> World:
    return World.create_single(torch.device("cpu"))


def evaluated_by_transformers(make: Make) -> dict[str, float]:
    """Call Trainer.evaluate() with the recipe's initial weights."""
    weights = recipe(make).model().state_dict()
    trainer = make()
    trainer.model.load_state_dict(weights)
    figures = {name.removeprefix("eval_"): value for name, value in trainer.evaluate().items()}
    timed = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "epoch")
    return {name: value for name, value in figures.items() if name not in timed}


@pytest.mark.parametrize("make", PROGRAMS.values(), ids=PROGRAMS)
def test_figures_are_those_of_the_trainer(make: Make) -> None:
    expected = evaluated_by_transformers(make)
    figures = evaluated_by(make, Single(), alone())
    assert figures.keys() == expected.keys()
    assert figures == pytest.approx(expected, rel=1e-6)
    for name in ("accuracy", "f1", "rows"):
        assert figures.get(name) == expected.get(name)


def test_the_programs_tell_unequal_lengths_and_several_outputs_apart() -> None:
    """Otherwise the comparison would not show that these are passed on."""
    ragged = evaluated_by_transformers(PROGRAMS["ragged"])
    assert min(ragged[f"{name}_0_padding"] for name in ("predictions", "label_ids", "inputs")) > 0
    assert evaluated_by_transformers(pair)["predictions_is_tuple"]
    assert evaluated_by_transformers(answerer)["label_ids_is_tuple"]
    told = evaluated_by_transformers(PROGRAMS["all that is given"])
    assert (told["losses_0_dimension_0"], told["inputs_0_dimension_0"]) == (ROWS, ROWS)


@pytest.mark.parametrize("name", ["accuracy and F1", "ragged"])
@pytest.mark.parametrize(("strategy", "processes"), [(DDP(), 2), (FSDP(), 2), (DDP(), 5)], ids=["ddp", "fsdp", "idle"])
def test_processes_compute_the_figures_of_one(name: str, strategy: Strategy, processes: int) -> None:
    """Five processes have four batches."""
    make = PROGRAMS[name]
    figures = run_in_worlds(lambda world: evaluated_by(make, strategy, world), processes)
    assert figures == [evaluated_by(make, Single(), alone())] * processes


def test_halves_are_cast_as_under_the_trainer() -> None:
    make = partial(classifier, compute=lambda each: {"bytes": each.predictions.dtype.itemsize})
    assert evaluated_by(partial(make, bf16=True), Single(), alone(), "bf16")["bytes"] == 4
    trainer = make(bf16=True)
    assert trainer.evaluate()["eval_bytes"] == 4


@pytest.mark.parametrize(
    "changes", [{"prediction_loss_only": True}, {"label_names": []}], ids=["loss only", "no labels"]
)
def test_what_the_trainer_would_not_call_is_not_called(changes: dict[str, Any]) -> None:
    make = partial(classifier, **changes)
    assert not evaluated_by_transformers(make).keys() & {"accuracy", "f1"}
    assert recipe(make).metrics() == {}


def several(prediction: Any) -> dict[str, Any]:
    return {"by_class": [0.5, 0.25]}


def loss_too(prediction: Any) -> dict[str, Any]:
    return {"eval_loss": 1.0}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(classifier, compute=several), "compute_metrics returned a list for 'by_class', expected a number"),
        (partial(classifier, compute=loss_too), "two metrics named 'loss'. Rename one of them"),
        (
            partial(classifier, label_names=["labels", "weights"]),
            "the evaluation batches do not contain 'weights'. Add it",
        ),
        (
            partial(classifier, preprocess=lambda logits, labels: (logits,) * len(labels)),
            "the structure of the model's outputs differs between batches",
        ),
        (partial(classifier, preprocess=lambda logits, labels: "all"), "the model's outputs contain a str"),
    ],
    ids=["no number", "two losses", "no labels", "another form", "no tensor"],
)
def test_what_cannot_be_computed_is_told_in_a_sentence(make: Make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluated_by(make, Single(), alone())


def computed_in_turns(prediction: Any, compute_result: bool) -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(pair, predict_with_generate=True), "predict_with_generate=True.*logits, not generated tokens"),
        (
            partial(classifier, compute=computed_in_turns, batch_eval_metrics=True),
            "batch_eval_metrics=True.*is called once, with the predictions of all batches",
        ),
        (partial(classifier, eval_do_concat_batches=False), "eval_do_concat_batches=False.*receives the concatenated"),
    ],
    ids=["generated", "in turns", "lists"],
)
def test_what_is_not_carried_is_refused_before_the_start(make: Make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(make)


def test_servers_that_add_up_sums_refuse_the_metrics() -> None:
    with pytest.raises(
        ConfigError, match=r"requires metrics as \(sum, count\), but 'compute_metrics' is in Recipe.metrics"
    ):
        ParameterServer().check_recipe(recipe(classifier))


def test_without_an_eval_dataset_nothing_is_computed() -> None:
    def make() -> Any:
        trainer = classifier()
        trainer.eval_dataset = None
        return trainer

    assert isinstance(recipe(make).data("test"), datasets.Dataset)
    assert recipe(make).metrics() == {}
