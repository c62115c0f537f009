"""`python -m floe_chat.assets.demo.make OUT_DIR`: trains the demo model, or another for benches, and checks it."""

import argparse
import logging
from pathlib import Path

from .check import report
from .own_texts import OwnTexts
from .settle import settle
from .shapes import SHAPES
from .train import Training, train


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m floe_chat.assets.demo.make", description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="folder to write the checkpoint into")
    parser.add_argument("--shape", choices=SHAPES, default="demo", help="the architecture (shapes.py)")
    parser.add_argument("--steps", type=int, default=6000, help="length of training: two hours on two cores")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same model")
    parser.add_argument("--from", dest="origin", type=Path, help="go on from this checkpoint, whose shape it is")
    parser.add_argument(
        "--texts", type=Path, metavar="FOLDER", help="train on its Python files, not on the demo's texts"
    )
    parser.add_argument("--check-only", action="store_true", help="do not train, only check the checkpoint in OUT_DIR")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if options.texts:
        own = OwnTexts(options.texts)
        train(options.out, Training(options.shape, options.steps, options.seed, options.origin, own))
        held_out = "\n".join(own.read(held_out=True))
        (options.out / "heldout.txt").write_text(held_out, encoding="utf-8")  # to measure packs on
        return
    if not options.check_only:
        train(options.out, Training(options.shape, options.steps, options.seed, options.origin))
        settle(options.out, seed=options.seed)
    report(options.out)


if __name__ == "__main__":
    main()
