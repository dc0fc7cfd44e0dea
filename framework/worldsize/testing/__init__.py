"""Tools with which authors of recipes and plugins test them.

Its names are imported when they are first asked for, since they need torch, which other tools here do without.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worldsize.testing.port import PortConfig, composed, same_losses

__all__ = ["PortConfig", "composed", "same_losses"]


def __getattr__(name: str) -> Any:
    """Return a name of ``__all__``."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from worldsize.testing import port

    return getattr(port, name)
