"""One rank of a run on a simulated GPU: steps, an evaluation, a save to host memory and a load from it.

``python -m tests.fake_cuda.rank LIBRARY``: each line of standard input is a run, its command-line words as
JSON; standard output gets a line of JSON for each: its error, its waits, and the tensors of its save on the device.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.checkpoint import state_dict_loader

from tests.fake_cuda.device import GPU, believe_in_devices, faked
from tests.fake_cuda.waits import OWN, Waits
from worldsize.checkpoint.format import Checkpoint, Retention
from worldsize.checkpoint.load import load_checkpoint
from worldsize.checkpoint.manifest_tree import split_tensors
from worldsize.checkpoint.save import Saver
from worldsize.collectives.per_rank import get_local_shard
from worldsize.collectives.step_timer import StepTimer
from worldsize.config.compose import compose_only
from worldsize.config.composed import build_settings
from worldsize.config.settings import Settings
from worldsize.core import EvaluationBatches, MicroBatch, Replica, RunContext, StateDict, StepResult, World
from worldsize.data.batches import get_collate_fn
from worldsize.data.loader import micro_batches
from worldsize.devices import backend_names
from worldsize.loop.agreement import Agreement, Wishes
from worldsize.loop.averaging import AveragedReplica
from worldsize.loop.fit import LoopCallbacks, LoopConfig, TrainingProgress, fit
from worldsize.plan.dry_run import world_seen_by
from worldsize.seeds import seed_generators
from worldsize.strategies.deferred.model import fill_with_fakes
from worldsize.worker.evaluation import EvaluationData, evaluate_splits

STEPS = 4
_DEFERS = ("FSDP", "Mesh")  # strategies that create the model's tensors themselves
_DEVICES = 16


def run(words: Sequence[str]) -> dict[str, Any]:
    """Run one rank, and return a record of it."""
    error, on_device = None, list[str]()
    with faked(_DEVICES) as waits:
        try:
            on_device = _run(words, waits)
        except Exception as failure:  # any error: the test reports it
            error = _described(failure)
    counts = [[*key, count] for key, count in sorted(waits.counts.items()) if key[0] != "build"]
    return {"words": list(words), "error": error, "waits": counts, "on_device": on_device}


def _run(words: Sequence[str], waits: Waits) -> list[str]:
    settings = build_settings(compose_only(list(words)))
    settings.determinism.apply("cuda")
    with world_seen_by(0, settings, GPU) as world:
        seed_generators(1, GPU)
        replica = _Phased(_built(settings, world, waits), waits)
        host: dict[str, Tensor] = {}
        saver = Saver(Path(tempfile.gettempdir()), world, None, keep=Retention(1))

        def save(progress: TrainingProgress) -> None:
            waits.phase = "save"
            host.update(saver._copy_to_host(split_tensors(replica.state())[0]))
            waits.phase = "loop"

        def evaluate(step: int) -> Mapping[str, float]:
            waits.phase = "evaluation"
            data = EvaluationData(settings.recipe, settings.training, settings.evaluation.batches)
            metrics = evaluate_splits(
                replica, data, settings.evaluation.splits, step=step, part=settings.data_part(world)
            )
            waits.phase = "loop"
            return metrics

        config = LoopConfig(
            STEPS, settings.training.batch_size, log_every=2, save_every=3, logical_ranks=None, stop_on_nonfinite=False
        )
        timer = StepTimer(GPU)
        with (
            timer.record_phases(),
            waits.mode,
            patch.object(Agreement, "exchange_wishes", _go_on(Agreement.exchange_wishes)),
        ):
            named = {name: group.group_name for name, group in world.groups.items()}
            if "gloo" not in backend_names(settings.cluster.backend):
                of_host = (name for name in named if name.startswith(("host/", "checkpoint/")))
                waits.host_groups = frozenset(named[name] for name in of_host)
            waits.phase = "loop"
            callbacks = LoopCallbacks(evaluate, lambda *_: None, save=save)
            fit(replica, _batches(settings, world, replica), world, config=config, callbacks=callbacks, timer=timer)
            waits.phase = "load"
            _load(replica, host)
        return [name for name, tensor in host.items() if get_local_shard(tensor).device.type != "cpu"]


def _go_on(reached: Callable[[Agreement, int], Wishes]) -> Callable[[Agreement, int], Wishes]:
    """Let no rank request a stop: values of fakes are meaningless."""

    def agreed(agreement: Agreement, step: int) -> Wishes:
        reached(agreement, step)
        return Wishes()

    return agreed


def _built(settings: Settings, world: World, waits: Waits) -> Replica:
    context = RunContext(
        world,
        settings.numerics,
        seed=1,
        steps=STEPS,
        workers=world.size,
        logical_ranks=settings.logical_ranks,
    )
    defers = type(settings.strategy).__name__ in _DEFERS and world.size > 1
    with fill_with_fakes(waits.mode) if defers else waits.mode:
        inner: Any = settings.strategy.replica(settings.recipe, context)
    if defers:  # fully_shard's own device moves are faked in device.py
        with waits.mode:
            for module in inner.model.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None and buffer.device.type == "cpu":
                        module._buffers[name] = waits.mode.from_tensor(buffer).to(GPU)
    with waits.mode:
        return AveragedReplica(inner, settings.average) if settings.average else inner


def _batches(settings: Settings, world: World, replica: Replica) -> Iterator[list[MicroBatch]]:
    """Yield the batches of each step; their tensors have values as long as they are on the host."""
    part = settings.data_part(world)
    order = settings.create_order(part.rank, part.size, replica.dealing)
    with unset_fake_temporarily():
        data = settings.recipe.data("train")
        batches = micro_batches(data, order, GPU, collate=get_collate_fn(settings.recipe))
    while True:
        with unset_fake_temporarily():
            step = next(batches)
        yield step


def _load(replica: Replica, host: Mapping[str, Tensor]) -> None:
    """Load a state from host memory, like the reader of a checkpoint's files."""
    template = replica.state()
    tensors, values = split_tensors(template)
    facts = {name: {"dtype": str(each.dtype), "shape": list(each.shape)} for name, each in tensors.items()}
    checkpoint = Checkpoint(Path("nowhere"), 3, 1, {}, {}, facts, values)

    def read(held: Mapping[str, Tensor], **_: Any) -> None:
        for name, tensor in held.items():
            get_local_shard(tensor).detach().copy_(get_local_shard(host[name]).detach(), non_blocking=True)

    with patch.object(state_dict_loader, "load", read):
        replica.load(load_checkpoint(checkpoint, template))


