"""``python -m worldsize.worker RUN_DIR``: what torchrun, srun or mpirun start."""

from worldsize.worker.process import main

main()
