"""Pipeline parallelism: stages of a model on different ranks, and micro-batches that run through them."""
