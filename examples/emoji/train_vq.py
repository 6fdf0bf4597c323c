"""Train the emoji tokenizer: a small `diffusers.VQModel`, 64x64 pixels to a 16x16 grid of codes.

    python examples/emoji/train_vq.py --data runs/emoji64.npz --out runs/vq0 --rate 0 --lr 3e-3 --steps 2800
    python examples/emoji/train_vq.py --data runs/emoji64.npz --out runs/vq1 --init runs/vq0/vq --rate 0.5
    python examples/emoji/train_vq.py --data runs/emoji64.npz --out runs/vq --init runs/vq1/vq --rate 0.8

The white background is what a small codebook handles worst: hundreds of codes come to mean "white", and a target then
spends its capacity on telling the copies apart. Three things keep them few. The encoder has no attention, so that a
code is local to its patch. Unused codes restart from encoder outputs drawn by their quantisation error. And the later
runs are entropy-constrained (Chou, Lookabaugh and Gray, 1989): a code is chosen by distance plus `rate` times its
length in bits, so that of two codes that serve equally well the common one wins, and the other is freed for where it
matters.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from common import LossLog, load_checkpoint, save_checkpoint, warmup_cosine
from diffusers import VQModel
from emoji_data import load_emoji
from torch import Tensor
from tqdm import tqdm


def build_vq(num_codes: int, channels: tuple[int, ...]) -> VQModel:
    levels = len(channels)
    return VQModel(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=channels,
        layers_per_block=1,
        latent_channels=8,
        vq_embed_dim=8,
        num_vq_embeddings=num_codes,
        norm_num_groups=8,
        sample_size=64,
        mid_block_add_attention=False,
        lookup_from_codebook=True,
        force_upcast=False,
    )


def to_pixels(images: np.ndarray) -> Tensor:
    """`(B, 64, 64, 3)` uint8 to `(B, 3, 64, 64)` float in [-1, 1]."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1


class CodeUsage:
    """Moving count of how often each code is used; unused ones restart where the quantiser errs most."""

    def __init__(self, num_codes: int, decay: float = 0.98) -> None:
        self.count, self.decay, self.distortion = torch.ones(num_codes), decay, 0.0

    def bits(self) -> Tensor:
        """Length of each code `(K,)` in an ideal entropy code."""
        return -(self.count / self.count.sum()).clamp_min(1e-6).log2()

    def update(self, indices: Tensor) -> None:
        used = torch.bincount(indices.flatten(), minlength=len(self.count)).float()
        self.count.mul_(self.decay).add_(used, alpha=1 - self.decay)

    @torch.no_grad()
    def restart(
        self, codebook: Tensor, latents: Tensor, errors: Tensor, threshold: float, generator: torch.Generator
    ) -> int:
        dead = (self.count < threshold).nonzero().flatten()
        if len(dead):
            chosen = torch.multinomial(errors + 1e-12, min(len(dead), len(latents)), generator=generator)
            codebook[dead[: len(chosen)]] = latents[chosen]
            self.count[dead] = self.count.mean()
        return len(dead)


def choose_codes(latents: Tensor, codebook: Tensor, bits: Tensor | None, price: float) -> Tensor:
    """Index of the code with the least squared distance plus `price` a bit, `(M,)`."""
    distance = torch.cdist(latents, codebook).square()
    return (distance if bits is None else distance + price * bits).argmin(1)


def reconstruct(vq: VQModel, pixels: Tensor, bits: Tensor | None = None, price: float = 0.0) -> tuple[Tensor, ...]:
    """Return reconstruction, quantiser loss, code indices `(B*h*w,)` and flat latents `(B*h*w, 8)`."""
    latents = vq.quant_conv(vq.encoder(pixels)).float()
    flat = latents.permute(0, 2, 3, 1).reshape(-1, latents.shape[1])
    codebook = vq.quantize.embedding.weight
    indices = choose_codes(flat.detach(), codebook.detach(), bits, price)
    chosen = codebook[indices]
    loss = 0.25 * F.mse_loss(flat, chosen.detach()) + F.mse_loss(chosen, flat.detach())
    quantised = chosen.view(len(latents), *latents.shape[2:], -1).permute(0, 3, 1, 2)
    quantised = latents + (quantised - latents).detach()  # straight through
    return vq.decoder(vq.post_quant_conv(quantised)).float(), loss, indices, flat


