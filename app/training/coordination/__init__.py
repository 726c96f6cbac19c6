"""What the workers tell each other, and what is asked of them from outside."""
