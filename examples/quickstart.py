import jax
import jax.numpy as jnp

from jaxflash import dot_product_attention

B, T, N, H = 2, 1024, 8, 64
query, key, value = jax.random.normal(jax.random.key(0), (3, B, T, N, H), jnp.bfloat16)

# The arguments, shapes and results of jax.nn.dot_product_attention.
ours = dot_product_attention(query, key, value, is_causal=True)
theirs = jax.nn.dot_product_attention(query, key, value, is_causal=True)
print("largest difference from jax.nn:", jnp.abs(ours - theirs).max())


# A primitive with derivatives, so every transformation composes.
def loss(query, key, value):
    out = dot_product_attention(query, key, value, is_causal=True)
    return jnp.square(out.astype(jnp.float32)).mean()


gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(query, key, value)
print("gradients:", [g.shape for g in gradients])

value_at, slope = jax.jvp(loss, (query, key, value), (query, key, value))
print("loss:", value_at, "along (query, key, value):", slope)