@torch.no_grad()
def evaluate(vq: VQModel, images: np.ndarray, bits: Tensor | None = None, price: float = 0.0) -> dict[str, float]:
    """PSNR in dB (mean over pictures, values clipped), code entropy in bits, and the commonest code's share."""
    psnr, counts = [], torch.zeros(vq.config.num_vq_embeddings)
    for start in range(0, len(images), 64):
        pixels = to_pixels(images[start : start + 64])
        decoded, _, indices, _ = reconstruct(vq, pixels, bits, price)
        error = ((decoded.clamp(-1, 1) - pixels) / 2).square().mean((1, 2, 3)).clamp_min(1e-9)
        psnr += (-10 * error.log10()).tolist()
        counts += torch.bincount(indices.flatten(), minlength=len(counts)).float()
    share = counts / counts.sum()
    entropy = -(share * share.clamp_min(1e-12).log2()).sum().item()
    return {
        "psnr": float(np.mean(psnr)),
        "entropy_bits": entropy,
        "used": float((counts > 0).sum()),
        "top_share": share.max().item(),
    }


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    emoji = load_emoji(args.data, args.styles)
    train_images, held_out = emoji.images[~emoji.held_out], emoji.images[emoji.held_out]
    vq = VQModel.from_pretrained(args.init) if args.init else build_vq(args.num_codes, tuple(args.channels))
    optimizer = torch.optim.AdamW(vq.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    usage, start, elapsed = CodeUsage(args.num_codes), 0, 0.0
    checkpoint_path = args.out / "checkpoint.pt"
    if (state := load_checkpoint(checkpoint_path)) is not None:
        vq.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        usage.count, usage.distortion = state["usage"], state["distortion"]
        start, elapsed = state["step"], state["seconds"]
    log = LossLog(args.out / "log.jsonl", elapsed)
    for step in tqdm(range(start, args.steps), initial=start, total=args.steps, desc="vq", mininterval=10):
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)  # a resumed run draws the same batches
        chosen = torch.randint(len(train_images), (args.batch_size,), generator=generator).numpy()
        pixels = to_pixels(train_images[chosen])
        if torch.rand((), generator=generator) < 0.5:
            pixels = pixels.flip(-1)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * warmup_cosine(step, args.steps, 50)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            decoded, quantiser_loss, indices, latents = reconstruct(
                vq, pixels, usage.bits(), args.rate * usage.distortion
            )
        loss = F.l1_loss(decoded, pixels) + 2 * F.mse_loss(decoded, pixels) + quantiser_loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vq.parameters(), 1.0)
        optimizer.step()
        usage.update(indices)
        codebook = vq.quantize.embedding.weight.data
        latents = latents.detach()
        errors = (latents - codebook[indices.flatten()]).square().sum(1)
        usage.distortion = 0.98 * usage.distortion + 0.02 * errors.mean().item()
        if (
            step == 100 and not args.init
        ):  # a codebook set from early encoder outputs, once these mean something, uses every code
            usage.count.zero_()
            usage.restart(codebook, latents, errors + errors.mean(), 1.0, generator)
        elif step > 100 and step % 50 == 0 and step < 0.7 * args.steps:
            usage.restart(codebook, latents, errors, 0.05, generator)
        if step % 100 == 0:
            log.write(step=step, loss=loss.item(), quantiser=quantiser_loss.item())
        if (step + 1) % 500 == 0 or step + 1 == args.steps:
            figures = evaluate(vq, held_out, usage.bits(), args.rate * usage.distortion)
            log.write(step=step + 1, **figures)
            state = {
                "model": vq.state_dict(),
                "optimizer": optimizer.state_dict(),
                "usage": usage.count,
                "step": step + 1,
            }
            save_checkpoint(checkpoint_path, state | {"distortion": usage.distortion, "seconds": log.elapsed})
    vq.save_pretrained(args.out / "vq")
    # The codes a target is trained on are chosen with the same price, which the VQ model itself does not know.
    torch.save({"bits": usage.bits(), "price": args.rate * usage.distortion}, args.out / "prices.pt")
    print({key: round(value, 3) for key, value in figures.items()}, f"{log.elapsed / 60:.1f} min")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("runs/emoji64.npz"))
    parser.add_argument("--out", type=Path, default=Path("runs/vq"))
    parser.add_argument("--styles", nargs="*", default=["noto", "fluent flat"])
    parser.add_argument("--num-codes", type=int, default=512)
    parser.add_argument("--channels", type=int, nargs="+", default=[24, 48, 72])
    parser.add_argument("--init", type=Path, help="start from this VQ model")
    parser.add_argument("--rate", type=float, default=0.8, help="price of a bit, in mean distortions")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    train(parser.parse_args())
