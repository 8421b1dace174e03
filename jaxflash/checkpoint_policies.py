"""Policies for jax.checkpoint that know the names of attention's residuals."""

import jax

# Saves the output and the log-sum-exp of every attention call and recomputes all else,
# so that the backward pass never runs the forward kernel a second time.
save_attention = jax.checkpoint_policies.save_only_these_names(
    "jaxflash_out", "jaxflash_lse"
)
