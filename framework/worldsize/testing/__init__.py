"""Test tools for authors of recipes and plugins.

Names are imported lazily: they need torch, which other tools in this package do not.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worldsize.testing.port import PortConfig, compose_recipe, same_losses

__all__ = ["PortConfig", "compose_recipe", "same_losses"]


def __getattr__(name: str) -> Any:
    """Import a name in ``__all__`` on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from worldsize.testing import port

    return getattr(port, name)
