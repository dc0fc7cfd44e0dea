"""The same program at any world size: ``python train.py --help``."""

from worldsize.__main__ import train

if __name__ == "__main__":
    train()
