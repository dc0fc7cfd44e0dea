"""Unsupported behaviour of a module under manual optimization is refused with a remedy."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from plugins.parameter_server.strategy import ParameterServer
from tests.plugins.lightning_gans import BATCH, Pairs, PlainGAN
from tests.plugins.test_lightning_manual import recipe
from worldsize.core import ConfigError, RunContext, World
from worldsize.plan.construction import check_trainable
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.synchronous import create_local_replica
from worldsize.testing import PortConfig
from worldsize.testing.port_runs import initial_model, load_steps
from worldsize.testing.worlds import run_in_worlds

ALONE = World.create_single(torch.device("cpu"))


def changed(**names: Any) -> Any:
    return type("Changed", (PlainGAN,), names)


def trained(module: Any, *, micro_batches: int = 1) -> Mapping[str, Tensor]:
    own, config = recipe(module, Pairs), PortConfig(batch_size=BATCH, steps=4, micro_batches=micro_batches)
    replica = create_local_replica(own, initial_model(own, config), RunContext(ALONE, logical_ranks=micro_batches))
    for step in load_steps(own, config):
        replica.step(step)
    return dict(replica.state()["model"])


def no_backward(self: Any, batch: Any) -> None:
    self.optimizers()[0].step()


def own_backward(self: Any, batch: Any) -> None:
    self.losses(batch)[0].backward()


def late_backward(self: Any, batch: Any, batch_idx: int) -> None:
    critic = self.optimizers()[1]
    critic.zero_grad()
    loss = self.losses(batch)[0]
    if batch_idx:
        (100 * loss).backward(retain_graph=True)
    self.manual_backward(loss)
    critic.step()


def late_autograd(self: Any, batch: Any, batch_idx: int) -> None:
    PlainGAN.training_step(self, batch, batch_idx)
    if batch_idx:
        torch.autograd.backward(self.losses(batch)[0])


def clips_weights(self: Any, batch: Any, batch_idx: int) -> None:
    PlainGAN.training_step(self, batch, batch_idx)
    if batch_idx:
        with torch.no_grad():
            for parameter in self.critic.parameters():
                parameter.clamp_(-0.01, 0.01)


def clips_data(self: Any, batch: Any, batch_idx: int) -> None:
    for parameter in self.critic.parameters():
        parameter.data.clamp_(-0.01, 0.01)
    PlainGAN.training_step(self, batch, batch_idx)


def replaces_data(self: Any, batch: Any, batch_idx: int) -> None:
    PlainGAN.training_step(self, batch, batch_idx)
    self.critic[0].weight.data = self.critic[0].weight.detach() / 2


def changes_rate(self: Any, batch: Any, batch_idx: int) -> None:
    PlainGAN.training_step(self, batch, batch_idx)
    if batch_idx == 2:
        self.optimizers()[1].param_groups[0]["lr"] *= 0.5


def steps_again(self: Any, batch: Any) -> None:
    _, critic = self.optimizers()
    for _ in range(2):
        self.manual_backward(self.losses(batch)[0])
        critic.step()


def never_zero(self: Any, batch: Any) -> None:
    self.manual_backward(self.losses(batch)[0])
    self.optimizers()[1].step()


def no_step(self: Any, batch: Any) -> None:
    self.manual_backward(self.losses(batch)[0])


def accumulates(self: Any, batch: Any, batch_idx: int) -> None:
    generator, critic = self.optimizers()
    critic.zero_grad()
    self.manual_backward(self.losses(batch)[0])
    critic.step()
    self.toggle_optimizer(generator)
    self.manual_backward(self.losses(batch)[1])
    if batch_idx % 2 == 1:
        generator.step()
        generator.zero_grad()
    self.untoggle_optimizer(generator)


def one_loss_of_two(self: Any, batch: Any) -> None:
    self.manual_backward(self.losses(batch)[1])
    for optimizer in self.optimizers():
        optimizer.step()


def late_step(self: Any, batch: Any) -> None:
    generator, critic = self.optimizers()
    for optimizer in (generator, critic):
        optimizer.zero_grad()
    loss_critic, loss_generator = self.losses(batch)
    self.toggle_optimizer(generator)
    self.manual_backward(loss_generator)
    self.untoggle_optimizer(generator)
    self.manual_backward(loss_critic)
    critic.step()
    generator.step()


def reads_gradient(self: Any, batch: Any) -> None:
    self.manual_backward(self.losses(batch)[0])
    self.log("norm", self.critic[0].weight.grad.norm())


def sets_module_to_zero(self: Any, batch: Any) -> None:
    self.zero_grad()


def keeps_graph(self: Any, batch: Any) -> None:
    self.manual_backward(self.losses(batch)[0], create_graph=True)


def toggles_too_early(self: Any, batch: Any) -> None:
    generator, _ = self.optimizers()
    self.toggle_optimizer(generator)
    loss = self.losses(batch)[1]
    self.untoggle_optimizer(generator)
    self.manual_backward(loss)


def no_scalar(self: Any, batch: Any) -> None:
    self.manual_backward(batch[0])


def counts_steps(self: Any, batch: Any) -> None:
    self.log("step", self.global_step)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (no_backward, "'generator' requires a manual_backward after its last zero_grad.*Call self.manual_backward"),
        (own_backward, r"must not call loss.backward\(\) or change the gradient.*Call self.manual_backward"),
        (late_backward, r"must not call loss.backward\(\) or change the gradient of the parameter 'critic.0.weight'\."),
        (late_autograd, r"must not call loss.backward\(\) or change the gradient of the parameter 'critic.0.weight'\."),
        (clips_weights, "must not change the parameter 'critic.0.weight'.*optimizer.register_step_post_hook"),
        (clips_data, "must not change a parameter.*optimizer.register_step_post_hook"),
        (replaces_data, "must not change a parameter.*optimizer.register_step_post_hook"),
        (changes_rate, "must not change 'lr' of optimizer 'critic'.*Return a schedule"),
        (steps_again, r"'critic' steps again without zero_grad\(\)"),
        (never_zero, r"'critic' steps again without zero_grad\(\)"),
        (no_step, "did not step an optimizer in step 1.*N times larger batch_size with logical_ranks=N"),
        (
            accumulates,
            "gradient accumulation over several batches is not supported .optimizer 'generator'.*logical_ranks=N",
        ),
        (one_loss_of_two, "optimizers 'generator' and '.*' step on the same loss"),
        (late_step, "the loss of optimizer 'generator' was computed before the step of 'critic'"),
        (reads_gradient, "must not read or change parameter gradients"),
        (sets_module_to_zero, r"must not read or change parameter gradients.*zero_grad\(\) on the optimizer"),
        (keeps_graph, "supports only the loss argument"),
        (toggles_too_early, "was called after untoggle_optimizer"),
        (no_scalar, "requires a scalar loss"),
        (counts_steps, "self.global_step is not supported .* counts the steps of all optimizers"),
    ],
)
def test_a_step_that_does_not_come_along_is_refused(step: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trained(changed(training_step=step))


def test_a_schedule_that_follows_from_the_data_is_refused() -> None:
    def configure(self: Any) -> Any:
        optimizers = PlainGAN.configure_optimizers(self)
        return optimizers, [torch.optim.lr_scheduler.StepLR(each, 1) for each in optimizers]

    def step(self: Any, batch: Any, batch_idx: int) -> None:
        PlainGAN.training_step(self, batch, batch_idx)
        if batch[0].mean() > 0:
            self.lr_schedulers()[0].step()

    with pytest.raises(ConfigError, match="advances a schedule . times for one micro-batch of step"):
        trained(changed(training_step=step, configure_optimizers=configure), micro_batches=4)

    def by_metric(self: Any, batch: Any) -> None:
        self.lr_schedulers()[0].step(0.1)

    with pytest.raises(ConfigError, match=r"a schedule's step\(\) takes no arguments"):
        trained(changed(training_step=by_metric, configure_optimizers=configure))


def test_an_end_of_an_epoch_advances_schedules_and_no_more() -> None:
    def logs(self: Any) -> None:
        self.log("mean", 1.0)

    with pytest.raises(ConfigError, match="on_train_epoch_end logs 'mean', which is not supported. Log every value"):
        trained(changed(on_train_epoch_end=logs))

    def steps(self: Any) -> None:
        self.optimizers()[0].step()

    with pytest.raises(ConfigError, match="on_train_epoch_end must not step an optimizer"):
        trained(changed(on_train_epoch_end=steps))


def clips(self: Any, batch: Any) -> None:
    self.clip_gradients(self.optimizers()[0], gradient_clip_val=0.5)


def clips_by_torch(self: Any, batch: Any) -> None:
    clip_grad_norm_(self.critic.parameters(), 1.0)


@pytest.mark.parametrize("step", [clips, clips_by_torch])
def test_clipping_is_refused_before_anything_starts(step: Any) -> None:
    with pytest.raises(ConfigError, match=r"clips.* calls clip_grad.*Remove the call, and set clip_norm"):
        recipe(changed(training_step=step), Pairs)


def lbfgs(self: Any) -> Any:
    return torch.optim.LBFGS(self.parameters())


def with_frequency(self: Any) -> Any:
    optimizers = [torch.optim.SGD(part.parameters()) for part in (self.critic, self.generator)]
    return [{"optimizer": each, "frequency": 2} for each in optimizers]


def schedule_of_another(self: Any) -> Any:
    another = torch.optim.SGD(self.generator.parameters(), lr=0.1)
    return PlainGAN.configure_optimizers(self), [torch.optim.lr_scheduler.StepLR(another, 1)]


@pytest.mark.parametrize(
    ("optimizers", "message"),
    [
        (lbfgs, "returned LBFGS, which computes several gradients"),
        (with_frequency, "an optimizer with a frequency"),
        (schedule_of_another, "a schedule for an optimizer that it did not return"),
    ],
)
def test_optimizers_that_do_not_come_along_are_refused(optimizers: Any, message: str) -> None:
    own: Any = recipe(changed(configure_optimizers=optimizers), Pairs)
    with pytest.raises(ConfigError, match=message):
        own.optimizers(own.model())


@pytest.mark.parametrize("strategy", [Mesh(), ParameterServer()], ids=lambda each: type(each).__name__)
def test_a_strategy_of_one_update_a_step_or_whose_workers_come_and_go_refuses_it(strategy: Any) -> None:
    with pytest.raises(ConfigError, match="requires several updates per step|recipes with state between steps"):
        check_trainable(recipe(PlainGAN, Pairs), strategy)


def test_optimizers_are_there_in_training_steps_alone() -> None:
    own: Any = recipe(PlainGAN, Pairs)
    model = own.model()
    own.optimizers(model)
    with pytest.raises(ConfigError, match=r"self.optimizers\(\) was called outside training_step"):
        model.lightning.optimizers()


def test_a_loss_that_another_optimizer_does_not_share_need_not_be_set_to_zero() -> None:
    """The critic's loss ends at detached images; the generator's gradient is zeroed after its step."""

    def step(self: Any, batch: Any) -> None:
        generator, critic = self.optimizers()
        critic.zero_grad()
        self.manual_backward(self.losses(batch)[0])
        critic.step()
        loss: Tensor = self.losses(batch)[1]
        self.manual_backward(loss)
        generator.step()
        generator.zero_grad()

    trained(changed(training_step=step))


def test_weights_that_are_clipped_after_an_optimizer_has_stepped_come_along() -> None:
    """This is the remedy in the refusal of a changed parameter."""

    def configure(self: Any) -> Any:
        def clip(optimizer: Any, *args: Any) -> None:
            with torch.no_grad():
                for parameter in optimizer.param_groups[0]["params"]:
                    parameter.clamp_(-0.01, 0.01)

        optimizers = PlainGAN.configure_optimizers(self)
        optimizers[1].register_step_post_hook(clip)
        return optimizers

    weights = trained(changed(configure_optimizers=configure))
    assert max(float(weights[name].abs().max()) for name in weights if name.startswith("critic")) <= 0.0101


def advanced_by_data(world: World) -> str:
    def configure(self: Any) -> Any:
        optimizers = PlainGAN.configure_optimizers(self)
        return optimizers, [torch.optim.lr_scheduler.StepLR(each, 1) for each in optimizers]

    def step(self: Any, batch: Any, batch_idx: int) -> None:
        PlainGAN.training_step(self, batch, batch_idx)
        if world.rank == 1 and batch_idx == 1:
            self.lr_schedulers()[1].step()

    own: Any = recipe(changed(training_step=step, configure_optimizers=configure), Pairs)
    return failure(own, DDP(), world)


def test_a_schedule_that_advances_on_one_rank_alone_is_refused() -> None:
    messages = run_in_worlds(advanced_by_data, 2)
    told = (
        "in step 2, the learning rate of 'critic' is 0.05 on rank 0 but 0.005 on rank 1. Make the learning rate depend"
    )
    assert [told in message for message in messages] == [True, True]


def failure(own: Any, strategy: Any, world: World) -> str:
    """Return why two processes cannot train; empty if they can."""
    replica = strategy.replica(own, RunContext(world, logical_ranks=2))
    try:
        for step in islice(load_steps(own, PortConfig(batch_size=BATCH, micro_batches=2)), 3):
            replica.step(step[world.rank : world.rank + 1])
    except ConfigError as error:
        return str(error)
    return ""


def apart(self: Any, batch: Any) -> None:
    generator, critic = self.optimizers()
    critic.zero_grad()
    self.manual_backward(self.losses(batch)[0])
    critic.step()
    if self.sets_to_zero:
        generator.zero_grad()
    self.manual_backward(self.losses(batch)[1])
    generator.step()
    generator.zero_grad()


def gathered(world: World) -> list[str]:
    kinds = [changed(training_step=apart, sets_to_zero=each) for each in (False, True)]
    return [failure(recipe(kind, Pairs), FSDP(), world) for kind in kinds]


def test_where_parameters_are_gathered_a_step_says_whose_loss_it_is() -> None:
    for refused, trained in run_in_worlds(gathered, 2):
        assert "may also depend on parameters of 'generator', which cannot be checked with fsdp" in refused
        assert trained == ""


def divided(world: World) -> str:
    return failure(recipe(changed(training_step=clips_weights), Pairs), FSDP(), world)


def test_weights_that_a_step_clips_are_refused_too_where_they_are_divided() -> None:
    messages = run_in_worlds(divided, 2)
    refused = "training_step and on_train_epoch_end must not change the parameter 'critic"
    assert [message.startswith(refused) for message in messages] == [True, True]
