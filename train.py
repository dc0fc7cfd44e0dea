"""The same program at any world size: ``python train.py --help``."""

from worldsize.app.train import main

if __name__ == "__main__":
    main()
