"""Data × tensor × pipeline parallelism matches a plain PyTorch loop on one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from recipes.stdlib_lm.recipe import StdlibLM
from worldsize.checkpoint.format import Retention, complete, read_checkpoint
from worldsize.checkpoint.load import find_newest, load_checkpoint
from worldsize.checkpoint.manifest_tree import split_tensors
from worldsize.checkpoint.save import Saver
from worldsize.cli.plan import rank_table
from worldsize.collectives.gather_full import gather_full
from worldsize.config.shape import check_precision
from worldsize.core import (
    Cluster,
    ConfigError,
    EvaluationBatch,
    EvaluationBatches,
    MicroBatch,
    Numerics,
    Recipe,
    Replica,
    RunContext,
    Strategy,
    World,
)
from worldsize.seeds import seed_generators
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.loss_record import mean_loss
from worldsize.strategies.mesh.schedule import balance_layers
from worldsize.strategies.mesh.stage import KnownOutput
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.testing.worlds import run_in_worlds

pytestmark = pytest.mark.heavy

STEPS, BATCH, CONTEXT, CLIP = 12, 8, 12, 0.3  # every gradient's norm exceeds CLIP
DATA = torch.randint(256, (STEPS, BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
CLIPPED = Numerics(clip_norm=CLIP)
Losses = list[float]


def recipe(dropout: float = 0.0, foreach: bool | None = None) -> StdlibLM:
    optimizer = partial(torch.optim.AdamW, lr=0.003, foreach=foreach)
    return StdlibLM(16, 3, 2, CONTEXT, dropout, test_bytes=1000, make_optimizer=optimizer)


def batch_of(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows[:, :-1], rows[:, 1:]


@cache
def reference(*, clip: bool = False) -> tuple[Losses, dict[str, Tensor], float]:
    """Return losses (with ``clip`` also norms), weights and bits per byte of one process with one thread."""
    return run_in_worlds(lambda _: trained_by_hand(clip=clip), 1)[0]


def trained_by_hand(*, clip: bool) -> tuple[Losses, dict[str, Tensor], float]:
    """Train with plain PyTorch on whole batches."""
    own = recipe()
    torch.manual_seed(5)
    model = own.model()
    optimizer = own.optimizer(model)
    losses, norms = [], []
    for rows in DATA:
        loss = mean_loss(own.loss(model, batch_of(rows)))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if clip:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        total, count = own.evaluate(model, batch_of(DATA[0]))["bits_per_byte"]
    return [*losses, *norms], model.state_dict(), float(total / count)


PLAIN = Numerics()


def built(strategy: Strategy, world: World, *, numerics: Numerics = PLAIN, **options: Any) -> Replica:
    torch.manual_seed(5)
    return strategy.replica(recipe(**options), RunContext(world, numerics))


def parts(strategy: Strategy, world: World) -> tuple[int, int]:
    """Return this rank's data-parallel rank, and the number of data-parallel parts."""
    return strategy.data_rank(world), strategy.data_parallel(cluster(world.size))


def cluster(processes: int, nodes: int = 1) -> Cluster:
    return Cluster("test", nodes, processes, "cpu", "gloo")


def steps(replica: Replica, strategy: Strategy, world: World, first: int = 0, last: int = STEPS) -> Losses:
    """Return the global mean loss of each step, then norms if there are any; a logical rank has two rows."""
    rank, size = parts(strategy, world)
    losses, norms = [], list[float]()
    for step in range(first, last):
        mine = torch.split(DATA[step], 2)[rank::size]
        batches = [MicroBatch(batch_of(own), seed=100 * step + place) for place, own in enumerate(mine)]
        result = replica.step(batches)
        losses.append(torch.stack(list(result.losses)).mean())
        norms += [] if result.grad_norm is None else [float(result.grad_norm)]
    means = torch.stack(losses).double()
    if world.group is not None:
        dist.all_reduce(means, group=world.group)
    return [*(means / world.size).tolist(), *norms]


def evaluation(strategy: Strategy, world: World) -> Iterator[EvaluationBatch]:
    """Yield rows in batches of three, three and two: the last is uneven, with padding if there are two parts."""
    rank, size = parts(strategy, world)
    batches = [EvaluationBatch(index, batch_of(rows)) for index, rows in enumerate(torch.split(DATA[0], 3))]
    padding = [EvaluationBatch(2, batches[0].data, counted=False)] * (-len(batches) % size)
    yield from [*batches, *padding][rank::size]


