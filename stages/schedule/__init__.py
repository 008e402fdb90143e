"""The scheduler: decides what the next step computes, and owns requests, queues, KV block tables and settled ids."""
