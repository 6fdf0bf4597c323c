"""Train the emoji LlamaGen and its text encoder jointly, on codes of the VQ model.

    python examples/emoji/train_target.py --data runs/emoji64.npz --vq runs/vq --out runs/target

Deep and narrow, so that the target costs many layers against the draft head's one, as at real size. Hidden matrices are
trained with Muon, everything else with AdamW; one caption in ten is replaced by the unconditional prefix.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from common import LossLog, load_checkpoint, save_checkpoint, warmup_cosine
from diffusers import VQModel
from emoji_data import EmojiSet, load_emoji
from emoji_text import PREFIX_LENGTH, build_text_encoder, build_tokenizer, encode_prompts, training_prompt
from torch import Tensor, nn
from tqdm import tqdm
from train_vq import reconstruct, to_pixels
from transformers import PreTrainedTokenizerFast, T5EncoderModel

from lantern_hf.models.configuration_llamagen import LlamaGenConfig
from lantern_hf.models.llamagen import LlamaGenForConditionalGeneration


def build_target(num_codes: int, layers: int, hidden: int, caption_dim: int) -> LlamaGenForConditionalGeneration:
    config = LlamaGenConfig(
        codebook_size=num_codes,
        grid_size=[16, 16],
        prefix_length=PREFIX_LENGTH,
        prefix_rotation="identity",
        caption_dim=caption_dim,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        attn_implementation="eager",  # compiled, its backward is faster on a CPU than that of bfloat16 sdpa
    )
    model = LlamaGenForConditionalGeneration(config)
    for layer in model.model.layers:  # residual branches start small, the deeper the smaller
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight.data.mul_((2 * layers) ** -0.5)
    return model


@torch.no_grad()
def encode_images(vq_folder: Path, images: np.ndarray) -> Tensor:
    """Codes of every picture, `(M, 256)` int64, chosen with the prices the VQ model was trained with."""
    vq = VQModel.from_pretrained(vq_folder / "vq").eval()
    prices = torch.load(vq_folder / "prices.pt", weights_only=True)
    codes = []
    for start in range(0, len(images), 64):
        batch = images[start : start + 64]
        codes.append(reconstruct(vq, to_pixels(batch), prices["bits"], prices["price"])[2].view(len(batch), -1))
    return torch.cat(codes)


class TextToCodes(nn.Module):
    """Text encoder and target together: what is trained.

    Args:
        encoder: T5-style encoder.
        target: LlamaGen transformer.
        tokenizer: Word tokenizer of the captions.
    """

    def __init__(
        self, encoder: T5EncoderModel, target: LlamaGenForConditionalGeneration, tokenizer: PreTrainedTokenizerFast
    ):
        super().__init__()
        self.encoder, self.target, self.tokenizer = encoder, target, tokenizer

    def hidden(self, prompts: list[str], codes: Tensor, drop: Tensor) -> Tensor:
        """Return the hidden states that predict each code, `(B, 256, D)`; rows of `drop` see no caption."""
        features, mask = encode_prompts(self.tokenizer, self.encoder, prompts)
        target, prefix = self.target, PREFIX_LENGTH
        prefix_ids = torch.where(drop[:, None], target.unconditional_ids(len(codes)), target.caption_ids(len(codes)))
        input_ids = torch.cat([prefix_ids, codes[:, :-1]], dim=1)
        attention_mask = F.pad(mask, (0, codes.shape[1] - 1), value=1)
        hidden = target.model(
            input_ids=input_ids, attention_mask=attention_mask, caption_embeds=features, use_cache=False
        ).last_hidden_state
        return hidden[:, prefix - 1 :]

    def forward(self, prompts: list[str], codes: Tensor, drop: Tensor) -> Tensor:
        """Return the logits that predict each code, `(B, 256, K)`; rows of `drop` see no caption."""
        return self.target.image_logits(self.hidden(prompts, codes, drop))


class Ahead(nn.Module):
    """Predicts codes further ahead, from a hidden state and the codes between, as a draft head will have to.

    Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2) with a perceptron for a block: what it learns
    is thrown away, but the hidden states come to hold what the codes after the next will be.

    Args:
        hidden: Size of the target's hidden states.
        depth: Codes ahead of the next one.
    """

    def __init__(self, hidden: int, depth: int = 3):
        super().__init__()
        self.depth = depth
        self.mix = nn.Sequential(nn.Linear(2 * hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, target: LlamaGenForConditionalGeneration, states: Tensor, context: Tensor) -> list[Tensor]:
        """Return, for 1 to `depth` codes ahead, the logits that predict `codes[:, ahead:]`, `(B, 256 - ahead, K)`."""
        logits = []
        for ahead in range(1, self.depth + 1):
            between = target.model.embed_tokens(context[:, ahead - 1 : -1])
            states = states[:, :-1] + self.mix(torch.cat([states[:, :-1], between], dim=-1))
            logits.append(target.image_logits(states))
        return logits


def corrupt(codes: Tensor, most: float, blind: Tensor, generator: torch.Generator) -> Tensor:
    """Replace a share of each picture's codes by codes of the whole batch: `most * u**2`, u uniform.

    A few true codes give a training picture away, and then the text has nothing to add; where most of them are false,
    only the text can tell. It also keeps the target from learning the pictures by heart. In rows of `blind` (bool,
    `(B,)`) no code is true: half of them get false codes, half the codes of another picture, which look right.
    """
    rate = most * torch.rand(len(codes), 1, generator=generator).square()
    others = codes.flatten()[torch.randint(codes.numel(), codes.shape, generator=generator)]
    swapped = torch.rand(len(codes), 1, generator=generator) < 0.5
    others = torch.where(blind[:, None] & swapped, codes.roll(1, 0), others)
    return torch.where(
        torch.rand(codes.shape, generator=generator) < rate.masked_fill(blind[:, None], 1.0), others, codes
    )


def mix(codes: Tensor, logits: Tensor, most: float, generator: torch.Generator) -> Tensor:
    """Replace a share of each picture's input codes, uniform up to `most`, by draws of the target in their places.

    Scheduled sampling in two passes (arXiv 1906.07651): behind a code that it drew itself the target has to find back,
    while in training it would only ever see true ones, or false ones that it would not draw.
    """
    drawn = torch.multinomial(logits.float().softmax(-1).flatten(0, 1), 1, generator=generator).view_as(codes)
    rate = most * torch.rand(len(codes), 1, generator=generator)
    return torch.where(torch.rand(codes.shape, generator=generator) < rate, drawn, codes)


def build_optimizers(model: TextToCodes, ahead: Ahead | None = None) -> list[torch.optim.Optimizer]:
    """Muon on the hidden matrices of the target, AdamW on the rest; `scale` of a group multiplies the learning rate.

    The text path has rates of its own. At Muon's the caption projection grew to 300 times a code's embedding
    and one direction for all captions (cosine 0.99), so that no caption could be told from another. Its word
    embeddings learn fastest: most words come once in hundreds of steps, and Adam moves a row by a few times the rate
    each time, which is nothing against their initial size of 1 unless the rate is high.
    """
    hidden = [p for name, p in model.target.model.layers.named_parameters() if p.ndim == 2]
    words = model.encoder.get_input_embeddings().weight
    text = [*(p for p in model.encoder.parameters() if p is not words), *model.target.model.prefix.parameters()]
    chosen = {id(p) for p in [*hidden, *text, words]}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    muon = [{"params": hidden, "scale": 1.0}]
    adamw = [{"params": rest, "scale": 0.3}, {"params": text, "scale": 0.3}, {"params": [words], "scale": 8.0}]
    if ahead is not None:
        adamw.append({"params": list(ahead.parameters()), "scale": 1.0})
    return [
        torch.optim.Muon(muon, lr=1.0, momentum=0.95, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(adamw, lr=1.0, betas=(0.9, 0.95), weight_decay=0.01),
    ]


@torch.no_grad()
def validate(model: TextToCodes, captions: list[str], codes: Tensor, bf16: bool) -> dict[str, float]:
    """Mean NLL in nats a token, entropy in nats, and the mean top-1 probability, on given pictures."""
    totals = torch.zeros(3)
    for start in range(0, len(codes), 16):
        batch = codes[start : start + 16]
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(captions[start : start + 16], batch, torch.zeros(len(batch), dtype=torch.bool))
        logprobs = logits.float().log_softmax(-1)
        nll = -logprobs.gather(-1, batch[..., None]).sum()
        totals += torch.stack([nll, -(logprobs.exp() * logprobs).sum(), logprobs.amax(-1).exp().sum()])
    nll, entropy, top1 = (totals / codes.numel()).tolist()
    return {"nll": nll, "entropy": entropy, "top1": top1}


def resume(
    path: Path,
    args: argparse.Namespace,
    model: TextToCodes,
    ahead: Ahead | None,
    optimizers: list[torch.optim.Optimizer],
) -> tuple[int, float]:
    """Load the run's own checkpoint at `path`, or else the weights of `--init`; return its step and its seconds."""
    if (state := load_checkpoint(path)) is None:
        if args.init:
            if (state := load_checkpoint(args.init)) is None:
                raise FileNotFoundError(f"--init {args.init}: no such file; give the checkpoint.pt of an earlier run.")
            model.load_state_dict(state["model"])
        return 0, 0.0
    if ("ahead" in state) != (ahead is not None):
        made = "with" if "ahead" in state else "without"
        raise ValueError(f"--ahead {args.ahead}: {path} was made {made} it; go on as it began, or give another --out.")
    model.load_state_dict(state["model"])
    if ahead is not None:
        ahead.load_state_dict(state["ahead"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return state["step"], state["seconds"]


def batch_losses(
    args: argparse.Namespace,
    model: TextToCodes,
    ahead: Ahead | None,
    prompts: list[str],
    codes: Tensor,
    share: float,
    generator: torch.Generator,
) -> tuple[Tensor, list[Tensor]]:
    """Return the weighted NLL of `codes`, `(B, 256)`, in nats a code, and that of codes 1, 2, ... further ahead.

    `share` of the pictures have no true input code, and only their text tells them.
    """
    drop = torch.rand(len(codes), generator=generator) < 0.1
    blind = (torch.rand(len(codes), generator=generator) < share) & ~drop
    context = corrupt(codes, args.corruption, blind, generator)
    if args.own:  # an autocast of its own, which would keep weights without gradients for the pass that follows
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            drawn = model(prompts, context, drop)
        context = mix(context, drawn, args.own, generator)
    with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
        states = model.hidden(prompts, context, drop)
        logits = model.target.image_logits(states)
        further = [] if ahead is None else ahead(model.target, states, context)
    losses = F.cross_entropy(logits.float().transpose(1, 2), codes, reduction="none").mean(0)
    weights = torch.ones_like(losses)
    weights[: 2 * model.target.config.grid_size[1]] = args.first
    later = [F.cross_entropy(far.float().transpose(1, 2), codes[:, i:]) for i, far in enumerate(further, 1)]
    return (losses * weights).sum() / weights.sum(), later


def measure(
    model: TextToCodes, captions: list[str], codes: Tensor, seen: Tensor, held_out: Tensor, bf16: bool
) -> dict[str, float]:
    """Figures of held-out pictures, NLL of as many seen ones, and what a wrong caption costs these."""
    some = seen[:: max(1, len(seen) // len(held_out))]
    own, other = ([captions[i] for i in rows.tolist()] for rows in (some, some.roll(1)))
    right = validate(model, own, codes[some], bf16)["nll"]
    gap = validate(model, other, codes[some], bf16)["nll"] - right
    figures = validate(model, [captions[i] for i in held_out.tolist()], codes[held_out], bf16)
    return {"nll_seen": right, **figures, "caption_gap": gap}


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    emoji: EmojiSet = load_emoji(args.data, args.styles)
    codes, captions = encode_images(args.vq, emoji.images), [str(caption) for caption in emoji.captions]
    drawn = np.isin(emoji.styles, args.only or args.styles)
    seen, held_out = (torch.from_numpy(drawn & mask).nonzero().flatten() for mask in (~emoji.held_out, emoji.held_out))
    tokenizer = build_tokenizer([str(c) for c in emoji.captions[~emoji.held_out]], args.styles)
    encoder = build_text_encoder(len(tokenizer))
    target = build_target(args.num_codes, args.layers, args.hidden, encoder.config.d_model)
    model = TextToCodes(encoder, target, tokenizer)
    ahead = Ahead(args.hidden) if args.ahead else None
    trained = [*model.parameters(), *(ahead.parameters() if ahead else [])]
    optimizers = build_optimizers(model, ahead)
    checkpoint_path = args.out / "checkpoint.pt"
    step, elapsed = resume(checkpoint_path, args, model, ahead, optimizers)
    if args.compile:  # the rotary table is made on first use; made here, it is a constant of the compiled graph
        with torch.no_grad():
            target(target.unconditional_ids(1))
        target.model.compile(dynamic=False)
    log = LossLog(args.out / "log.jsonl", elapsed)
    bar = tqdm(range(step, args.steps), initial=step, total=args.steps, desc="target", mininterval=10)
    for step in bar:
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)  # a resumed run draws the same batches
        chosen = seen[torch.randint(len(seen), (args.batch_size,), generator=generator)]
        prompts = [training_prompt(captions[i], str(emoji.styles[i]), generator) for i in chosen.tolist()]
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = args.lr * group["scale"] * warmup_cosine(step, args.steps, 100)
        share = args.blind * (1 - step / args.steps)
        loss, later = batch_losses(args, model, ahead, prompts, codes[chosen], share, generator)
        (loss + args.ahead * torch.stack(later).mean() if later else loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0:
            parts = {f"loss_ahead_{i}": value.item() for i, value in enumerate(later, 1)}
            log.write(step=step, loss=loss.item(), grad_norm=norm.item(), **parts)
            bar.set_postfix(loss=f"{loss.item():.3f}")
        last = step + 1 == args.steps
        if (step + 1) % args.save_every == 0 or last:
            subset = held_out if last else held_out[:96]
            log.write(step=step + 1, **measure(model, captions, codes, seen, subset, args.bf16))
            state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "step": step + 1}
            if ahead is not None:
                state["ahead"] = ahead.state_dict()
            save_checkpoint(checkpoint_path, state | {"seconds": log.elapsed})
    target.save_pretrained(args.out / "transformer")
    encoder.save_pretrained(args.out / "text_encoder")
    tokenizer.save_pretrained(args.out / "tokenizer")
    print(
        f"{log.elapsed / 60:.1f} min, {sum(p.numel() for p in target.parameters()) / 1e6:.2f}M parameters in the target"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("runs/emoji64.npz"))
    parser.add_argument("--vq", type=Path, default=Path("runs/vq"))
    parser.add_argument("--out", type=Path, default=Path("runs/target"))
    parser.add_argument("--styles", nargs="*", default=["noto", "fluent flat"])
    parser.add_argument("--only", nargs="*", help="styles to train on; those of --styles stay words of the tokenizer")
    parser.add_argument("--num-codes", type=int, default=512)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=160)
    parser.add_argument("--steps", type=int, default=2800)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--corruption", type=float, default=0.9, help="largest share of false input codes")
    parser.add_argument("--blind", type=float, default=0.0, help="share of pictures that only the text tells, at first")
    parser.add_argument("--init", type=Path, help="checkpoint.pt of an earlier run, whose weights to start from")
    parser.add_argument("--own", type=float, default=0.0, help="largest share of input codes that the target draws")
    parser.add_argument("--first", type=float, default=1.0, help="weight of the first two rows, which decide the rest")
    parser.add_argument("--ahead", type=float, default=0.0, help="weight of predicting three codes after the next")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=250)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    train(parser.parse_args())
