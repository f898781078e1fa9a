"""Drawing attention weights and mixing values with them."""

from bayesian_attention.engine.dispatch import AttentionOutput, attend

__all__ = ["AttentionOutput", "attend"]
