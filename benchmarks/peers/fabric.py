"""Train with Lightning Fabric."""

from __future__ import annotations

import os

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader

from common import BATCH, LOG_EVERY, Report, arguments, dataset, model


def main() -> None:
    steps, out = arguments()
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    torch.set_num_threads(max(1, 2 // fabric.world_size))
    fabric.seed_everything(0)
    network = model()
    module, optimizer = fabric.setup(network, torch.optim.AdamW(network.parameters(), lr=1e-3))
    loader = fabric.setup_dataloaders(DataLoader(dataset(), batch_size=BATCH, shuffle=True, drop_last=True))
    report, number = Report(steps, out), 0
    while number < steps:
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(module(inputs), labels)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            number += 1
            report.step(number, loss.item() if number % LOG_EVERY == 0 else None)
            if number == steps:
                break


if __name__ == "__main__":
    main()
