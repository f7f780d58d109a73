"""Expert parallelism: mixtures of experts that replicas divide among themselves."""
