"""`python -m parity.tiny --out DIR [MODEL_TYPE ...]`: build tiny checkpoints as DIR/<model_type>."""

import argparse
from pathlib import Path

import transformers

from parity.tiny.checkpoint import checkpoint
from parity.tiny.write import write


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m parity.tiny", description="Build tiny checkpoints, bit for bit.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where <model_type>/ is written")
    parser.add_argument("model_type", nargs="*", help="default: every model type that DIR holds already")
    arguments = parser.parse_args()
    transformers.logging.disable_progress_bar()
    there = sorted(path.parent.name for path in arguments.out.glob("*/config.json"))
    for model_type in arguments.model_type or there:
        write(arguments.out / model_type, *checkpoint(model_type))
        print(f"wrote {arguments.out / model_type}")


if __name__ == "__main__":
    main()
