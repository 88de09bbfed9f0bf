"""Train an EAGLE head for the demo model and write it to models/demo-eagle.

    python tools/train_demo_eagle.py --minutes 4

Data, schedule and optimizers are those of tools/train_demo_model.py; the model itself is not
changed. This script needs PyTorch and runs on CUDA or on the CPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def parse_arguments() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, default=Path("models/demo"))
    add("--out", type=Path, default=Path("models/demo-eagle"))
    add("--minutes", type=float, default=4.0)
    add("--seed", type=int, default=0)
    add("--workers", type=int, default=14, help="processes that make data")
    add("--rows", type=int, default=128, help="rows of 512 tokens a step")
    add("--matrix-rate", type=float, default=0.02, help="learning rate of Muon")
    add("--other-rate", type=float, default=0.004, help="learning rate of AdamW")
    return parser.parse_args()


def main() -> None:
    """Train the head as the command line says; PyTorch is imported only after it is parsed."""
    options = parse_arguments()
    import torch

    from tools.demo_model import eagle, packing
    from tools.demo_model.checkpoint import load_weights
    from tools.demo_model.network import Network, NetworkShape, rotary_tables
    from tools.demo_model.optimizer import Optimizer, learning_rate_factor

    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = Network(NetworkShape()).to(device)
    load_weights(network, options.model / "model.safetensors")
    network.requires_grad_(False)
    head = eagle.EagleHead().to(device)
    optimizer = Optimizer(head, options.matrix_rate, options.other_rate)
    cos, sin = rotary_tables(packing.SHORT_ROW, network.shape, device)
    shape = packing.ShardShape(options.rows, 0)
    began = time.monotonic()
    for step, (short, _) in enumerate(
        packing.shards(options.model, options.seed, options.workers, shape)
    ):
        progress = (time.monotonic() - began) / (60 * options.minutes)
        if progress >= 1.0:
            break
        rows = torch.from_numpy(short.astype("int32")).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss, agreed = eagle.head_loss(head, network, rows, cos, sin)
        loss.backward()
        optimizer.step(learning_rate_factor(progress))
        if step % 100 == 0:
            shares = ", ".join(f"{float(share):.3f}" for share in agreed)
            print(
                f"[{time.monotonic() - began:6.1f} s, step {step}] loss {loss.item():.4f}, "
                f"agrees {shares}",
                flush=True,
            )
    eagle.save_head(head, options.out)


if __name__ == "__main__":
    main()
