"""The executor: computes a step (forward pass, sampling, stopping on ids), and owns weights, KV memory and rows."""
