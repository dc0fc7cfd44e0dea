"""Deferred initialization: describe a model, shard it, then create its tensors one by one.

``recorder`` intercepts a model's constructor, and keeps existing tensors that weights are computed from. ``fakes`` are
memoryless tensors for the constructor; ``tape`` records its operations on them, and ``draws`` its random numbers.
``model`` creates the tensors from the tape.
"""
