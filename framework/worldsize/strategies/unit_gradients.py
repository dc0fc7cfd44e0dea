"""Completion of gradients that some ranks lack, for models sharded with ``fully_shard``.

FSDP sums only the existing gradients of a unit, so ranks with gradients of different parameters would mix these up.
Here, every rank sums gradients for all parameters of a unit that it computes, with zeros for missing ones. Ranks then
exchange which parameters had a gradient on any rank, since optimizers must skip the others. Only ranks that lack a
gradient wait for the result.

Scalar parameters cannot be sharded; their gradients are averaged separately.

FSDP's parameter groups are private API, tested with torch 2.15.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from itertools import chain
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from worldsize.collectives.group import start_collective
from worldsize.collectives.ordered import Counter, Tree, reduce_ordered
from worldsize.collectives.per_rank import zeros_like
from worldsize.collectives.staged import finish_reduction
from worldsize.core import Dealing, Reduction
from worldsize.strategies.gradient_reducer import Presence, PresenceExchange
from worldsize.strategies.parameter_changes import build_freeze_error, build_hook_error, hook_count


@final
class UnitGradients:
    """Gradients of all units of ``model``, which is sharded over ``group`` or has no units.

    ``one_update``: whether a step has one forward and backward pass per micro-batch. Otherwise the backward passes of
    calls may belong to later updates, and units without any gradient on a rank are left to FSDP.
    """

    def __init__(self, model: nn.Module, group: ProcessGroup | None, *, one_update: bool = True) -> None:
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)] if group else []
        states: list[Any] = [module._get_fsdp_state() for module in sharded]
        self._units = [_Unit(unit, counts_calls=one_update) for state in states for unit in state._fsdp_param_groups]
        self._exchange = PresenceExchange(group, self._units[0].device) if group and self._units else None
        for state in states:
            _complete_last(state, self._units)

    def begin_step(self, *, counts: bool = True) -> None:
        """Begin a step, or with ``counts=False``, passes whose gradients are discarded."""
        for unit in self._units:
            unit.reset_unit(counts=counts)

    def remove_missing(self) -> None:
        """Remove gradients missing on all ranks, after all sums of a step; all ranks must call it."""
        if self._exchange is None:
            return
        present = self._exchange.present_anywhere([each for unit in self._units for each in unit.present])
        if all(present):
            return
        parameters = [each for unit in self._units for each in unit.parameters]
        for parameter, is_present in zip(parameters, present, strict=True):
            if not is_present:
                parameter.grad = None


def _complete_last(state: Any, units: Sequence[_Unit]) -> None:
    """Complete remaining ``units`` at the end of a backward pass, before FSDP does."""
    end = state._root_post_backward_final_callback

    def complete() -> None:
        for unit in units:
            unit.is_ending = True
        for unit in units:
            unit.flush_held_gradients()
        end()
        for unit in units:
            unit.end_pass()

    _replace_attribute(state, "_root_post_backward_final_callback", complete)


def _replace_attribute(owner: Any, name: str, value: object) -> None:
    """Replace an attribute of a torch object that does not provide a hook."""
    setattr(owner, name, value)


@final
class _Unit:
    """One parameter group of FSDP; its gradients are summed once per pass.

    If a unit is called several times in a pass, it is complete only after the last of its backward passes. If its
    inputs do not need gradients, it is complete only at the end of the whole pass.
    """

    def __init__(self, group: Any, *, counts_calls: bool) -> None:
        self._group, self._sum, self._register = group, group.post_backward, group._register_post_backward_hook
        self._end_forward = group.post_forward
        self._calls = 0  # number of calls in this pass with pending backward passes
        self._is_held = self._is_reached = self._counts = False
        self._present = [False] * len(group.fsdp_params)
        self._counts_calls = counts_calls
        _replace_attribute(group, "post_backward", self._finish_backward)
        if counts_calls:
            _replace_attribute(group, "_register_post_backward_hook", self._register_call)
            _replace_attribute(group, "post_forward", self._finish_forward)
        self.device: torch.device = group.device
        self.is_ending = False
        """Whether the backward pass is ending, so that all gradients have arrived."""

    def reset_unit(self, *, counts: bool) -> None:
        """Begin a step, or with ``counts=False``, passes whose gradients are discarded."""
        self._counts = counts
        self._present = [not each.sharded_param.requires_grad for each in self._group.fsdp_params]
        self._is_held = self._is_reached = self.is_ending = False
        self._calls = 0

    @property
    def present(self) -> Sequence[bool]:
        """Whether each parameter had a gradient on this rank, or does not need one."""
        return self._present

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The sharded parameters, as held by the optimizer."""
        return [each.sharded_param for each in self._group.fsdp_params]

    def _finish_forward(self, *args: Any) -> Any:
        self._check_parameters()
        return self._end_forward(*args)

    def _check_parameters(self) -> None:
        """Compare the gathered parameters, which the loss sees, with the sharded ones.

        Raises:
            ConfigError: the loss froze, unfroze or hooked a parameter.
        """
        pairs = [(each, each.unsharded_param) for each in self._group.fsdp_params if hasattr(each, "_unsharded_param")]
        if any(gathered.requires_grad != each.sharded_param.requires_grad for each, gathered in pairs):
            names = {each._param_fqn.removeprefix("model."): (each.sharded_param, gathered) for each, gathered in pairs}
            unfrozen = [name for name, (own, gathered) in names.items() if gathered.requires_grad > own.requires_grad]
            frozen = [name for name, (own, gathered) in names.items() if gathered.requires_grad < own.requires_grad]
            raise build_freeze_error(unfrozen, frozen)
        if any(hook_count(gathered) for _, gathered in pairs):
            raise build_hook_error(
                [each._param_fqn.removeprefix("model.") for each, gathered in pairs if hook_count(gathered)]
            )

    def flush_held_gradients(self) -> None:
        """Sum held gradients, if a later call of the unit did not get a backward pass."""
        if self._is_held:
            self._finish_backward()

    def end_pass(self) -> None:
        """Reset the count of calls in this pass."""
        self._calls, self.is_ending = 0, False

    def _register_call(self, args: Any, kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))  # opens chunks of sequences, too
        given = tuple(leaves)
        made, _ = self._register(given, {})
        self._calls += made is not given  # the same if no input needs a gradient
        return tree_unflatten(made, structure)

    def _finish_backward(self, *_: object) -> None:
        if not self._counts:
            self._sum()
            return
        self._calls = 0 if self.is_ending else max(0, self._calls - 1)
        if not self.is_ending or self._group._training_state.name == "PRE_BACKWARD":
            self._is_reached = True
        if not self._group.reduce_grads:
            self._sum()
        elif self._calls:
            self._hold_gradients()
        else:
            self._complete()

    def _hold_gradients(self) -> None:
        self._is_held = True
        _replace_attribute(self._group, "reduce_grads", False)
        try:
            self._sum()
        finally:
            _replace_attribute(self._group, "reduce_grads", True)

    def _complete(self) -> None:
        """Sum gradients over ranks, with zeros for missing ones if the unit ran in this step."""
        self._is_held = False
        units = [each for each in self._group.fsdp_params if hasattr(each, "_unsharded_param")]
        own = [each.unsharded_param for each in units]
        # torch 2.11 stores earlier micro-batches' gradients elsewhere if their dtype differs
        earlier = [getattr(each, "unsharded_accumulated_grad", None) is not None for each in units]
        has = [each.grad is not None or one for each, one in zip(own, earlier, strict=True)]
        if any(has) or (has and self._is_reached and self._counts_calls):
            self._present = [one or other for one, other in zip(self._present, has, strict=True)]
            for parameter, has_gradient in zip(own, has, strict=True):
                if not has_gradient and parameter.requires_grad:
                    parameter.grad = zeros_like(parameter)
        self._sum()


