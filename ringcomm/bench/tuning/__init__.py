"""`ringcomm tune`: measure what `ringcomm.init` then chooses by: thresholds, kernels of a GPU, links between hosts."""
