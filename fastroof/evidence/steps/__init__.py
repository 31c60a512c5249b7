"""Files of whole steps: kernels-bench, `vllm bench forward`, forward passes and step logs."""
