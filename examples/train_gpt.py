"""Trains a small GPT on the source text of Python's standard library.

    python examples/train_gpt.py
    python examples/train_gpt.py --attention xla

The model is plain flax.nnx: jaxflash comes in as the attention_fn of
nnx.MultiHeadAttention. Everything but the attention is the same for every
--attention, down to the batches, so the curves of several runs into one folder
coincide, and its loss.png shows them together.

Written to --out: one JSON log per kind of attention, and loss.png.
"""

import argparse
import json
import math
import pathlib
import platform
import sysconfig
import time

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

from jaxflash.flax import attention_fn

matplotlib.use("Agg")
import matplotlib.pyplot as plt

VOCABULARY = 256  # bytes
HELD_OUT_EVERY = 20  # one file of twenty is never trained on
PROMPT = b"def "

# By backend. width: of the residual stream; length: of the context, in bytes; seconds:
# when training stops (0: never), so that a slow machine gets to see the end too.
DEFAULTS = {
    "cpu": dict(
        steps=600, batch=8, length=256, layers=4, heads=4, width=128,
        learning_rate=3e-3, dtype="float32", seconds=140.0,
    ),
    "gpu": dict(
        steps=2000, batch=8, length=2048, layers=8, heads=4, width=512,
        learning_rate=1e-3, dtype="bfloat16", seconds=170.0,
    ),
}  # fmt: skip
DTYPES = ("float32", "bfloat16", "float16")
AT_LEAST = dict(
    steps=1, batch=1, length=len(PROMPT), layers=1, heads=1, width=1, seconds=0,
    eval_every=1, eval_batches=1, sample=0, seed=0,
)  # fmt: skip


def jax_nn_attention(implementation):
    """`jax.nn.dot_product_attention` with the calling convention of nnx."""

    def attend(query, key, value, *, mask=None, is_causal=False, **_):
        return jax.nn.dot_product_attention(
            query, key, value, None, mask, is_causal=is_causal,
            implementation=implementation,
        )  # fmt: skip

    return attend


ATTENTION = {
    "jaxflash": attention_fn,
    "xla": jax_nn_attention("xla"),
    "cudnn": jax_nn_attention("cudnn"),
}


def with_rotary(attend):
    """`attend` on queries and keys that are rotated by their positions."""

    def rotate(x):
        half = x.shape[-1] // 2
        frequency = 10_000.0 ** (-jnp.arange(half) / half)
        angle = jnp.arange(x.shape[-3])[:, None, None] * frequency
        a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        rotated = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
        return rotated.astype(x.dtype)

    def fn(query, key, value, **options):
        return attend(rotate(query), rotate(key), value, **options)

    return fn