def trained(strategy: Strategy, world: World, numerics: Numerics) -> tuple[Losses, dict[str, Tensor], float]:
    replica = built(strategy, world, numerics=numerics)
    losses = steps(replica, strategy, world)
    metrics = replica.evaluate(EvaluationBatches(lambda: evaluation(strategy, world)))
    model = {name: tensor.clone() for name, tensor in gather_full(replica.state()["model"], world).items()}
    return losses, model, metrics["bits_per_byte"]


@pytest.mark.parametrize(
    ("strategy", "numerics"),
    [
        (Mesh(), Numerics()),
        (Mesh(tensor=2), CLIPPED),
        (Mesh(pipeline=2), Numerics()),
        (Mesh(pipeline=3, schedule="gpipe", split=[1, 4]), Numerics()),
        (Mesh(data=2, pipeline=2, schedule="interleaved"), CLIPPED),
        (Mesh(data=2, pipeline=2, schedule="zero_bubble"), CLIPPED),
        (Mesh(data=4, replicate=2, tensor=2), CLIPPED),
        (Mesh(data=2, replicate=2, pipeline=2), CLIPPED),
        (Mesh(pipeline=2, schedule="zbv"), replace(CLIPPED, activation_checkpointing="full")),
        (Mesh(pipeline=2, schedule="dualpipev"), Numerics()),
        (Mesh(data=2, tensor=2, pipeline=2), replace(CLIPPED, activation_checkpointing="full")),
    ],
    ids=lambda mesh: (
        f"{mesh.data or 1}x{mesh.tensor}x{mesh.pipeline}-{mesh.schedule}" if isinstance(mesh, Mesh) else ""
    ),
)
def test_a_mesh_trains_as_one_process_does(strategy: Mesh, numerics: Numerics) -> None:
    size = (strategy.data or 1) * strategy.tensor * strategy.pipeline
    losses, weights, bits = reference(clip=numerics.clip_norm is not None)
    results = run_in_worlds(lambda world: trained(strategy, world, numerics), size)
    for trained_losses, _, trained_bits in results:
        assert trained_losses[:STEPS] == pytest.approx(losses[:STEPS], rel=1e-5)
        assert trained_losses[STEPS:] == pytest.approx(losses[STEPS:], rel=1e-4)
        assert trained_bits == pytest.approx(bits, rel=1e-5)
    assert len({bits for _, _, bits in results}) == 1
    assert results[0][1].keys() == weights.keys()
    for name, tensor in weights.items():  # Adam amplifies rounding where a gradient is nearly zero
        assert (results[0][1][name] - tensor).norm() < 1e-4 * tensor.norm(), name


