"""Language models beside their peers: tokens per CPU-second, time to the first token, and answers after a kill."""