class _Phased(Replica):
    """Names the phase of each wait in a step; the first steps count separately, because ranks compare their work."""

    def __init__(self, inner: Replica, waits: Waits) -> None:
        self._inner, self._waits, self._steps = inner, waits, 0
        self.dealing = inner.dealing

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        self._steps += 1
        self._waits.phase = "step" if self._steps > 2 else "first steps"
        result = self._inner.step(micro_batches)
        self._waits.phase = "loop"
        return result

    def evaluate(self, batches: EvaluationBatches) -> Mapping[str, float]:
        return self._inner.evaluate(batches)

    def advance_schedules(self, value: float, *, step: int) -> None:
        self._inner.advance_schedules(value, step=step)

    def trained_weights(self) -> Mapping[str, Tensor]:
        return self._inner.trained_weights()

    def facts(self) -> Mapping[str, Any]:
        return self._inner.facts()

    def state(self) -> StateDict:
        return self._inner.state()

    def load(self, state: StateDict) -> None:
        self._inner.load(state)


def _described(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if any(each in frame.filename for each in OWN)]
    places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(own[-4:]))
    if os.environ.get("FAKE_CUDA_TRACE"):
        traceback.print_exception(error)
    return f"{type(error).__name__}: {str(error)[:300]} ({places})"


def main() -> None:
    sys.path.insert(0, str(Path.cwd()))
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")  # libraries may print
    os.dup2(2, 1)
    believe_in_devices(sys.argv[1], _DEVICES)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
