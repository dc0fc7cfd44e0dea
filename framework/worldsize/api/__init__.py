"""The Python API of ``import worldsize as ws``, in addition to the base classes in ``worldsize.core``."""
