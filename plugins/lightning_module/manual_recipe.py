"""Train a LightningModule with manual optimization, as used for GANs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar, final
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from plugins.lightning_module.coroutine import Coroutine
from plugins.lightning_module.manual import ManualOptimizers, ManualStep
from plugins.lightning_module.optimization import ManualSchedule, call_configure_optimizers
from plugins.lightning_module.program import LightningProgram
from plugins.lightning_module.step_log import training_metrics
from plugins.lightning_module.step_module import StepModule, evaluation_metrics, takes_index
from worldsize.core import Batch, ConfigError, Metrics, MultiUpdateRecipe, StateMetric, Update


@final
class ManualLightningRecipe(MultiUpdateRecipe):
    """Trains a module with ``automatic_optimization = False``, i.e. one that steps its optimizers itself.

    ``training_step`` runs in a thread that pauses at each optimizer step until the gradient is reduced over all ranks.
    """

    remembers: ClassVar[bool] = True  # module attributes; the module also advances its schedules

    def __init__(self, program: LightningProgram) -> None:
        self._program = program
        self.evaluation_split = program.evaluation_split
        self._made: WeakKeyDictionary[nn.Module, ManualOptimizers] = WeakKeyDictionary()

    def model(self) -> nn.Module:
        """Return the module, wrapped for use by strategies."""
        return self._program.new_module()

    def optimizers(self, model: nn.Module) -> Mapping[str, Optimizer]:
        """Return the optimizers of ``configure_optimizers``, named after the submodules they train."""
        assert isinstance(model, StepModule)
        model.connect_modules(is_manual=True)
        made = call_configure_optimizers(model.lightning)
        for optimizer in made.optimizers:
            if isinstance(optimizer, LBFGS):
                raise ConfigError(
                    f"{type(model.lightning).__name__}.configure_optimizers returned LBFGS, which computes several "
                    "gradients per step; only one is supported. Use a different optimizer, such as Adam."
                )
        named = dict(zip(_name_optimizers(model, made.optimizers), made.optimizers, strict=True))
        parameters = {name: frozenset(map(id, _parameters(each))) for name, each in named.items()}
        known = frozenset(map(id, model.parameters()))
        self._made[model] = ManualOptimizers(named, parameters, known, made)
        return named

    def schedules(self, optimizers: Mapping[str, Optimizer]) -> Mapping[str, LRScheduler]:
        """Return the module's schedules, which the module advances itself."""
        parameters = {name: frozenset(map(id, _parameters(each))) for name, each in optimizers.items()}
        (made,) = (each for each in self._made.values() if each.parameters == parameters)
        named = list(zip(optimizers, made.configured.optimizers, strict=True))
        schedules: dict[str, ManualSchedule] = {}
        for own in made.configured.schedules:  # in the order of lr_schedulers()
            (name,) = (name for name, optimizer in named if made.configured.find_schedule(optimizer) is own)
            schedules[name] = ManualSchedule(own, optimizers[name])
        made.optimizers, made.schedules = dict(optimizers), schedules
        return schedules

    def data(self, split: str) -> Any:
        """Return the DataLoaders' data sets, as with automatic optimization."""
        return self._program.get_split(split)

    def collate(self, samples: list[Any]) -> Batch:
        """Collate samples of a stream; map-style data sets have their DataLoader's collate_fn."""
        return self._program.collate(samples)

    def updates(self, model: nn.Module, batch: Batch, step: int) -> Generator[Update, None, Metrics]:
        """Yield each optimizer step of ``training_step``; return its logged values."""
        assert isinstance(model, StepModule)
        made = self._made[model]
        if made.first_step is None:
            made.first_step = step
        coroutine = Coroutine(lambda: self._run_training_step(current, model, batch, step))
        current = ManualStep(made, model, coroutine.give_item, step)
        with made.attributes.isolate_micro_batch(model.lightning) as view:
            try:
                while view.call_with_attributes(coroutine.advance):
                    yield coroutine.take_item()
            finally:
                view.call_with_attributes(coroutine.close)
        return training_metrics(current.log.take_values())

    def _run_training_step(self, current: ManualStep, model: StepModule, batch: Batch, step: int) -> None:
        """Run the module's training step, and ``on_train_epoch_end`` when an epoch ends."""
        positions = self._program.positions
        method = model.prepare_step("training_step", batch, step=step)
        model.step_log.take_values()  # clear it: the step has its own log
        current.log.start_step(batch)
        with current.activate_step():
            moved = model.apply_transfer_hooks(batch)
            if takes_index(method):
                method(moved, positions.batch_index(step))
            else:
                method(moved)
            current.log.check_numbers()
            current.finish_step(model.lightning.on_train_epoch_end if positions.ends_epoch(step) else None)

    def metrics(self) -> Mapping[str, StateMetric]:
        """Return the torchmetrics metrics among the module's submodules, by path."""
        return self._program.metrics

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[Tensor, ...]]:
        """Return values logged by the evaluation step as (sum, count); empty without one."""
        assert isinstance(model, StepModule)
        if (name := self._program.evaluation_step) is None:
            return {}
        return evaluation_metrics(model, name, batch, metrics=self._program.metrics, step=self._program.run.steps)


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _name_optimizers(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[str]:
    """Name each optimizer after the submodule of ``model`` that it trains, or else by index."""
    paths = {id(parameter): name for name, parameter in model.named_parameters()}
    names = [
        _find_common_module([paths.get(id(each), "") for each in _parameters(optimizer)]) for optimizer in optimizers
    ]
    is_clear = all(names) and max(Counter(names).values()) == 1
    return names if is_clear else [f"optimizer{place}" for place in range(len(optimizers))]


def _find_common_module(paths: Sequence[str]) -> str:
    """Return the first path component shared by all parameter ``paths``, or "" if they differ."""
    parts = {path.partition(".")[0] for path in paths}
    return parts.pop() if len(parts) == 1 else ""
