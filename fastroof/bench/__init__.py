"""Speed of fastroof on this machine: workloads, baselines, timing and a plot."""
