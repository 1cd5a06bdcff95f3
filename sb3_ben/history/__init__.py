"""What happened and what is remembered of it."""
