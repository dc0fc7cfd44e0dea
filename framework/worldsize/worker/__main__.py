"""``python -m worldsize.worker RUN_DIR``: the entry point for torchrun, srun or mpirun."""

from worldsize.worker.process import main

main()
