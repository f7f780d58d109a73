"""What several tests share: calls, arrays and models, and what must come of them."""
