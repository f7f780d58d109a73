"""The machine: its cores, memory and control groups, and the thresholds that `ringcomm tune` measured on it."""
