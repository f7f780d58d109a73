"""torchmetrics: states that are summed, averaged and concatenated over the ranks."""

import tiny
import torch
import torch.distributed as dist
from torchmetrics import CatMetric, MaxMetric, MeanMetric, MeanSquaredError, MetricCollection, SumMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy


def run(backend, size):
    dist.init_process_group(backend)
    rank = dist.get_rank()
    numbers = [MeanMetric(), SumMetric(), MaxMetric(), CatMetric()]
    errors = MetricCollection([MeanSquaredError()])
    accuracy, auroc = MulticlassAccuracy(num_classes=3), BinaryAUROC()
    net = tiny.model()
    each_step = []
    for step, (x, y) in enumerate(tiny.batches(rank, size)):
        y, x = y[: 4 - rank], x[: 4 - rank]  # ranks concatenate different lengths
        out = net(x).detach()
        for metric in numbers:
            metric.update(out)
        each_step.append(errors(out, y)["MeanSquaredError"].item())
        accuracy.update((out.flatten() * 10).long().abs() % 3, torch.arange(len(x)) % 3)
        auroc.update(out.flatten().sigmoid(), (y.flatten() > 0).long())
        if step == 1:
            each_step += [numbers[0].compute().item(), accuracy.compute().item()]
    totals = [metric.compute() for metric in (*numbers, accuracy, auroc)]
    return each_step, [total.tolist() for total in totals], errors.compute()["MeanSquaredError"].item()
