"""Deferred initialization: a model is described first, and its tensors are made one at a time once it is sharded.

``recorder`` watches a model's constructor, whose tensors are ``fakes`` without memory, and ``calls`` what no operator
shows; ``tape`` has what it did to them, ``draws`` its random numbers, and ``borrowed`` the tensors from which it made
weights. ``model`` has the model, whose tensors are made from the tape into its ``slots``; ``footprint`` has what that
takes.
"""
