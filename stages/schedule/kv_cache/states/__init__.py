"""The states of models with recurrent layers: slots, snapshots, and where prompts are cut for them."""
