"""Lets a model have other parameters while a recipe makes its optimizer for these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn


@contextmanager
def substituted(model: nn.Module, replacements: Mapping[int, nn.Parameter]) -> Iterator[None]:
    """Let ``model`` have other parameters, of any shapes, within the context; keys: ids of replaced ones.

    A recipe's optimizer made within the context is for these, with the groups and options that it has for the model:
    modules and names are the same.
    """
    places = [
        (module._parameters, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and id(parameter) in replacements
    ]
    for own, name, parameter in places:
        own[name] = replacements[id(parameter)]
    try:
        yield
    finally:
        for own, name, parameter in places:
            own[name] = parameter
