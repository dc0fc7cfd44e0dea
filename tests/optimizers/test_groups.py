"""Groups of parameters by patterns, and Muon with AdamW, train like handwritten plain PyTorch."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from worldsize.config.instantiate import Allowed, build_object
from worldsize.core import ConfigError
from worldsize.loop.schedules import warmup_linear
from worldsize.optimizers.arguments import check_tuples
from worldsize.optimizers.groups import create_grouped_optimizer, use_parameter_names
from worldsize.optimizers.muon import muon
from worldsize.optimizers.schedule_free import refuse_breaking
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.testing.recipes import Chain

STEPS = 6
ADAMW = partial(AdamW, lr=0.02, weight_decay=0.1)


def model() -> Any:
    torch.manual_seed(2)
    return nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))


def trained(own: nn.Module, step: Callable[[], Any]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    for _ in range(STEPS):
        own.zero_grad()
        own(torch.randint(9, (5,), generator=generator)).square().mean().backward()
        step()
    return list(own.parameters())


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


def made(own: nn.Module, groups: Any, make: Callable[..., Optimizer] = ADAMW) -> Optimizer:
    with use_parameter_names(own):
        return create_grouped_optimizer(own.parameters(), make=make, groups=groups)


def test_groups_train_as_those_written_by_hand_and_a_schedule_scales_the_rate_of_each() -> None:
    plain, own = model(), model()
    written: list[dict[str, Any]] = [
        {"params": [plain[0].weight, plain[1].weight]},
        {"params": [plain[1].bias, plain[2].weight, plain[2].bias], "weight_decay": 0.0},
        {"params": [plain[3].weight, plain[3].bias], "lr": 0.005},
    ]
    by_hand = AdamW(written, lr=0.02, weight_decay=0.1)
    groups = {
        "no_decay": {"match": ["1.bias", "2.*"], "weight_decay": 0.0},
        "head": {"match": ["3.*", "1.*s"], "lr": 0.005},  # the first matching group has 1.bias
    }
    optimizer = made(own, groups)
    schedules = [warmup_linear(each, steps=STEPS, warmup_steps=2) for each in (by_hand, optimizer)]

    def both(number: int) -> None:
        (by_hand, optimizer)[number].step()
        schedules[number].step()

    assert equal(trained(plain, partial(both, 0)), trained(own, partial(both, 1)))
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in by_hand.param_groups]
    assert optimizer.param_groups[2]["lr"] == pytest.approx(optimizer.param_groups[0]["lr"] / 4)


def test_names_are_those_of_the_parameters_that_are_given_if_no_model_is_known() -> None:
    own = model()
    optimizer = create_grouped_optimizer(
        own.named_parameters(), make=ADAMW, groups={"bias": {"match": ["*.bias"], "lr": 1.0}}
    )
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 3]
    with pytest.raises(ConfigError, match="named_parameters"):
        create_grouped_optimizer(own.parameters(), make=ADAMW, groups={"bias": {"match": ["*.bias"]}})


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"match": ["3.wait"]}, r"'3.wait' matches no parameter; did you mean '3.weight'"),
        ({"match": "*.bias"}, "must be a list of patterns"),
        (
            {"match": ["*.bias"], "weight_decai": 0.0},
            "unknown option 'weight_decai' for AdamW; did you mean 'weight_decay'",
        ),
        ({"match": ["*.bias"], "lr": -1.0}, "learning rate"),
    ],
)
def test_a_group_that_cannot_be_is_refused(group: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?i){message}"):
        made(model(), {"mine": group})


@pytest.mark.parametrize("groups", [[], {"mine": {}}, {"mine": {"match": []}}])
def test_the_shape_of_groups_is_checked_with_the_configuration(groups: Any) -> None:
    node = {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.1, "groups": groups}
    with pytest.raises(ConfigError, match=r"optimizer\.groups"):
        build_object(node, partial, allowed=Allowed(), key="optimizer")


def test_an_optimizer_below_a_recipe_has_the_groups_of_its_configuration() -> None:
    groups = {"bias": {"match": ["*.bias"], "lr": 0.5}}
    node = {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.1, "groups": groups}
    make = build_object(node, partial, allowed=Allowed(), key="optimizer")
    own = model()
    with use_parameter_names(own):
        optimizer = make(own.parameters())
    assert [(group["lr"], len(group["params"])) for group in optimizer.param_groups] == [(0.1, 4), (0.5, 3)]


def test_fused_updates_are_those_of_torch_also_beside_parameters_on_the_meta_device() -> None:
    """Ranks of a pipeline hold each other's parameters on the meta device, but fused kernels refuse that device."""
    plain, own, absent = model(), model(), nn.Linear(2, 2, device="meta")
    step = AdamW(plain.parameters(), lr=0.02, weight_decay=0.1, fused=True).step
    optimizer = create_grouped_optimizer(
        [*own.parameters(), *absent.parameters()], make=partial(ADAMW, fused=True), groups={}
    )
    optimizer.param_groups[0]["params"] = list(own.parameters())
    assert optimizer.param_groups[0]["fused"] is True
    assert equal(trained(plain, step), trained(own, optimizer.step))


def of_muon(parameters: Iterable[Any], **options: Any) -> Optimizer:
    return muon(parameters, lr=0.02, weight_decay=0.1, **options)


