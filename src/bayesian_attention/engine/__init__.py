"""Drawing attention weights and mixing values with them."""

from bayesian_attention.engine.dispatch import AttentionOutput, attend, attention_weights

__all__ = ["AttentionOutput", "attend", "attention_weights"]
