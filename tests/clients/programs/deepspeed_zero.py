"""DeepSpeed's ZeRO: sharded optimizer state (1), gradients (2) and parameters (3)."""

import deepspeed
import tiny
import torch


def run(backend, size):
    # An all-reduce for inference, which each rank would load; to compile it takes most of a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    return {f"stage {stage}": train(stage, size) for stage in (1, 2, 3)}


def train(stage, size):
    net = tiny.model()
    config = {
        "train_micro_batch_size_per_gpu": tiny.BATCH,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,  # DeepSpeed's own is compiled on first use
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    losses = []
    for batch in tiny.batches(engine.global_rank, size):
        loss = tiny.loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
        return losses, tiny.norms(engine.module)
