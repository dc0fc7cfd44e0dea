"""``python -m worldsize``: the same as the ``worldsize`` command."""

from worldsize.app import main

main()
