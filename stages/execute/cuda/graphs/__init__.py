"""Steps as CUDA graphs: which shapes there are, how they are captured, and when."""