def test_muon_updates_matrices_and_adamw_embeddings_and_the_rest_as_torchs_own_two() -> None:
    plain, own = model(), model()
    first: Optimizer = torch.optim.Muon([plain[1].weight], lr=0.02, adjust_lr_fn="match_rms_adamw")
    bias = {"params": [plain[1].bias, plain[2].bias, plain[3].bias], "weight_decay": 0.0}
    rest = {"params": [plain[0].weight, plain[2].weight, plain[3].weight]}
    both: list[dict[str, Any]] = [rest, bias]
    second = AdamW(both, lr=0.01, weight_decay=0.1, betas=(0.9, 0.95))
    adamw = {"match": ["3.weight"], "lr": 0.01, "betas": (0.9, 0.95)}
    groups = {"bias": {"match": ["*.bias"], "weight_decay": 0.0}}
    optimizer = made(own, groups, partial(of_muon, adamw=adamw))
    assert equal(trained(plain, lambda: (first.step(), second.step())), trained(own, optimizer.step))


def test_muon_goes_on_with_a_state_that_it_has_loaded_and_makes_nothing_anew_in_a_step() -> None:
    own, other = model(), model()
    optimizer, loaded = made(own, {}, of_muon), made(other, {}, of_muon)
    trained(own, optimizer.step)
    trained(other, loaded.step)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.load_state_dict(own.state_dict())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.Muon, "__init__", None)
        assert equal(trained(own, optimizer.step), trained(other, loaded.step))


def test_muon_refuses_options_that_neither_has_and_patterns_that_match_nothing() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.adamw\.beta'; did you mean 'betas'"):
        of_muon(model().parameters(), adamw={"beta": 1})
    own = model()
    with (
        use_parameter_names(own),
        pytest.raises(ConfigError, match=r"optimizer\.adamw\.match: 'head' matches no parameter"),
    ):
        of_muon(own.parameters(), adamw={"match": ["head"]})


@pytest.mark.parametrize("strategy", [FSDP(), Mesh(pipeline=2)])
@pytest.mark.parametrize("make", [of_muon, torch.optim.Muon])
def test_strategies_that_divide_matrices_refuse_muon(strategy: Any, make: Callable[..., Optimizer]) -> None:
    recipe = Chain()
    own = recipe.model()
    matrices = [each for each in own.parameters() if each.ndim == 2]
    with pytest.raises(ConfigError, match=r"requires whole matrices.*strategy=ddp"):
        strategy.check_built(recipe, own, make(matrices))
    strategy.check_built(recipe, own, AdamW(own.parameters()))


@pytest.mark.parametrize("strategy", [FSDP(reduce="ordered"), Mesh(pipeline=2, reduce="ordered")])
def test_strategies_that_divide_tensors_refuse_fused_updates_if_the_bits_are_to_be_the_same(strategy: Any) -> None:
    recipe = Chain()
    own = recipe.model()
    fused = AdamW(own.parameters(), fused=True)
    with pytest.raises(ConfigError, match=r"optimizer\.fused=true.*Set optimizer\.fused=false"):
        strategy.check_built(recipe, own, fused)
    strategy.check_built(recipe, own, AdamW(own.parameters()))
    replace(strategy, reduce="flat").check_built(recipe, own, fused)


@pytest.mark.parametrize(
    ("library", "reason"), [("torchao", "checkpoints do not support"), ("schedulefree", "in a different way")]
)
def test_optimizers_whose_state_cannot_be_kept_are_refused_with_the_reason(library: str, reason: str) -> None:
    kind = type("Foreign", (AdamW,), {"__module__": f"{library}.optim"})
    with pytest.raises(ConfigError, match=f"{library}: Foreign .*{reason}"):
        refuse_breaking(kind(model().parameters()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"betas": [0.9]}, "optimizer.betas=[0.9]: AdamW takes 2 numbers. Set optimizer.betas=[0.9,0.999]."),
        ({"betas": [0.9, 0.95, 0.99]}, "optimizer.betas=[0.9,0.95,0.99]: AdamW takes 2 numbers"),
        ({"betas": 0.9}, "optimizer.betas=0.9: AdamW takes 2 numbers"),
        ({"betas": [0.9, None]}, "optimizer.betas=[0.9,None]: AdamW takes 2 numbers"),
        ({"groups": {"a": {"match": ["*"], "betas": [True, 0.9]}}}, "optimizer.groups.a.betas=[True,0.9]: AdamW"),
        (
            {"_target_": "worldsize.optimizers.muon.muon", "adamw": {"betas": [0.9]}},
            "optimizer.adamw.betas=[0.9]:",
        ),
    ],
)
def test_an_option_with_too_few_numbers_is_told_with_how_many_it_takes(options: Any, message: str) -> None:
    node = {"_target_": "torch.optim.AdamW", "_partial_": True, "lr": 0.1, **options}
    own = model()
    with pytest.raises(ConfigError, match=re.escape(message)), use_parameter_names(own):
        build_object(node, partial, allowed=Allowed(), key="optimizer")(own.parameters())


def test_options_that_are_words_or_any_number_of_numbers_are_left_to_the_optimizer() -> None:
    def own(
        params: Iterable[Any],
        skipped: tuple[str, ...] = ("bias", "norm"),
        layers: tuple[int, ...] = (1, 2),
        powers: Sequence[float] = (1.0, 2.0),
        none: tuple[()] = (),
    ) -> torch.optim.Optimizer:
        raise NotImplementedError

    check_tuples(own, {"skipped": ["bias"], "layers": [3], "powers": [1.0], "none": ["a"]}, key="optimizer")
