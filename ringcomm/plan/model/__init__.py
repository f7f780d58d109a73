"""What is planned: a GPT, how it is divided over GPUs, and what these can do."""
