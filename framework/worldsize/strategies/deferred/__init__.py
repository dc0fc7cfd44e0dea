"""Deferred initialization: a model is described first, and its tensors are made one at a time once it is sharded.

``recorder`` watches a model's constructor and keeps the tensors of others from which it made weights; ``fakes`` are its
tensors, without memory; ``tape`` has what it did to them, ``draws`` its random numbers.
``model`` makes the tensors from the tape.
"""
