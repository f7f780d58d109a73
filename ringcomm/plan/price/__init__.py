"""What a step costs: seconds, bytes of memory, and bytes sent."""
