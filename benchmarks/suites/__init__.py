"""What the runners of other projects' tests share."""
