"""What models are made of: how the weights of a layer are read."""
