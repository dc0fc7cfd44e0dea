"""A Lightning program: its module, data and DataLoaders, built as by Lightning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, final

from torch.utils.data import DataLoader

from plugins.lightning_module.building import build_component, one_at_a_time, use_seed
from plugins.lightning_module.hooks import check_hooks, find_lightning_base
from plugins.lightning_module.loaders import (
    check_loader,
    check_values,
    first_samples,
    get_loader_data,
    same_collate,
    single_loader,
)
from plugins.lightning_module.module_metrics import ModuleMetric, metrics_in
from plugins.lightning_module.positions import Positions, RunValues
from plugins.lightning_module.stand_in import RunFacts
from plugins.lightning_module.step_module import StepModule
from worldsize.core import ConfigError
from worldsize.data.batches import is_iterable

_LOADERS = {"validation": "val_dataloader", "test": "test_dataloader"}
_TRANSFERS = ("on_before_batch_transfer", "on_after_batch_transfer")


@final
@dataclass(frozen=True)
class LightningProgram:
    """The module and data that a program passes to ``lightning.Trainer.fit``.

    Args:
        make_module: creates the LightningModule from ``module_args``.
        make_datamodule: creates the LightningDataModule from ``datamodule_args``, or returns None.
        run: run settings that DataLoaders also have.
        evaluates: the step used for evaluation, "validation" or "test".
        ignore_hooks: overridden hooks that worldsize does not call, and that the program can do without.
    """

    make_module: Callable[..., Any]
    make_datamodule: Callable[..., Any]
    run: RunValues
    module_args: Mapping[str, Any] = field(default_factory=dict)
    datamodule_args: Mapping[str, Any] = field(default_factory=dict)
    evaluates: Literal["validation", "test"] = "validation"
    ignore_hooks: Sequence[str] = ()

    def check_support(self, *, run_decides: bool) -> None:
        """Raise ConfigError if the module or its data have unsupported features."""
        module, datamodule = self._sources
        check_hooks(module, datamodule, self.ignore_hooks)
        names = ["train_dataloader", *([_LOADERS[self.evaluates]] if self._evaluated else [])]
        for name, loader in zip(names, [self._train, self._evaluated], strict=False):
            if loader is not None:
                check_loader(loader, name)
        if not run_decides:
            check_values(self._train, self._evaluated, self.run)

    @cached_property
    def _sources(self) -> tuple[Any, Any]:
        """The data module and an untrained module, after ``prepare_data`` and ``setup``, to get DataLoaders from."""
        with use_seed(self.run.seed):
            datamodule = build_component(
                self.make_datamodule, self.datamodule_args, key="recipe.datamodule", base="LightningDataModule"
            )
            module = _build_module(self)
            check_hooks(module, datamodule, self.ignore_hooks)
            facts = RunFacts(self.run, Positions(None, self.run.batch_size))
            owners = [each for each in (datamodule, module) if each is not None]
            for owner in owners:
                owner.trainer = facts
            with one_at_a_time("prepare_data"):
                for owner in owners:
                    owner.prepare_data()
            for owner in owners:
                owner.setup("fit")
                if self.evaluates == "test":
                    owner.setup("test")
        return module, datamodule

    @cached_property
    def metrics(self) -> Mapping[str, ModuleMetric]:
        """Torchmetrics metrics in the module by path; empty without an evaluation step."""
        if self.evaluation_step is None:
            return {}
        return {path: ModuleMetric(metric) for path, metric in metrics_in(self._sources[0])}

    @cached_property
    def positions(self) -> Positions:
        """Positions of the run's steps within their epochs."""
        data = self._train.dataset
        return Positions(None if is_iterable(data) else len(data), self.run.batch_size)  # type: ignore[arg-type]

    @property
    def is_manual(self) -> bool:
        """Whether the module steps its optimizers itself."""
        return not self._sources[0].automatic_optimization

    def new_module(self) -> StepModule:
        """Create a module for the strategies, with new random weights."""
        module, facts = _build_module(self), RunFacts(self.run, self.positions, is_manual=self.is_manual)
        module.trainer = facts
        module.setup("fit")
        module.configure_model()
        return StepModule(module.train(), facts, _transfers(self._sources[1], module))

    @property
    def evaluation_split(self) -> str:
        """The name of the evaluated split: "val" or "test"."""
        return "val" if self.evaluates == "validation" else "test"

    @property
    def evaluation_step(self) -> str | None:
        """Name of the evaluation step. None if the module has none, or lacks data for it."""
        return f"{self.evaluates}_step" if self._evaluated is not None else None

    @cached_property
    def _train(self) -> DataLoader[Any]:
        loader = self._get_loader("train_dataloader")
        if loader is None:
            raise _create_missing_error(self._sources)
        return loader

    @cached_property
    def _evaluated(self) -> DataLoader[Any] | None:
        if not _overrides(self._sources[0], f"{self.evaluates}_step"):
            return None
        return self._get_loader(_LOADERS[self.evaluates])

    def _get_loader(self, name: str) -> DataLoader[Any] | None:
        """Return the DataLoader from the data module or the module. None if neither has one."""
        module, datamodule = self._sources
        for owner in (datamodule, module):
            if owner is not None and _overrides(owner, name):
                with use_seed(self.run.seed):
                    loaders = getattr(owner, name)()
                return None if loaders is None or loaders == [] else single_loader(loaders, name)
        return None

    def get_split(self, split: str) -> Any:
        """Return the training data for the split "train", otherwise the data of the evaluation step."""
        if split == "train":
            return get_loader_data(self._train)
        if self._evaluated is None:
            return first_samples(get_loader_data(self._train), self.run.evaluate_batch_size)
        return get_loader_data(self._evaluated)

    @property
    def collate(self) -> Callable[[list[Any]], Any]:
        """Collate function of the DataLoaders, for streams."""
        return same_collate(self._train, self._evaluated)


def _overrides(owner: Any, name: str) -> bool:
    """Return whether a program overrides a method, in the class or on the instance."""
    base = find_lightning_base(owner, "LightningModule") or find_lightning_base(owner, "LightningDataModule")
    return name in vars(owner) or getattr(type(owner), name) is not getattr(base, name)


def _create_missing_error(sources: tuple[Any, Any]) -> ConfigError:
    names = " or ".join(type(each).__name__ for each in sources if each is not None)
    return ConfigError(
        f"{names} does not have a train_dataloader. Define train_dataloader, or set recipe.datamodule to a "
        "LightningDataModule."
    )


def _build_module(program: LightningProgram) -> Any:
    return build_component(program.make_module, program.module_args, key="recipe.module", base="LightningModule")


def _transfers(datamodule: Any, module: Any) -> dict[str, Any]:
    """Return the owner of each overridden batch-transfer hook: the data module, or else the module."""
    owners = [each for each in (datamodule, module) if each is not None]
    changing = {name: [owner for owner in owners if _overrides(owner, name)] for name in _TRANSFERS}
    return {name: own[0] for name, own in changing.items() if own}
