"""Base classes for strategies with workers that train independently and synchronize periodically.

A strategy derives from :class:`~worldsize.strategies.periodic.strategy.PeriodicSyncStrategy` and makes an
:class:`~worldsize.strategies.periodic.replica.OuterOptimizer`, which is told of every step and decides when workers
exchange what.
"""
