"""The one seam: every layer of every host ends here."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesian_attention import engine
from bayesian_attention.divergences import (
    Divergence,
    Port,
    entrywise,
    fork,
    has_linear_form,
    key_mask,
    linear_divergence,
    reduce_valid,
    rows_in_budget,
    sum_over_row_blocks,
)
from bayesian_attention.engine import AttentionOutput, noise, reference
from bayesian_attention.engine.arguments import check_inputs, checked_queries
from bayesian_attention.engine.backends import choose
from bayesian_attention.engine.dispatch import default_query_offset
from bayesian_attention.engine.rows import DenseRows, NoiseAddress, Rows, log_normalise
from bayesian_attention.numerics import autocast_off, wide
from bayesian_attention.posteriors import Posterior
from bayesian_attention.priors import ConstantPrior, Prior, PriorModule


class KLTerm(NamedTuple):
    """What one attention call contributes to the divergence.

    Attributes:
        total: sum over valid entries, batch included; shape ().
        entries: number of valid entries; shape ().
        examples: size of the batch; None where the attention cannot tell (a graph).
        differentiable: whether gradients were on when it was computed.
        training: whether the layer was in training mode.
    """

    total: Tensor
    entries: Tensor
    examples: int | None
    differentiable: bool
    training: bool


class PassState(NamedTuple):
    """What decides the draws of one pass.

    Attributes:
        active: whether weights were drawn.
        seed: the layer's seed; None: fresh ones from PyTorch's generator, which checkpoints restore.
        calls: seeded calls of the layer in the pass.
    """

    active: bool
    seed: Tensor | None
    calls: int


class StochasticAttention(nn.Module):
    """Draws the attention weights of one layer and records their divergence from the prior.

    A host layer owns one as a submodule and enters by :meth:`attend`, where queries, keys and values are at
    hand, or by :meth:`weights`, where only logits are.

    Args:
        posterior: family and settings.
        prior: prior; a :class:`ConstantPrior` by default. A deterministic posterior takes none.
        heads: number of attention heads (of the queries).
        key_dim: features of a key a head; needed by priors that look at the keys.

    Raises:
        ValueError: a prior for a deterministic posterior, or settings that do not fit.
    """

    def __init__(
        self, posterior: Posterior, prior: Prior | None = None, *, heads: int, key_dim: int | None = None
    ) -> None:
        super().__init__()
        if not isinstance(posterior, Posterior):
            raise TypeError(f"posterior: must be a posterior such as Weibull(); got {posterior!r}")
        if prior is not None and not isinstance(prior, Prior):
            raise TypeError(f"prior: must be a prior such as ConstantPrior(), or None; got {prior!r}")
        family = posterior.prior_family
        if family is None and prior is not None:
            raise ValueError(f"prior: {posterior} has no divergence, so it takes no prior; got {prior}")
        self.posterior = posterior.build(heads)
        self.prior = None if family is None else (prior or ConstantPrior()).build(family, heads, key_dim)
        self.heads = heads
        #: What computes :meth:`attend`; as of :func:`bayesian_attention.attend`.
        self.backend = "auto"
        #: Draw weights: True or False, or None to follow ``self.training``.
        self.sampling: bool | None = None
        #: Whether to compute and keep the divergence of a call.
        self.record_kl = True
        #: Seed of this layer, set by ``sampling(model, seed=…)``; None: a fresh seed a call.
        self.seed: Tensor | None = None
        self.sample_index: Tensor | int = 0
        self.batch_ids: Tensor | None = None
        #: Calls since the root's forward pass began, so that a shared layer draws anew in each.
        self.call_number = 0
        #: True once a root module delimits the forward passes; then terms are kept only inside one.
        self.tracked = False
        self.inside_forward = False
        self.opened_by = 0
        #: Whether the layer ran since the last pass, but not in a pass of the root.
        self.ran_outside = False
        #: Whether the attention is over a graph, whose rows cannot be split or repeated.
        self.on_graph = False
        #: How the last differentiable pass drew its weights; see :meth:`_check_replay`.
        self.last_pass: PassState | None = None
        self.kl_terms: list[KLTerm] = []
        self.calls_since_read = 0

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        query_offset: int | None = None,
        query_valid: Tensor | None = None,
    ) -> AttentionOutput:
        """Scaled dot-product attention; arguments as of :func:`bayesian_attention.attend`, and one more.

        Args:
            query: as of ``attend``.
            key: as of ``attend``.
            value: as of ``attend``.
            mask: as of ``attend``.
            is_causal: as of ``attend``.
            scale: as of ``attend``.
            query_offset: as of ``attend``.
            query_valid: boolean, broadcasts against (…, H, Lq): the queries whose weights count in the
                divergence. Padding has outputs that nobody reads; its weights are no latent variables.
        """
        address = self._address()
        if query_offset is None:
            query_offset = default_query_offset(query, key, is_causal)
        check_inputs(query, key, value, mask)
        query_valid = checked_queries(query_valid, query)
        prior = self._recorded_prior
        own_query, own_key = query, key
        ports: tuple[Port, Port] | None = None
        if prior is not None and choose(self.backend, self.posterior.spec, query, key, value) != "reference":
            (own_query, query, query_port), (own_key, key, key_port) = fork(query), fork(key)
            ports = None if query_port is None or key_port is None else (query_port, key_port)
        result = engine.attend(
            own_query,
            own_key,
            value,
            self.posterior,
            mask=mask,
            is_causal=is_causal,
            scale=scale,
            sample=address is not None,
            seed=None if address is None else address.seed,
            sample_index=0 if address is None else address.sample,
            batch_ids=None if address is None else address.batch_ids,
            query_offset=query_offset,
            backend=self.backend,
        )
        if prior is not None:
            with autocast_off(query):
                divergence = self._attention_divergence(
                    prior, query, key, result.lse, mask, is_causal, scale, query_offset, query_valid, ports
                )
            self._record(divergence, query.shape[0] if query.dim() > 3 else 1)
        return result

    def weights(
        self, logits: Tensor, rows: Rows, keys: Tensor | None = None, *, query_valid: Tensor | None = None
    ) -> Tensor:
        """Attention weights for given logits.

        Args:
            logits: (…, H, Lq, Lk) with :class:`DenseRows`, or (E, H) with :class:`SegmentRows`.
            rows: what is normalised over what, and which entries are valid.
            keys: (…, H, Lk, D), or (H, N, D) of a graph; needed by priors that look at the keys.
            query_valid: as of :meth:`attend`; for dense rows.

        Returns:
            Weights of the shape and dtype of ``logits``; each row sums to 1, or is 0 where it is
            masked throughout.
        """
        with autocast_off(logits):
            wide_logits = wide(logits)
            address = self._address()
            spec, spread = self.posterior.spec, self.posterior()
            log_w = reference.log_weights(wide_logits, rows, spec, spread, address)
            prior = self._recorded_prior
            if prior is not None:
                log_p = log_w if address is None else log_normalise(wide_logits, rows)[0]
                examples = None
                if isinstance(rows, DenseRows):
                    examples = logits.shape[0] if logits.dim() > 3 else 1
                self._record(self._divergence(prior, log_p, rows, keys, query_valid), examples)
            return log_w.exp().to(logits.dtype)

    @property
    def _recorded_prior(self) -> PriorModule | None:
        """The prior from which the divergence of this call is to be computed; None: of this call none is."""
        # A checkpointed block runs again in the backward pass, after the records are closed. It must then do
        # what it did, divergence included; _record keeps nothing of it.
        wanted = self.inside_forward or not self.tracked or torch.is_grad_enabled()
        return self.prior if self.record_kl and wanted else None

    def _address(self) -> NoiseAddress | None:
        """Where this call's noise lives; None for the posterior mean."""
        if self.tracked and not self.inside_forward and self.record_kl and not _in_backward():
            self.ran_outside = True
        if not self.posterior.spec.stochastic:
            return None
        if self.last_pass is not None and _in_backward():
            self._check_replay(self.last_pass)
        if not self._active:
            return None
        if self.seed is None:
            return NoiseAddress(noise.new_seed())
        seed = noise.derive_seed(self.seed, self.call_number)
        self.call_number += 1
        return NoiseAddress(seed, self.sample_index, self.batch_ids)

    @property
    def _active(self) -> bool:
        return self.training if self.sampling is None else self.sampling

    def pass_state(self) -> PassState:
        """What decides the draws now."""
        return PassState(self._active, self.seed, self.call_number)

    def _check_replay(self, last: PassState) -> None:
        """A checkpointed block runs again in the backward pass: refuse where it would draw other weights."""
        if self._active != last.active or self.seed is not last.seed:
            raise RuntimeError(
                "a checkpointed block ran forward under sampling(...), and backward() runs outside of that block, "
                "so it would draw other weights; call backward() inside it"
            )
        if self.seed is not None and last.calls > 1:
            raise RuntimeError(
                "a checkpointed layer ran more than once in a pass under sampling(seed=...), so its draws cannot be "
                "told apart when it runs again; leave out the seed, torch.manual_seed rules then"
            )

    def _attention_divergence(
        self,
        prior: PriorModule,
        query: Tensor,
        key: Tensor,
        lse: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float | None,
        query_offset: int,
        query_valid: Tensor | None,
        ports: tuple[Port, Port] | None,
    ) -> Divergence:
        """The divergence of dense attention: in linear time where it has such a form, else in blocks of rows."""
        spec = self.posterior.spec
        over_keys = key_mask(mask, reference.MASKED_BELOW)
        if over_keys is not None and has_linear_form(spec, prior, is_causal=is_causal):
            valid, bias = over_keys
            divergence = linear_divergence(
                spec,
                self.posterior(),
                prior,
                query,
                key,
                lse,
                scale=scale,
                valid=valid,
                bias=bias,
                is_causal=is_causal,
                query_offset=query_offset,
                query_valid=query_valid,
                ports=ports,
            )
            if divergence is not None:
                return divergence
        groups = query.shape[-3] // key.shape[-3]
        keys = key.repeat_interleave(groups, dim=-3) if groups > 1 else key

        def of_rows(first: int, stop: int) -> Divergence:
            logits, rows = reference.dense_logits(
                query[..., first:stop, :],
                key,
                mask=mask if mask is None or mask.dim() < 2 or mask.shape[-2] == 1 else mask[..., first:stop, :],
                is_causal=is_causal,
                scale=scale,
                query_offset=query_offset + first,
            )
            part = lse[..., first:stop].unsqueeze(-1)
            log_p = logits - part.masked_fill(part.isneginf(), 0.0)
            counted = query_valid
            if query_valid is not None and query_valid.shape[-1] != 1:
                counted = query_valid[..., first:stop]
            return self._divergence(prior, log_p, rows, keys, counted)

        queries = query.shape[-2]
        return sum_over_row_blocks(of_rows, queries, rows_in_budget((*query.shape[:-1], key.shape[-2])))

    def _divergence(
        self, prior: PriorModule, log_p: Tensor, rows: Rows, keys: Tensor | None, query_valid: Tensor | None
    ) -> Divergence:
        """The divergence summed over entries, given the log of the mean weights; masked entries may hold anything."""
        log_prior: Tensor | None = None
        if prior.needs_keys:
            if keys is None:
                raise ValueError(f"keys: {prior.spec} looks at the keys, and this attention was given none")
            log_prior = log_normalise(rows.keys_over_entries(prior.scores(keys)), rows)[0]
        if rows.valid is not None:
            # Masked entries are −∞, whose differences are NaN; any finite value does, as they do not count.
            log_p = log_p.masked_fill(~rows.valid, 0.0)
            log_prior = None if log_prior is None else log_prior.masked_fill(~rows.valid, 0.0)
        spread = self.posterior()
        if isinstance(spread, Tensor):
            spread = rows.heads_over_entries(spread)
        parameters = prior.distribution(log_prior, rows.heads_over_entries)
        counted = rows.valid
        if query_valid is not None:
            counted = query_valid.unsqueeze(-1) if counted is None else counted & query_valid.unsqueeze(-1)
        return reduce_valid(entrywise(self.posterior.spec, spread, log_p, parameters), counted)

    def _record(self, divergence: Divergence, examples: int | None) -> None:
        """Keep the divergence of one call. ``examples``: size of the batch, None where there is none."""
        term = KLTerm(divergence.total, divergence.entries, examples, torch.is_grad_enabled(), self.training)
        if self.tracked:
            if self.inside_forward:
                self.kl_terms = [*self.kl_terms, term]
            return
        # Without a root to delimit forward passes only the last call is kept, lest a loop that never
        # reads the divergence keeps every graph alive. Calls in another mode are another pass.
        same_mode = bool(self.kl_terms) and self.kl_terms[-1][3:] == term[3:]
        self.calls_since_read = self.calls_since_read + 1 if same_mode else 1
        self.kl_terms = [term]

    def __getstate__(self) -> dict[str, Any]:
        """Recorded terms belong to a graph, and seeds to a block of ``sampling``: copies and files go without."""
        fresh: dict[str, Any] = {"kl_terms": [], "calls_since_read": 0, "inside_forward": False, "last_pass": None}
        fresh |= {"sampling": None, "seed": None, "sample_index": 0, "batch_ids": None, "call_number": 0}
        return {**self.__dict__, **fresh, "ran_outside": False}


def _in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread, as torch.utils.checkpoint asks it."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
