"""Several GPUs: what a rank has of a model, and what ranks exchange on the GPUs and on the host."""
