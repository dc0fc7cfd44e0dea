"""A port is verified under strategies, too, and a strategy with different results is named as the cause."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from plugins.easgd.strategy import EASGD
from plugins.parameter_server.strategy import ParameterServer
from tests.testing.token_port import CONFIG, Port, Program, told
from worldsize.core import ConfigError, Strategy
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.testing import PortConfig, same_losses, worlds
from worldsize.testing.loops import Loop
from worldsize.testing.port import train_in_processes


@pytest.mark.parametrize(
    ("strategy", "processes"),
    [
        (DDP(), 2),
        (DDP(reduce="ordered"), 2),
        (FSDP(wrap="size", wrap_parameters=1), 2),
        (ParameterServer(servers=2), 4),
        (ParameterServer(transport="tls", reduce="ordered"), 2),
    ],
    ids=lambda each: f"{type(each).__name__}-{each.reduce}" if isinstance(each, Strategy) else str(each),
)
def test_a_right_port_passes_under_a_strategy(strategy: Strategy, processes: int) -> None:
    config = PortConfig(batch_size=8, micro_batches=2, steps=4)
    same_losses(Port(), Program(pieces=2), config, strategy=strategy, processes=processes, tolerance=1e-5)


def test_a_strategy_that_averages_otherwise_is_named_as_the_cause() -> None:
    config = PortConfig(batch_size=8, micro_batches=2, steps=3)
    lossy = DDP(compress="int8")
    text = told(Port(), Program(pieces=2), config, strategy=lossy, processes=2, tolerance=1e-5)
    assert "Cause: DDP on 2 processes." in text


def test_where_servers_serve_beside_replicas_both_take_part() -> None:
    """EASGD's workers train separately: the comparison ends, and reports that the losses differ."""
    config = PortConfig(batch_size=8, micro_batches=2, steps=4)
    text = told(Port(), Program(pieces=2), config, strategy=EASGD(period=1), processes=3, tolerance=1e-5)
    assert "EASGD on 3 processes" in text


class Refused(Loop):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        raise ConfigError("the loss cannot be computed. Change it.")


def test_the_error_of_a_worker_is_shown_while_its_server_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "_FAILING", 0.1)
    config = PortConfig(batch_size=8, micro_batches=1, steps=2)
    with pytest.raises(RuntimeError, match=r"rank 1 failed:[\s\S]*the loss cannot be computed"):
        train_in_processes(Refused(), config, ParameterServer(), 2)


def test_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="micro_batches=2"):
        same_losses(Port(), Program(), CONFIG, strategy=ParameterServer(), processes=3)
    with pytest.raises(ConfigError, match="micro_batches=2"):
        same_losses(Port(), Program(), CONFIG, strategy=DDP(), processes=2)