class Tangled(nn.Module):
    """A model with one weight under two names, a buffer and a parameter at the top, and an unused frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding, self.hidden, self.head = nn.Embedding(256, 6), nn.Linear(6, 6), nn.Linear(6, 256)
        self.head.weight = self.embedding.weight
        self.unused = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("shift", torch.randn(6))

    def forward(self, tokens_bt: Tensor, factor: float) -> Tensor:
        hidden_btw = self.hidden(self.embedding(tokens_bt) * factor).tanh()
        logits_btv: Tensor = self.head(hidden_btw + self.get_buffer("shift"))
        return logits_btv


class First(nn.Module):
    def __init__(self, model: Tangled) -> None:
        super().__init__()
        self.embedding = model.embedding

    def forward(self, tokens_bt: Tensor, factor: float) -> Tensor:
        embedded_btw: Tensor = self.embedding(tokens_bt) * factor
        return embedded_btw


class Last(nn.Module):
    def __init__(self, model: Tangled) -> None:
        super().__init__()
        self.head = model.head
        self.register_buffer("shift", model.get_buffer("shift"))

    def forward(self, hidden_btw: Tensor) -> Tensor:
        logits_btv: Tensor = self.head(hidden_btw + self.get_buffer("shift"))
        return logits_btv


@dataclass(frozen=True)
class TangledRecipe(Recipe):
    def model(self) -> nn.Module:
        return Tangled()

    def optimizer(self, model: nn.Module) -> Optimizer:
        biases = [own for name, own in model.named_parameters() if name.endswith("bias")]
        others = [own for name, own in model.named_parameters() if not name.endswith("bias")]
        groups: list[dict[str, Any]] = [{"params": biases, "weight_decay": 0.0}, {"params": others}]
        return torch.optim.SGD(groups, lr=0.5, momentum=0.9, weight_decay=0.01)

    def data(self, split: str) -> Any:
        return ()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(*self.model_inputs(batch)).flatten(0, 1), batch[1].flatten())

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        return {"loss": (self.loss(model, batch) * len(batch[0]), torch.tensor(len(batch[0])))}

    def layers(self, model: nn.Module) -> Sequence[nn.Module]:
        assert isinstance(model, Tangled)
        return [First(model), nn.Sequential(model.hidden, nn.Tanh()), Last(model)]

    def model_inputs(self, batch: Any) -> tuple[Tensor, float]:
        return batch[0], 3.0


@pytest.mark.parametrize("strategy", [Mesh(pipeline=3), Mesh(data=2, pipeline=2)], ids=["three stages", "sharded"])
def test_a_model_with_tied_weights_and_buffers_is_trained_saved_and_loaded(tmp_path: Path, strategy: Mesh) -> None:
    def body(own: Strategy, world: World) -> tuple[Losses, dict[str, Tensor]]:
        replica = own.replica(TangledRecipe(), RunContext(world))
        if (checkpoint := find_newest(tmp_path, world)) is not None:
            replica.load(load_checkpoint(checkpoint, replica.state()))
        losses = steps(replica, own, world, 3 if checkpoint else 0, 6 if checkpoint else 3)
        if checkpoint is None:
            save(tmp_path, replica, world, 3)
        return losses, {name: own.clone() for name, own in gather_full(replica.state()["model"], world).items()}

    def undisturbed(world: World) -> tuple[Losses, dict[str, Tensor]]:
        replica = DDP().replica(TangledRecipe(), RunContext(world))
        return steps(replica, DDP(), world, 0, 6), replica.state()["model"]

    ((losses, weights),) = run_in_worlds(undisturbed, 1)
    size = strategy.pipeline * (strategy.data or 1)
    before = run_in_worlds(lambda world: body(strategy, world), size)[0]
    assert before[0] == pytest.approx(losses[:3], rel=1e-5)
    for own, ranks in ((strategy, size), (DDP(), 2)):
        resumed, model = run_in_worlds(lambda world, own=own: body(own, world), ranks)[0]  # type: ignore[misc]
        assert resumed == pytest.approx(losses[3:], rel=1e-5)
        assert model.keys() == weights.keys()
        assert all(torch.allclose(model[name], tensor, rtol=1e-4, atol=1e-6) for name, tensor in weights.items())


def test_ranks_that_share_a_layer_draw_the_same_dropout() -> None:
    own = recipe(dropout=0.2)
    torch.manual_seed(5)
    model = own.model()
    expected = []
    for place, rows in enumerate(torch.split(DATA[0], 2)):
        seed_generators(place, torch.device("cpu"))
        expected.append(mean_loss(own.loss(model, batch_of(rows))).item())

    def body(world: World) -> Losses:
        strategy = Mesh(tensor=2)
        return steps(built(strategy, world, dropout=0.2), strategy, world, 0, 1)

    for losses in run_in_worlds(body, 2):
        assert losses == pytest.approx([sum(expected) / 4], rel=1e-5)


def test_an_optimizer_may_update_all_tensors_at_once() -> None:
    def body(world: World) -> Losses:
        strategy = Mesh(tensor=2)  # some parameters are DTensors, others plain tensors
        replica = built(strategy, world, foreach=True)
        replica.load(replica.state())
        return steps(replica, strategy, world, 0, 4)

    assert run_in_worlds(body, 2)[0] == pytest.approx(reference()[0][:4], rel=1e-5)


def test_a_recipe_that_calls_its_model_twice_is_refused() -> None:
    output = KnownOutput(torch.ones(2))
    assert output(torch.ones(3), more=1).sum() == 2
    with pytest.raises(ConfigError, match="calls its model twice"):
        output()


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda model: sum(each.sum() for each in model.parameters()), r"uses parameters\(\)"),
        (lambda model: model.head(torch.ones(1)), "uses head"),
        (lambda model: model[0], r"uses \[0\]"),
        (lambda model: list(model.modules()), r"uses modules\(\)"),
        (lambda model: model.get_submodule("body"), "uses body"),
    ],
    ids=["parameters", "part", "item", "modules", "submodule"],
)
def test_a_loss_in_a_pipeline_uses_no_more_than_the_output(use: Callable[[Any], Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"{said} of its model.*Set strategy.pipeline=1"):
        use(KnownOutput(torch.ones(2)))


class Plain(Recipe):
    """Defines the required methods of a recipe, and none for pipelines."""

    model = optimizer = data = loss = evaluate = None  # type: ignore[assignment]


class Layered(Plain):
    def layers(self, model: nn.Module) -> Sequence[nn.Module]:
        return list(model.children())


@pytest.mark.parametrize(("own", "missing"), [(Plain(), "Recipe.layers"), (Layered(), "Recipe.model_inputs")])
def test_a_recipe_that_does_not_say_how_it_pipelines_is_refused_before_the_start(own: Recipe, missing: str) -> None:
    Mesh(data=2).check_recipe(own)
    Mesh(pipeline=2).check_recipe(recipe())
    with pytest.raises(ConfigError, match=f"Define {missing}, or set strategy.pipeline=1"):
        Mesh(pipeline=2).check_recipe(own)


def test_a_recipe_that_does_not_say_how_its_layers_divide_is_refused_before_the_start() -> None:
    Mesh(tensor=2).check_recipe(recipe())
    with pytest.raises(ConfigError, match=r"Define Recipe.tensor_plan, or set strategy.tensor=1"):
        Mesh(tensor=2).check_recipe(Plain())


def test_bfloat16_trains_to_the_losses_of_one_process() -> None:
    def body(world: World) -> Losses:
        axis = 2 if world.size == 4 else 1
        strategy = Mesh(tensor=axis, pipeline=axis)
        return steps(built(strategy, world, numerics=Numerics("bf16")), strategy, world, 0, 6)

    (alone,) = run_in_worlds(body, 1)
    assert run_in_worlds(body, 4)[1] == pytest.approx(alone, rel=1e-3)
    assert alone != pytest.approx(reference()[0][:6], rel=1e-6)


def saver(folder: Path, world: World) -> Saver:
    group: Any = dist.new_group(backend="gloo") if world.size > 1 else None
    return Saver(folder, world, group, keep=Retention(last=9))


def save(folder: Path, replica: Replica, world: World, step: int) -> None:
    writer = saver(folder, world)
    writer.save(replica.state(), step=step, facts={"metrics": {}})
    writer.finish()
    writer.close()


def loaded(folder: Path, strategy: Strategy, world: World, **options: Any) -> Replica:
    replica = built(strategy, world, **options)
    checkpoint = find_newest(folder, world)
    assert checkpoint is not None
    replica.load(load_checkpoint(checkpoint, replica.state()))
    return replica


def bits_of(replica: Replica) -> dict[str, bytes]:
    """Return the bytes of this rank's tensors."""
    held = {name: tensor for name, tensor in split_tensors(replica.state())[0].items() if not tensor.is_meta}
    local = {name: own.to_local() if isinstance(own, DTensor) else own for name, own in held.items()}
    return {name: tensor.detach().numpy().tobytes() for name, tensor in local.items()}


