"""Training loop: rows from the data processes, two optimizers, scores and checkpoints."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tools.demo_model import packing
from tools.demo_model.checkpoint import load_weights, save_checkpoint
from tools.demo_model.network import Network, NetworkShape, rotary_tables, summed_loss
from tools.demo_model.optimizer import Optimizer, learning_rate_factor
from tools.demo_model.scoring import match_rates
from tools.demo_model.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

Loss = Callable[[Network, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# Number of shards in a pool: on the GPU many more than a step needs, so that steps differ.
POOL_SHARDS = {"cuda": 200, "cpu": 8}
FIRST_SHARDS = 8


@dataclass
class Pool:
    """Rows on the device from which steps sample; new rows replace the oldest ones."""

    rows: torch.Tensor
    written: int = 0

    def add(self, fresh: packing.Rows) -> None:
        """Store rows; a full pool loses its oldest rows."""
        new = torch.from_numpy(fresh.astype("int32")).to(self.rows.device, non_blocking=True)
        places = (self.written + torch.arange(len(new))) % len(self.rows)
        self.rows[places.to(self.rows.device)] = new
        self.written += len(new)

    def draw(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Return `count` random rows, with repetition: int32 of shape (count, length)."""
        filled = min(self.written, len(self.rows))
        places = torch.randint(0, filled, (count,), generator=generator)
        return self.rows[places.to(self.rows.device)]


@dataclass
class Training:
    """One run: the network, its start time and its output."""

    options: argparse.Namespace
    network: Network
    device: torch.device
    loss: Loss
    tables: tuple[torch.Tensor, torch.Tensor]
    step: int = 0
    began: float = field(default_factory=time.monotonic)

    def progress(self) -> float:
        """Return the finished share of the run, 0..1."""
        minutes, steps = self.options.minutes, self.options.steps
        if minutes is not None:
            return min(1.0, (time.monotonic() - self.began) / (60 * float(minutes)))
        return min(1.0, self.step / int(steps))

    def backward(self, rows: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """Add the gradients of these rows; `total` is the number of learned tokens in the step."""
        cos, sin = (table[: rows.shape[1]] for table in self.tables)
        cuda = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=cuda):
            loss = self.loss(self.network, rows, cos, sin) / total
        loss.backward()
        return loss.detach()

    def warm_up(self) -> None:
        """Compile for both row lengths, then start the clock."""
        counts = {packing.SHORT_ROW: self.options.short_rows}
        counts[packing.LONG_ROW] = self.options.long_rows
        for length, count in counts.items():
            if self.device.type == "cuda":
                rows = torch.full((count, length), 0x8000, dtype=torch.int32, device=self.device)
                self.report(f"compiled for {length}: {float(self.backward(rows, rows[0, 0])):.3f}")
        self.network.zero_grad(set_to_none=True)
        self.began = time.monotonic()

    def report(self, text: str) -> None:
        """Print a line with the step and the seconds since the start."""
        print(f"[{time.monotonic() - self.began:6.1f} s, step {self.step}] {text}", flush=True)

    def score(self, folder: Path) -> None:
        """Print the rates on the held-out sets and save the checkpoint."""
        found = match_rates(self.network, load_tokenizer(folder), self.options.score_count)
        self.report(", ".join(f"{name} {rate:.3f}" for name, rate in found.items()))
        save_checkpoint(self.network, folder)


def _pools(device: torch.device, shape: packing.ShardShape) -> tuple[Pool, Pool]:
    """Return empty pools for the short and the long rows."""
    shards = POOL_SHARDS[device.type]
    sizes = (
        (shards * shape.short_rows, packing.SHORT_ROW),
        (shards * shape.long_rows, packing.LONG_ROW),
    )
    short, long = (Pool(torch.zeros(size, dtype=torch.int32, device=device)) for size in sizes)
    return short, long


def run_steps(training: Training) -> None:
    """Train until the run's time or number of steps is reached."""
    options = training.options
    shape = packing.ShardShape(
        max(1, options.short_rows // options.reuse), max(1, options.long_rows // options.reuse)
    )
    stream = packing.shards(options.out, options.seed, options.workers, shape)
    short, long = _pools(training.device, shape)
    optimizer = Optimizer(training.network, options.matrix_rate, options.other_rate)
    generator = torch.Generator().manual_seed(options.seed)
    scored = training.began
    while (progress := training.progress()) < 1.0:
        for _ in range(FIRST_SHARDS if training.step == 0 else 1):
            fresh_short, fresh_long = next(stream)
            short.add(fresh_short)
            long.add(fresh_long)
        parts = [short.draw(options.short_rows, generator)]
        if progress >= options.long_from:
            parts.append(long.draw(options.long_rows, generator))
        total = torch.stack([(part >= 0x8000).sum() for part in parts]).sum()
        losses = [training.backward(part, total) for part in parts]
        optimizer.step(learning_rate_factor(progress))
        training.step += 1
        if training.step % 200 == 1:
            training.report("loss " + " + ".join(f"{float(loss):.5f}" for loss in losses))
        if time.monotonic() - scored > options.score_every:
            training.score(options.out)
            scored = time.monotonic()


def train(options: argparse.Namespace) -> None:
    """Train, score and save the model."""
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not options.keep_tokenizer:
        save_tokenizer(train_tokenizer(), options.out)
    shape = NetworkShape(
        num_hidden_layers=options.layers,
        hidden_size=options.hidden_size,
        intermediate_size=options.hidden_size * 8 // 3,
    )
    network = Network(shape).to(device)
    if options.resume is not None:
        load_weights(network, options.resume)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    print(f"{parameters:,} parameters on {device}", flush=True)
    loss: Loss = summed_loss if options.no_compile else torch.compile(summed_loss, dynamic=False)
    tables = rotary_tables(packing.LONG_ROW, network.shape, device)
    training = Training(options, network, device, loss, tables)
    training.warm_up()
    run_steps(training)
    training.report("done")
    training.score(options.out)
