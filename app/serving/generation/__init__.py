"""Language models behind an endpoint: prompts wait in a queue that counts tokens, and answers are streamed."""
