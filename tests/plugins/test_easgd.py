"""Elastic averaging follows the paper's equations, fulfils the contract, and refuses unsupported runs."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
import torch

from plugins.easgd.centre import Centre, Operation, accept_workers
from plugins.easgd.centre import Link as CentreLink
from plugins.easgd.strategy import EASGD
from worldsize.config.shape import check_precision
from worldsize.core import Cluster, ConfigError, Link, Numerics, RunContext, Workload
from worldsize.data.batches import fetch_batch
from worldsize.data.order import Order
from worldsize.net.channel import Channel
from worldsize.net.endpoints import connect_channel, get_listener_address
from worldsize.net.frames import CommonOperation
from worldsize.strategies.ddp import DDP
from worldsize.testing.contract import StrategyContract
from worldsize.testing.loss_loops import GRADIENT_CASES
from worldsize.testing.training import ALONE, BATCH, CHAIN, SEED, train

pytestmark = pytest.mark.heavy


class TestEASGD(StrategyContract):
    """The algorithm's losses differ from one process, hence the tolerance."""

    strategy = EASGD(period=2)
    sizes = (2, 3)
    impossible = 1
    tolerance = 0.3
    partners = (DDP(),)
    cases = GRADIENT_CASES  # weights are not compared

    def test_centre_and_workers_move_as_the_paper_says(self) -> None:
        """The reference is equations 2 and 3 of arXiv 1412.6651 in plain PyTorch, with AdamW instead of SGD."""
        result = self.run(2, lambda context: train(self.strategy, context, 4))[0]
        models = [CHAIN.model() for _ in range(2)]
        optimizers = [CHAIN.optimizer(model) for model in models]
        middle = {name: tensor.clone() for name, tensor in models[0].state_dict().items()}
        data, order = CHAIN.data("train"), Order(SEED, BATCH, 2, (0, 1))
        for step in range(1, 5):
            for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                optimizer.zero_grad()
                CHAIN.loss(model, fetch_batch(data, order.compute_indices(step, rank, len(data)))).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            if step % 2 == 0:
                pulls = [{n: 0.45 * (p - middle[n]) for n, p in model.state_dict().items()} for model in models]
                for model, pull in zip(models, pulls, strict=True):
                    model.load_state_dict({n: p - pull[n] for n, p in model.state_dict().items()})
                middle = {n: at + pulls[0][n] + pulls[1][n] for n, at in middle.items()}
        for name, tensor in middle.items():
            torch.testing.assert_close(result.model[name], tensor, rtol=1e-5, atol=1e-6)


def test_workers_that_come_one_at_a_time_meet_the_centre_as_the_last_one_left_it() -> None:
    ends = [socket.socketpair() for _ in range(2)]
    middle = Centre([Channel(there, operations=Operation) for _, there in ends], numel=2, elasticity=0.25)
    first, second = (CentreLink(Channel(here, operations=Operation), 2) for here, _ in ends)
    serving = threading.Thread(target=middle.serve_asynchronously)
    serving.start()
    first.set_centre(torch.tensor([1.0, 2.0]))
    assert second.pull_centre(torch.tensor([5.0, 2.0])).tolist() == [1.0, 2.0]
    assert first.pull_centre(torch.tensor([2.0, 6.0])).tolist() == [2.0, 2.0]
    assert second.read_centre().tolist() == [2.0, 3.0]
    first.close()
    second.close()
    serving.join()
    for _, there in ends:
        there.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EASGD(period=0), "strategy.period=0 must be 1 or more"),
        (lambda: EASGD(moving_rate=1.5), "strategy.moving_rate=1.5 must be above 0 and at most 1"),
        (lambda: EASGD(rounds="never"), "'never' is unknown. Available: synchronous, asynchronous"),  # type: ignore[arg-type]
        (lambda: check_precision(Numerics("fp16"), EASGD()), "Set precision=bf16"),
        (lambda: EASGD().replica(CHAIN, RunContext(ALONE)), "require the centre"),
    ],
)
def test_options_that_cannot_run_are_refused_with_the_remedy(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_meeting_costs_every_worker_its_parameters_both_ways_over_the_link_of_the_centre() -> None:
    links = {tier: Link(1e9, 0.0) for tier in ("device", "node", "network")}
    cluster = Cluster("test", 1, 5, "cpu", "gloo", links=links)
    cost = EASGD(period=4).cost(Workload(parameter_bytes=1e6, optimizer_bytes=0.0), cluster)
    assert cost.communication_seconds == pytest.approx(2 * 4 * 1e6 / 1e9 / 4)
    assert cost.sent_bytes == 4 * 1e6 / 4


def test_a_connection_that_is_silent_does_not_keep_the_workers_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent = [socket.create_connection(listener.getsockname()) for _ in range(5)]
        waiting = threading.Thread(target=lambda: channels.extend(accept_workers(listener, None, 2, 120.0)))
        channels: list[Channel] = []
        waiting.start()
        workers = [
            connect_channel(get_listener_address(listener), None, peer="centre", seconds=60.0, operations=Operation)
            for _ in range(2)
        ]
        for rank, worker in enumerate(workers):
            worker.send_message(CommonOperation.JOIN, {"kind": "worker", "name": f"worker-{rank}"})
        waiting.join()
        assert len(channels) == 2
        for stranger in silent:
            stranger.close()
        for channel in (*workers, *channels):
            channel.close()