def test_a_resumed_mesh_ends_with_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    strategy = Mesh(data=2, pipeline=2)

    def body(world: World) -> bool:
        replica = built(strategy, world, dropout=0.1)
        steps(replica, strategy, world, 0, 3)
        save(tmp_path, replica, world, 3)
        steps(replica, strategy, world, 3, 6)
        again = loaded(tmp_path, strategy, world, dropout=0.1)
        steps(again, strategy, world, 3, 6)
        return bits_of(again) == bits_of(replica)

    assert all(run_in_worlds(body, 4))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((Mesh(data=2, tensor=2, pipeline=2), 8), (DDP(), 2)),
        ((FSDP(), 2), (Mesh(data=2, pipeline=2, schedule="interleaved"), 4)),
    ],
    ids=["mesh-ddp", "fsdp-mesh"],
)
def test_a_checkpoint_goes_from_strategy_to_strategy(
    tmp_path: Path, before: tuple[Strategy, int], after: tuple[Strategy, int]
) -> None:
    def first(world: World) -> None:
        replica = built(before[0], world)
        steps(replica, before[0], world, 0, 5)
        save(tmp_path, replica, world, 5)

    def then(world: World) -> Losses:
        return steps(loaded(tmp_path, after[0], world), after[0], world, 5, 10)

    run_in_worlds(first, before[1])
    tensors = read_checkpoint(complete(tmp_path)[-1]).tensors
    for name in ("model/embedding.weight", "optimizer/state/embedding.weight/exp_avg"):
        rows = tensors[name]["chunks"]
        assert sum(numpy.prod(chunk["sizes"]) for chunk in rows) == 256 * 16, "tied, and saved once"
    assert run_in_worlds(then, after[1])[-1] == pytest.approx(reference()[0][5:10], rel=1e-5)


