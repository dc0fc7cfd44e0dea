"""A worker requests rows from all servers at once; its shortcuts with a single server change no bit."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plugins.parameter_server import protocol, strategy
from plugins.parameter_server.protocol import Operation, Peers
from plugins.parameter_server.remote_embedding import RemoteEmbedding, TableLinks, replace_tables
from plugins.parameter_server.row_tables import RowRule, Table, find_tables
from plugins.parameter_server.server_group import ServerGroup, create_tables, empty_rows
from plugins.parameter_server.strategy import ParameterServer
from worldsize.core import RunContext, World
from worldsize.strategies.train_state import OptimizerPart
from worldsize.testing.recipes import Chain


@dataclass
class Link:
    """A connection to a server whose rows contain their id; it records the pushes."""

    log: list[str] = field(default_factory=list)
    pushed: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def ask_rows(self, table: int, ids_n: Tensor, *, step: int) -> None:
        self.log.append("ask")

    def receive_rows(self, table: int, ids_n: Tensor, dim: int, *, step: int) -> tuple[Tensor, int]:
        self.log.append("receive")
        return ids_n.float()[:, None].expand(-1, dim).clone(), 3

    def push_rows(self, table: int, ids_n: Tensor, gradients_nd: Tensor, **part: int) -> None:
        self.pushed.append((ids_n, gradients_nd))


def tables() -> list[Table]:
    model = nn.Sequential(nn.Embedding(100, 2, sparse=True))
    return find_tables(model, {})


def links_to(*servers: Link) -> TableLinks:
    links = TableLinks(tables(), RowRule(0, shards=len(servers)))
    links.replace_table_links(servers)  # type: ignore[arg-type]
    return links


def test_all_servers_are_asked_before_the_first_is_waited_for() -> None:
    log: list[str] = []
    links = links_to(*(Link(log) for _ in range(3)))
    ids_n = torch.tensor([1, 2, 3, 5, 8])
    assert links.pull_table_rows(tables()[0], ids_n)[:, 0].tolist() == ids_n.tolist()
    assert log == ["ask"] * 3 + ["receive"] * 3


@pytest.mark.parametrize("count", [1, 3])
def test_every_server_is_pushed_its_rows_and_perhaps_none(count: int) -> None:
    servers = [Link() for _ in range(count)]
    ids_n, gradients_nd = torch.tensor([1, 3, 4, 9]), torch.randn(4, 2)
    links_to(*servers).push_row_gradients([(ids_n, gradients_nd)], step=1, width=1, node=0)
    for number, server in enumerate(servers):
        ((pushed_n, pushed_nd),) = server.pushed
        mine_n = ids_n % count == number
        assert torch.equal(pushed_n, ids_n[mine_n])
        assert torch.equal(pushed_nd, gradients_nd[mine_n])


def test_gradients_of_one_forward_pass_are_those_of_a_sum() -> None:
    links = links_to(Link())
    model = replace_tables(nn.Sequential(nn.Embedding(100, 2, sparse=True)), tables(), links.pull_table_rows)
    remote = model.get_submodule("0")
    assert isinstance(remote, RemoteEmbedding)
    ids = torch.tensor([7, 3, 7, 50])
    factors = torch.tensor([[1.0, -0.0], [2.0, 3.0], [0.1, -0.0], [-0.0, -1.0]])
    (remote(ids) * factors).sum().backward()
    ids_n, gradients_nd = remote.take_gradient()
    unique_n, inverse = ids.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    summed_nd = torch.zeros(3, 2).index_add_(0, inverse, factors)
    assert torch.equal(ids_n, unique_n)
    assert torch.equal(gradients_nd.view(torch.int32), summed_nd.view(torch.int32)), "to the bit, also where it is zero"


def test_tables_without_rows_have_the_state_that_servers_give() -> None:
    model = nn.Sequential(nn.Embedding(100, 2, sparse=True), nn.EmbeddingBag(50, 3, sparse=True))
    replace_tables(model, find_tables(model, {}), lambda table, ids_n: ids_n)
    for optimizer in (torch.optim.Adagrad, torch.optim.SGD):
        part = OptimizerPart(model, optimizer(model.parameters()))
        empty = empty_rows(part)
        given = {each.table.name: each.state() for each in create_tables(part, RowRule(0), 0)}
        assert empty.keys() == given.keys()
        for name, each in given.items():
            for key, tensor in each.items():
                assert (empty[name][key].shape, empty[name][key].dtype) == (tensor.shape, tensor.dtype)


def test_a_worker_makes_its_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[nn.Module] = []
    make = Chain.model

    def model(recipe: Chain) -> nn.Module:
        made.append(make(recipe))
        return made[-1]

    class Worker:
        def __init__(self, *_: object, model: nn.Module, **__: object) -> None:
            assert model is made[0]

        def run(self, lease: float) -> None: ...

    monkeypatch.setattr(Chain, "model", model)
    monkeypatch.setattr(strategy, "Worker", Worker)
    monkeypatch.setattr(ServerGroup, "create_dialer", lambda *_: None)
    ParameterServer().serve(Chain(), RunContext(World.create_single(torch.device("cpu"))))
    assert len(made) == 1


def test_peers_are_asked_at_once_and_answer_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    everybody = threading.Barrier(3, timeout=120.0)

    class Peer:
        def __init__(self, dialer: object, shard: int) -> None:
            self._shard = shard

        def request_message(self, operation: Operation) -> Any:
            everybody.wait()
            return self._shard

    monkeypatch.setattr(protocol, "Peer", Peer)
    assert Peers(None, range(3)).request_messages(Operation.NORMS) == [0, 1, 2]  # type: ignore[arg-type]
