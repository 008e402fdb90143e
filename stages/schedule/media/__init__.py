"""Images of prompts: which of their rows are in the executor's encoder cache, and which steps encode them."""