def test_a_gradient_that_is_not_finite_is_skipped_on_all_ranks() -> None:
    strategy = Mesh(tensor=2, pipeline=2)

    def body(world: World) -> tuple[bool, bool]:
        replica = built(strategy, world, numerics=Numerics(nonfinite="skip"))
        held = {name: own for name, own in replica.state()["model"].items() if not own.is_meta}
        name = "blocks.0.attention_norm.weight"
        if name in held:
            held[name].fill_(float("nan"))
        before = bits_of(replica)
        batches = [MicroBatch(batch_of(rows), seed=0) for rows in torch.split(DATA[0], 2)]
        skipped = replica.step(batches).skipped
        return skipped, before == bits_of(replica)

    assert run_in_worlds(body, 4) == [(True, True)] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor": 4, "pipeline": 3}, "8 processes do not match"),
        ({"data": 2, "tensor": 2}, "Set cluster.processes=4, or sizes with a product of 8"),
        ({"tensor": 8}, "does not divide the 4 processes per node"),
        ({"on_failure": "heal", "data": 2, "tensor": 2}, "Set cluster.processes=4, or sizes with a product of 8"),
        ({"reduce": "hierarchical"}, "reduce=flat"),
        ({"pipeline": 0}, "must be 1 or more"),
        ({"schedule": "dual"}, "Available: gpipe, 1f1b, interleaved, zero_bubble, zbv, dualpipev"),
        ({"stages_per_rank": 2}, "schedule=interleaved or zero_bubble"),
        ({"stages_per_rank": 3, "schedule": "zbv"}, "requires two stages per rank, got strategy.stages_per_rank=3"),
        ({"replicate": 3}, "strategy.replicate=3 does not divide the data-parallel size, 8.*to a divisor of 8"),
        ({"replicate": 8, "reduce": "ordered"}, "leaves one shard per copy"),
        ({"replicate": 2, "on_failure": "heal"}, "Set strategy.replicate=1, or strategy.on_failure=restart"),
        ({"heal_shapes": [{"tensor": 1}]}, "requires strategy.on_failure=heal"),
        ({"on_failure": "heal", "heal_shapes": [{"tensr": 1}]}, "unknown axis 'tensr'; did you mean 'tensor'"),
        *(
            ({"on_failure": "heal", "heal_shapes": [each]}, "has .*, but a shape maps axes to sizes")
            for each in (1, ["tensor"], {"tensor": 1.5}, {"tensor": True}, {"tensor": None}, {"context": 0})
        ),
        *(
            ({"on_failure": "heal", "tensor": 2, "heal_shapes": [each]}, "would never be used: .* earlier shape")
            for each in ({}, {"tensor": 1, "context": 2}, {"pipeline": 2})
        ),
        (
            {"on_failure": "heal", "heal_shapes": [{"pipeline": 1}], "pipeline": 2, "split": [2]},
            "Set strategy.split=null",
        ),
        (
            {"on_failure": "heal", "tensor": 4, "pipeline": 2, "heal_shapes": [{"tensor": 6, "pipeline": 1}]},
            "heal_shapes, tensor=6 × context=1 × pipeline=1: strategy.tensor=6 does not divide the 4 processes per",
        ),
        ({"pipeline": 2, "split": [2, 3]}, "must contain 1 layer indices"),
        ({"pipeline": 4, "split": [2, 2, 3]}, "ascending"),
    ],
)
def test_options_that_cannot_run_are_refused_before_a_process_starts(options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Mesh(**options).roles(cluster(8, nodes=2))


def test_fp16_is_refused_before_a_process_starts() -> None:
    with pytest.raises(ConfigError, match="precision=bf16"):
        check_precision(Numerics("fp16"), Mesh())


def test_compiled_code_is_refused_where_a_backward_pass_has_two_parts() -> None:
    with pytest.raises(ConfigError, match="runs the backward pass of a stage in two parts.*schedule=interleaved"):
        Mesh(pipeline=2, schedule="zbv").check_numerics(Numerics(compile=True))
    Mesh(schedule="zbv").check_numerics(Numerics(compile=True))


def test_too_few_micro_batches_are_refused() -> None:
    with pytest.raises(ConfigError, match="strategy.pipeline=4 requires at least 4 micro-batches .* got 3"):
        Mesh(pipeline=4).check_micro_batches(3)
    Mesh(pipeline=4).check_micro_batches(Mesh(pipeline=4).default_micro_batches)


@pytest.mark.parametrize(
    ("strategy", "size", "message"),
    [
        (Mesh(pipeline=6), 6, "5 layers, too few for 6 stages"),
        (Mesh(tensor=3), 3, "not divisible by strategy.tensor=3"),
        (Mesh(pipeline=2, split=[5]), 2, "leaves a stage empty"),
    ],
)
def test_a_model_that_does_not_divide_is_refused(strategy: Mesh, size: int, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        run_in_worlds(lambda world: built(strategy, world) and None, size)


@pytest.mark.parametrize(
    ("weights", "stages", "expected"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([9, 1, 1, 1, 9], 3, [1, 3, 1]),
        ([1, 2, 3, 4, 5, 6], 3, [3, 2, 1]),
        ([5], 1, [1]),
        ([1, 1, 1], 3, [1, 1, 1]),
    ],
)
def test_stages_are_balanced(weights: Sequence[int], stages: int, expected: Sequence[int]) -> None:
    assert [len(part) for part in balance_layers(weights, stages)] == expected


def test_ranks_of_64_gpus_are_those_of_the_formula() -> None:
    strategy = Mesh(data=8, tensor=4, pipeline=2)
    ranks_pdct = numpy.arange(64).reshape(2, 8, 1, 4)
    layout = strategy.create_layout(64)
    assert all(ranks_pdct[tuple(layout.coordinate(rank).values())] == rank for rank in range(64))
    groups = strategy.groups(cluster(64, nodes=8))
    for axis, name in ((0, "pipeline"), (1, "data"), (3, "tensor")):
        lines = numpy.moveaxis(ranks_pdct, axis, -1).reshape(-1, ranks_pdct.shape[axis])
        assert sorted(groups[name]) == sorted(lines.tolist())
    assert all(max(group) - min(group) < 4 for group in groups["tensor"])
    table = rank_table(cluster(64, nodes=8), groups)
    columns = [list(column.cells) for column in table.columns]
    assert [cells[45] for cells in columns] == ["45", "5", "5", "1: 13 45", "3: 33 37 .. 61", "1: 44 45 46 47"]


def test_plan_shows_the_ranks_and_starts_nothing(
    tmp_path: Path, command: Any, environment_without_wandb: dict[str, str]
) -> None:
    options = ("strategy=mesh", "strategy.tensor=2", "strategy.pipeline=2", "batch_size=16")
    words = ("--model-size", "1e6", "--compute", "1ms", "--strategies", "mesh", "cluster.processes=8", *options)
    done = command("plan", *words, cwd=tmp_path, environment=environment_without_wandb)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("│ 6 ")]
    assert [cell.strip() for cell in line.strip("│").split("│")] == ["6", "0", "6", "1: 2 6", "1: 4 6", "0: 6 7"]
    done = command("plan", *words, "strategy.tensor=3", cwd=tmp_path, environment=environment_without_wandb)
    assert (done.returncode, done.stdout) == (2, "")
    assert "8 processes do not match" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_train_on_eight_processes(train: Any) -> None:
    model = ("recipe=stdlib_lm", "recipe.width=16", "recipe.depth=2", "recipe.heads=2", "recipe.context=32")
    options = (*model, "recipe.test_bytes=3000", "steps=4", "log_every=1", "batch_size=16", "logical_ranks=4")
    mesh = ("strategy=mesh", "strategy.data=2", "strategy.tensor=2", "strategy.pipeline=2", "cluster.processes=8")
    run = train(*options, *mesh)
    assert run.code == 0, run.error
    assert "Warning" not in run.error + run.output
    assert run.json("run_manifest.json")["cluster"]["axis_tiers"] == dict.fromkeys(
        ("pipeline", "data", "tensor"), "node"
    )
    alone = train(*options, "strategy=single", "cluster.processes=1")
    expected = [step["loss"] for step in alone.steps()]
    assert [step["loss"] for step in run.steps()] == pytest.approx(expected, rel=1e-5)
    assert [step["grad_norm"] for step in run.steps()] == pytest.approx(
        [step["grad_norm"] for step in alone.steps()], rel=1e-4
    )
    bits = [own.json("result.json")["metrics"]["bits_per_byte"] for own in (run, alone)]
    assert bits[0] == pytest.approx(bits[1], rel=1e-5)
