"""Publish a draft head with an honest card, pull it back, and check that it is the same.

    python examples/publish_head.py --head my-head --repo someone/anole-7b-lantern-head --license apache-2.0 \\
        --benchmark runs/benchmark.json --image fox.png

Sign in first with `hf auth login`, or set HF_TOKEN. With `--create-pr` a pull request is opened instead.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from lantern_hf import CardDetails, LanternDraftModel


def main(args: argparse.Namespace) -> None:
    head = LanternDraftModel.from_pretrained(args.head)
    card = CardDetails(
        license=args.license,
        base_model=args.base_model,
        benchmark=args.benchmark,
        image=args.image,
        training_data=args.training_data,
        training_command=args.training_command,
    )
    commit = head.push_to_hub(args.repo, card=card, private=args.private, create_pr=args.create_pr)
    print(commit.pr_url or commit.commit_url)
    pulled = LanternDraftModel.from_pretrained(args.repo, revision=commit.oid)
    same = all(torch.equal(value, pulled.state_dict()[name]) for name, value in head.state_dict().items())
    print("pulled back:", "bit for bit the same" if same else "different")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--repo", required=True)
    parser.add_argument("--license")
    parser.add_argument("--base-model")
    parser.add_argument("--benchmark", type=Path)
    parser.add_argument("--image", type=Path)
    parser.add_argument("--training-data")
    parser.add_argument("--training-command")
    parser.add_argument("--private", action="store_true", default=None)
    parser.add_argument("--create-pr", action="store_true")
    main(parser.parse_args())
