"""What a model is worth at a length: losses, tasks, their intervals, and the page that tells it."""
