"""Applications: data, model, recipe and metrics."""