class Block(nnx.Module):
    """Attention and a two-layer perceptron, each behind a norm and a residual."""

    def __init__(self, args, rngs):
        dtype = jnp.dtype(args.dtype)
        self.norm1 = nnx.LayerNorm(args.width, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            args.heads, args.width, dtype=dtype, use_bias=False, decode=False,
            attention_fn=with_rotary(ATTENTION[args.attention]), rngs=rngs,
        )  # fmt: skip
        self.norm2 = nnx.LayerNorm(args.width, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(args.width, 4 * args.width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * args.width, args.width, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x), is_causal=True)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    """bytes [B, T] -> logits [B, T, 256] of the byte that follows each."""

    def __init__(self, args, rngs):
        dtype = jnp.dtype(args.dtype)
        self.embed = nnx.Embed(VOCABULARY, args.width, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(args, rngs) for _ in range(args.layers)])
        self.norm = nnx.LayerNorm(args.width, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(args.width, VOCABULARY, dtype=dtype, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).astype(jnp.float32)


def read_corpus():
    """The standard library as two byte arrays: training text and held-out text."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    files = sorted(
        path.relative_to(root)
        for path in root.rglob("*.py")
        if not skip & set(path.relative_to(root).parts)
    )
    texts = [(root / path).read_bytes() for path in files]
    held_out = b"".join(texts[::HELD_OUT_EVERY])
    del texts[::HELD_OUT_EVERY]
    return tuple(np.frombuffer(t, np.uint8) for t in (b"".join(texts), held_out))


def windows(text, starts, length):
    """[len(starts), length + 1] bytes: inputs and, shifted by one, targets."""
    return text[np.asarray(starts)[:, None] + np.arange(length + 1)].astype(np.int32)


def build(args):
    """The model, its parameters, and the jitted steps that use them."""
    model = GPT(args, nnx.Rngs(args.seed))
    graph, parameters = nnx.split(model)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, args.learning_rate, min(100, args.steps // 10), args.steps
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b2=0.98, weight_decay=0.1),
    )

    def loss_fn(parameters, tokens):
        logits = nnx.merge(graph, parameters)(tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    @jax.jit
    def train_step(parameters, state, tokens):
        loss, gradients = jax.value_and_grad(loss_fn)(parameters, tokens)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    @jax.jit
    def generate(parameters, tokens, key):
        """Fills tokens [1, T] from the end of the prompt on, at temperature 0.8."""

        def step(t, tokens):
            logits = nnx.merge(graph, parameters)(tokens)[0, t - 1]
            byte = jax.random.categorical(jax.random.fold_in(key, t), logits / 0.8)
            return tokens.at[0, t].set(byte)

        return jax.lax.fori_loop(len(PROMPT), tokens.shape[1], step, tokens)

    state = jax.jit(optimizer.init)(parameters)
    return parameters, state, train_step, jax.jit(loss_fn), generate


def train(args, log):
    """Runs the training loop; fills `log` with losses, speed and a sample."""
    began = time.perf_counter()
    text, held_out = read_corpus()
    parameters, state, train_step, evaluate, generate = build(args)
    log["parameters"] = sum(x.size for x in jax.tree.leaves(parameters))
    log["corpus_bytes"] = {"training": len(text), "held_out": len(held_out)}
    print(f"{log['parameters']:,} parameters, {len(text):,} bytes to train on, "
          f"{len(held_out):,} held out, {log['device']}, "
          f"{args.dtype}, attention: {args.attention}")  # fmt: skip

    evaluation = [
        windows(held_out, starts, args.length)
        for starts in np.linspace(
            0,
            len(held_out) - args.length - 1,
            args.batch * args.eval_batches,
            dtype=int,
        ).reshape(args.eval_batches, args.batch)
    ]

    def held_out_loss():
        return float(np.mean([evaluate(parameters, batch) for batch in evaluation]))

    rng = np.random.default_rng(args.seed)
    log["training_loss"], log["held_out_loss"] = [], [[0, held_out_loss()]]
    log["tokens_per_s"] = 0.0
    training_s = 0.0
    bar = tqdm(range(1, args.steps + 1), unit="step", mininterval=0.5)
    for step in bar:
        starts = rng.integers(0, len(text) - args.length - 1, args.batch)
        mark = time.perf_counter()
        parameters, state, loss = train_step(
            parameters, state, windows(text, starts, args.length)
        )
        log["training_loss"].append(float(loss))
        if step > 1:  # the first step compiles
            training_s += time.perf_counter() - mark
            log["tokens_per_s"] = (step - 1) * args.batch * args.length / training_s
        if step % args.eval_every == 0 or step == args.steps:
            log["held_out_loss"].append([step, held_out_loss()])
        bar.set_postfix(
            loss=f"{log['training_loss'][-1]:.3f}",
            held_out=f"{log['held_out_loss'][-1][1]:.3f}",
            tokens_per_s=f"{log['tokens_per_s']:,.0f}",
            refresh=False,
        )
        if args.seconds and time.perf_counter() - began > args.seconds:
            bar.close()
            print(f"stopped after {step} steps: --seconds {args.seconds:g} are over")
            log["held_out_loss"].append([step, held_out_loss()])
            break

    prompt = np.zeros((1, min(args.length, len(PROMPT) + args.sample)), np.int32)
    prompt[0, : len(PROMPT)] = list(PROMPT)
    sample = np.asarray(generate(parameters, prompt, jax.random.key(args.seed)))[0]
    log["sample"] = "".join(
        chr(byte) if byte == 10 or 32 <= byte < 127 else "\N{MIDDLE DOT}"
        for byte in sample
    )


def plot(folder):
    """loss.png from every log in the folder."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    styles = ["-", "--", ":", "-."]
    for path, style in zip(sorted(folder.glob("*.json")), styles, strict=False):
        log = json.loads(path.read_text())
        name = log["settings"]["attention"]
        losses = np.asarray(log["training_loss"])
        line = axes.plot(
            np.arange(1, len(losses) + 1), losses, style, lw=0.7, alpha=0.5
        )[0]
        axes.plot(
            *zip(*log["held_out_loss"], strict=True), style, color=line.get_color(),
            marker="o", ms=3,
            label=f"{name}: held out {log['held_out_loss'][-1][1]:.3f}, "
            f"{log['tokens_per_s']:,.0f} bytes/s",
        )  # fmt: skip
    axes.set(xlabel="step", ylabel="loss [nats per byte]")
    axes.set_title("GPT on the Python standard library, held out and training loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder / "loss.png", dpi=130)
    plt.close(figure)


def flag(name):
    """The command line's name of a setting."""
    return "--" + name.replace("_", "-")


def parse(argv=None):
    """Command line, with the defaults of the backend that JAX runs on."""
    backend = "gpu" if jax.default_backend() == "gpu" else "cpu"
    parser = argparse.ArgumentParser(
        description="Trains a small GPT on the source text of Python.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--attention", choices=ATTENTION, default="jaxflash")
    for name, default in DEFAULTS[backend].items():
        parser.add_argument(
            flag(name),
            type=type(default),
            default=default,
            choices=DTYPES if name == "dtype" else None,
        )
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--eval-batches", type=int, default=4)
    parser.add_argument("--sample", type=int, default=400, help="bytes to print")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, default="out/train_gpt")
    args = parser.parse_args(argv)
    if args.attention == "cudnn" and backend != "gpu":
        parser.error("--attention cudnn needs an NVIDIA GPU, JAX found none")
    for name, least in AT_LEAST.items():
        got = getattr(args, name)
        if not got >= least:
            parser.error(f"{flag(name)} must be at least {least}, got {got}")
    rate = args.learning_rate
    if not 0 < rate < math.inf:
        parser.error(f"--learning-rate must be above 0 and finite, got {rate}")
    if args.width % (2 * args.heads):
        parser.error(
            f"--width must be a multiple of twice --heads, since the head dim must be "
            f"even to be rotated, got --width {args.width} --heads {args.heads}"
        )
    return args


def main(argv=None):
    """Trains, prints a sample, writes the log and the plot."""
    args = parse(argv)
    log = {
        "settings": {**vars(args), "out": str(args.out)},
        "device": jax.devices()[0].device_kind,
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
    }
    began = time.perf_counter()
    train(args, log)
    log["total_s"] = time.perf_counter() - began

    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{args.attention}.json").write_text(json.dumps(log, indent=1) + "\n")
    plot(args.out)
    (_, first), *_, (_, last) = log["held_out_loss"]
    print(f"\n{log['sample']}\n")
    print(
        f"held-out loss {first:.3f} -> {last:.3f} nats per byte, "
        f"{log['tokens_per_s']:,.0f} bytes/s, {log['total_s']:.0f} s in all"
    )
    print(f"log and loss curve: {args.out}/{args.attention}.json, {args.out}/loss.png")


if __name__ == "__main__":
    main()
