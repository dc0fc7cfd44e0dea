"""Train with Hugging Face Accelerate."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from common import BATCH, LOG_EVERY, Report, arguments, dataset, model


def main() -> None:
    steps, out = arguments()
    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(max(1, 2 // accelerator.num_processes))
    torch.manual_seed(0)
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    loader = DataLoader(dataset(), batch_size=BATCH, shuffle=True, drop_last=True)
    module, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    report, number = Report(steps, out), 0
    while number < steps:
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(module(inputs), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            number += 1
            report.step(number, loss.item() if number % LOG_EVERY == 0 else None)
            if number == steps:
                break
    accelerator.end_training()


if __name__ == "__main__":
    main()
