"""Train with a hand-written loop: torch's DDP, DistributedSampler and DataLoader."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from common import BATCH, LOG_EVERY, Report, arguments, dataset, model


def main() -> None:
    steps, out = arguments()
    dist.init_process_group("gloo")
    torch.set_num_threads(max(1, 2 // dist.get_world_size()))
    torch.manual_seed(0)
    module = DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    data = dataset()
    sampler: DistributedSampler[object] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, drop_last=True)
    report, number, epoch = Report(steps, out), 0, 0
    while number < steps:
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(module(inputs), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            number += 1
            report.step(number, loss.item() if number % LOG_EVERY == 0 else None)
            if number == steps:
                break
        epoch += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
