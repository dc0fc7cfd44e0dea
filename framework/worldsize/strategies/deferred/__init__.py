"""A model is described first, and its tensors are made one at a time when it is known who holds which part.

``recorder`` watches a model's constructor, whose tensors are ``fakes`` without memory; ``tape`` has what it did to
them, and ``draws`` its random numbers; ``model`` has the model, whose tensors are made from the tape.
"""
