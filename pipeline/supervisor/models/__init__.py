"""Several models: a server of stages for each, in threads of one supervisor, with one gateway process."""