class ScalarGradients(ABC):
    """Abstract base: averages unsharded parameters' gradients over a step's micro-batches.

    Gradients missing in all micro-batches stay None.
    """

    @abstractmethod
    def begin_step(self, batches: int, logical_ranks: int) -> None:
        """Begin a step of ``batches`` micro-batches on this rank, and ``logical_ranks`` in total."""

    @abstractmethod
    def add(self, batch: int) -> None:
        """Add the gradients after the backward pass of micro-batch ``batch``."""

    @abstractmethod
    def set_means(self) -> None:
        """Set ``.grad`` to the mean; all ranks must call it."""


def scalar_gradients(
    reduce: Reduction, model: nn.Module, group: ProcessGroup, dealing: Dealing = "cyclic"
) -> ScalarGradients:
    """Create the averages over ``group`` for unsharded parameters of ``model``."""
    own = [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]
    if not own:
        return _NO_SCALARS
    return _OrderedScalars(own, group, dealing) if reduce == "ordered" else _FlatScalars(own, group)


@final
class _NoScalars(ScalarGradients):
    def begin_step(self, batches: int, logical_ranks: int) -> None: ...

    def add(self, batch: int) -> None: ...

    def set_means(self) -> None: ...


_NO_SCALARS = _NoScalars()


@final
class _FlatScalars(ScalarGradients):
    """Lets autograd accumulate micro-batches, with losses scaled to yield the mean."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: ProcessGroup) -> None:
        self._tables, self._group = _group_by_dtype(parameters), group

    def begin_step(self, batches: int, logical_ranks: int) -> None: ...

    def add(self, batch: int) -> None: ...

    def set_means(self) -> None:
        for parameters in self._tables:
            table_2n = _build_gradient_table(parameters)
            start_collective(dist.all_reduce, table_2n, group=self._group).wait()
            present = {index for index, parameter in enumerate(parameters) if parameter.grad is not None}
            _set_gradients(parameters, table_2n, self._group.size(), present)


@final
class _OrderedScalars(ScalarGradients):
    """Fixed-tree sums (:mod:`worldsize.collectives.ordered`): same bits at every world size."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: ProcessGroup, dealing: Dealing) -> None:
        self._tables, self._group, self._dealing = _group_by_dtype(parameters), group, dealing
        self._counters: list[Counter] = []
        self._presences: list[Presence] = []  # for each table, which gradients exist in this step
        self._node: dict[int, int] = {}  # tree node of each micro-batch on this rank
        self._logical_ranks = self._nodes = 1

    def begin_step(self, batches: int, logical_ranks: int) -> None:
        self._logical_ranks = self._nodes = logical_ranks
        if self._dealing == "block":
            self._node = {batch: batch for batch in range(batches)}
        else:
            tree, rank = Tree(logical_ranks, self._group.size()), self._group.rank()
            self._nodes = tree.nodes
            self._node = {leaf: node for node in range(tree.count_nodes(rank)) for leaf in tree.list_leaves(node)}
        self._counters = [Counter() for _ in set(self._node.values())]
        self._presences = [Presence(parameters) for parameters in self._tables]

    def add(self, batch: int) -> None:
        self._counters[self._node[batch]].add([_build_gradient_table(parameters) for parameters in self._tables])
        for presence in self._presences:
            presence.record_gradients()
        for parameter in chain.from_iterable(self._tables):
            parameter.grad = None

    def set_means(self) -> None:
        sums = [counter.waiting[0] for counter in self._counters]
        for parameters, presence, *rows in zip(self._tables, self._presences, *sums, strict=True):
            flat = [row.flatten() for row in rows]
            total = finish_reduction(reduce_ordered(flat, self._group, self._dealing, nodes=self._nodes))
            present = {*range(len(parameters))} - presence.absent
            _set_gradients(parameters, total.view(2, -1), self._logical_ranks, present)
        self._counters = []


def _group_by_dtype(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    dtypes = dict.fromkeys(parameter.dtype for parameter in parameters)
    return [[each for each in parameters if each.dtype == dtype] for dtype in dtypes]


def _build_gradient_table(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return a table (2, n) of the gradients, and of 1 for existing or 0 for missing ones."""
    table_2n = parameters[0].new_zeros(2, len(parameters))
    for place, parameter in enumerate(parameters):
        if parameter.grad is not None:
            table_2n[0, place], table_2n[1, place] = parameter.grad, 1
    return table_2n


def _set_gradients(parameters: Sequence[nn.Parameter], total_2n: Tensor, divisor: int, present: Set[int]) -> None:
    """Set the gradients that any micro-batch had, from the summed :func:`_build_gradient_table`.

    ``present``: indices of gradients that exist on this rank; checking others waits for a GPU.
    """
    for index, (parameter, total, count) in enumerate(zip(parameters, *(total_2n / divisor), strict=True)):
        parameter.grad = total.clone() if index in present or bool(count) else None
