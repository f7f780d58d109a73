"""Context parallelism: attention to sequences that are split over the ranks of an axis."""
