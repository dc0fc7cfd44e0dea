"""Rows of tables learn like torch's sparse optimizers, and forgotten rows start over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plugins.parameter_server.remote_embedding import RemoteTable, find_remote_tables, replace_tables
from plugins.parameter_server.row_store import Sharding, create_row_update
from plugins.parameter_server.row_tables import RowRule, Rows, Table, find_tables, initial_rows
from worldsize.core import ConfigError, RowValues

ROWS, DIM = 200, 8
TABLE = Table("words.weight", ROWS, DIM, None, RowValues("uniform", 0.5))
OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.2}),
}


RULE = RowRule(seed=3)


def rows(make: Callable[..., Optimizer], rule: RowRule = RULE, shard: int = 0, **options: Any) -> Rows:
    optimizer = make([nn.Parameter(torch.empty(0, DIM))], **options)
    return Rows(TABLE, rule, shard, create_row_update(optimizer, optimizer.param_groups[0], TABLE.name))


def touches(count: int, most: int = ROWS) -> list[tuple[Tensor, Tensor]]:
    """Draw batches of sorted, unique row ids with random gradients."""
    generator = torch.Generator().manual_seed(5)
    ids = [torch.unique(torch.randint(most, (40,), generator=generator)) for _ in range(count)]
    return [(ids_n, torch.randn(len(ids_n), DIM, generator=generator)) for ids_n in ids]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("sharding", ["hash", "range"])
def test_rows_on_three_servers_learn_as_the_whole_table_does_in_torch(name: str, sharding: Sharding) -> None:
    make, options = OPTIMIZERS[name]
    rule = RowRule(seed=3, shards=3, sharding=sharding)
    servers = [rows(make, rule, shard, **options) for shard in range(3)]
    whole = nn.Parameter(initial_rows(3, TABLE, torch.arange(ROWS)))
    optimizer = make([whole], **options)
    for ids_n, gradients_nd in touches(50):
        with torch.sparse.check_sparse_tensor_invariants(True):  # type: ignore[no-untyped-call]
            whole.grad = torch.sparse_coo_tensor(ids_n[None], gradients_nd, (ROWS, DIM))
            optimizer.step()
        owners_n = rule.assign_shards(ids_n, TABLE)
        for shard, server in enumerate(servers):
            mine_n = owners_n == shard
            server.pull(ids_n[mine_n])
            server.push(ids_n[mine_n], gradients_nd[mine_n])
    everything = torch.arange(ROWS)
    owners_n = rule.assign_shards(everything, TABLE)
    for shard, server in enumerate(servers):
        mine_n = everything[owners_n == shard]
        torch.testing.assert_close(server.pull(mine_n), whole.detach()[mine_n], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("make", "decay"), [(torch.optim.Adam, 0.0), (torch.optim.AdamW, 0.1)])
def test_adam_steps_of_a_row_do_not_depend_on_other_rows(make: Any, decay: float) -> None:
    server = rows(make, lr=0.1, weight_decay=decay)
    alone = {row: nn.Parameter(initial_rows(3, TABLE, torch.tensor([row]))) for row in range(ROWS)}
    optimizers = {row: make([parameter], lr=0.1, weight_decay=decay) for row, parameter in alone.items()}
    for ids_n, gradients_nd in touches(20):
        server.pull(ids_n)
        server.push(ids_n, gradients_nd.clone())
        for row, gradient_d in zip(ids_n.tolist(), gradients_nd, strict=True):
            alone[row].grad = gradient_d[None]
            optimizers[row].step()
    expected_rd = torch.cat([alone[row].detach() for row in range(ROWS)])
    torch.testing.assert_close(server.pull(torch.arange(ROWS)), expected_rd, rtol=1e-5, atol=1e-6)


def test_a_new_row_depends_on_seed_table_and_id_alone() -> None:
    ids_n = torch.tensor([7, 3, 199])
    together, reversed_ = initial_rows(3, TABLE, ids_n), initial_rows(3, TABLE, ids_n.flip(0)).flip(0)
    assert torch.equal(together, reversed_)
    assert torch.equal(together[1:2], initial_rows(3, TABLE, torch.tensor([3])))
    assert torch.equal(rows(torch.optim.SGD, lr=1.0).pull(ids_n), together)
    other = Table("other.weight", ROWS, DIM, None, TABLE.values)
    assert not torch.equal(together, initial_rows(4, TABLE, ids_n))
    assert not torch.equal(together, initial_rows(3, other, ids_n))


@pytest.mark.parametrize(("kind", "deviation"), [("uniform", 0.25 / 3**0.5), ("normal", 0.25)])
def test_new_rows_are_distributed_as_the_recipe_says(kind: Any, deviation: float) -> None:
    table = Table("words.weight", 100_000, DIM, 5, RowValues(kind, 0.25))
    values_nd = initial_rows(0, table, torch.arange(100_000))
    assert values_nd[5].tolist() == [0.0] * DIM
    assert abs(float(values_nd.mean())) < 2e-3
    assert float(values_nd.std()) == pytest.approx(deviation, rel=5e-3)
    correlation = torch.corrcoef(torch.stack([values_nd[:-1, 0], values_nd[1:, 0], values_nd[:-1, 1]]))
    assert (correlation - torch.eye(3)).abs().max() < 0.02


def test_a_row_that_is_evicted_between_pull_and_push_does_not_shift_its_neighbours() -> None:
    """Gradients are matched to rows by id, not by their index among the remaining rows."""
    server = rows(torch.optim.SGD, RowRule(seed=3, capacity=50), lr=1.0)
    ids_n = torch.arange(0, 40)
    before_nd = server.pull(ids_n)
    server.pull(torch.arange(20, 40))  # rows 0 to 19 are now the oldest
    server.pull(torch.arange(100, 120))
    assert server.store.evicted >= 10
    gradients_nd = ids_n[:, None].float().expand(-1, DIM).contiguous()
    server.push(ids_n, gradients_nd)
    after_nd = server.pull(torch.arange(20, 40))
    torch.testing.assert_close(after_nd, (before_nd - gradients_nd)[20:])
    assert server.missed == server.store.evicted
    assert server.store.count <= 50


def test_an_evicted_row_begins_anew() -> None:
    server = rows(torch.optim.Adagrad, RowRule(seed=3, capacity=10), lr=1.0)
    first_n = torch.tensor([1])
    server.pull(first_n)
    server.push(first_n, torch.ones(1, DIM))
    server.pull(torch.arange(50, 60))
    assert torch.equal(server.pull(first_n), initial_rows(3, TABLE, first_n))


def test_a_row_is_kept_once_it_was_pushed_often_enough() -> None:
    server = rows(torch.optim.SGD, RowRule(seed=3, admit_after=3), lr=1.0)
    ids_n, gradient_nd = torch.tensor([4]), torch.ones(1, DIM)
    initial_nd = initial_rows(3, TABLE, ids_n)
    for _ in range(2):
        server.push(ids_n, gradient_nd)
        assert torch.equal(server.pull(ids_n), initial_nd)
    assert server.store.count == 0
    server.push(ids_n, gradient_nd)
    assert torch.equal(server.pull(ids_n), initial_nd - 1)
    assert server.store.count == 1


def test_a_huge_range_of_ids_needs_memory_for_touched_rows_alone() -> None:
    table = Table("words.weight", 1 << 60, DIM, None, RowValues())
    optimizer = torch.optim.SGD([nn.Parameter(torch.empty(0, DIM))], lr=1.0)
    server = Rows(table, RowRule(seed=3), 0, create_row_update(optimizer, optimizer.param_groups[0], table.name))
    ids_n = torch.tensor([0, 5, (1 << 60) - 1])
    before_nd = server.pull(ids_n)
    server.push(ids_n, torch.ones(3, DIM))
    torch.testing.assert_close(server.pull(ids_n), before_nd - 1)
    assert server.store.count == 3


def test_rows_come_back_from_a_checkpoint_on_another_number_of_servers() -> None:
    old = rows(torch.optim.Adagrad, lr=0.1)
    for ids_n, gradients_nd in touches(10):
        old.pull(ids_n)
        old.push(ids_n, gradients_nd)
    rule = RowRule(seed=3, shards=2)
    new = [rows(torch.optim.Adagrad, rule, shard, lr=0.1) for shard in range(2)]
    for server in new:
        server.load(old.state())
    assert sum(server.store.count for server in new) == old.store.count
    for shard, server in enumerate(new):
        mine_n = torch.arange(shard, ROWS, 2)
        assert torch.equal(server.pull(mine_n), old.pull(mine_n))
        server.push(mine_n, torch.ones(len(mine_n), DIM))
        old.push(mine_n, torch.ones(len(mine_n), DIM))
        assert torch.equal(server.pull(mine_n), old.pull(mine_n))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.RMSprop])
def test_an_optimizer_that_cannot_update_single_rows_is_refused(optimizer: Any) -> None:
    options: dict[str, Any] = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    with pytest.raises(ConfigError, match="Use SGD without momentum"):
        rows(optimizer, lr=0.1, **options)


# ---------------------------------------------------------------- on a worker


def remote(local: nn.Module) -> RemoteTable:
    """Return the remote module that replaces ``local``, with the same rows."""
    model = nn.ModuleList([local])
    weight_rd: Tensor = local.weight.detach()  # type: ignore[operator]
    (table,) = find_remote_tables(
        replace_tables(model, find_tables(model, {}), lambda _, ids_n: weight_rd[ids_n].clone())
    )
    return table


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_remote_bag_computes_what_the_local_one_does(mode: str, padding: int | None) -> None:
    torch.manual_seed(0)
    local = nn.EmbeddingBag(20, DIM, mode=mode, sparse=mode != "max", padding_idx=padding)
    if mode == "max":
        local.sparse = True  # torch lacks sparse gradients for max; remote tables have them
    other = remote(local)
    local.sparse = False
    ids, offsets = torch.tensor([3, 1, 7, 7, 3, 0, 19, 1]), torch.tensor([0, 3, 3, 6])
    expected, actual = local(ids, offsets), other(ids, offsets)
    assert torch.equal(actual, expected)
    expected.square().sum().backward()
    actual.square().sum().backward()
    ids_n, gradients_nd = other.take_gradient()
    assert local.weight.grad is not None
    dense_rd = torch.zeros(20, DIM)
    dense_rd[ids_n] = gradients_nd
    torch.testing.assert_close(dense_rd, local.weight.grad)
    assert other.take_gradient()[0].numel() == 0


def test_a_table_that_is_used_twice_gets_both_gradients() -> None:
    local = nn.Embedding(20, DIM, sparse=True)
    other = remote(local)
    local.sparse = False
    for table in (local, other):
        (table(torch.tensor([[1, 2], [2, 5]])).sum() + 2 * table(torch.tensor([5])).sum()).backward()
    ids_n, gradients_nd = other.take_gradient()
    assert ids_n.tolist() == [1, 2, 5]
    assert local.weight.grad is not None
    assert torch.equal(gradients_nd, local.weight.grad[ids_n])


def test_an_evaluation_leaves_no_gradients() -> None:
    other = remote(nn.Embedding(20, DIM, sparse=True)).eval()
    other(torch.tensor([1, 2]))
    assert other.touched == []
