"""Tools with which authors of recipes and plugins test them."""

from worldsize.testing.port import PortConfig, composed, same_losses

__all__ = ["PortConfig", "composed", "same_losses"]
