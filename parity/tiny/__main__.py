"""`python -m parity.tiny --out DIR [MODEL_TYPE ...]`: build tiny checkpoints as DIR/<model_type>."""

import argparse
from difflib import get_close_matches
from pathlib import Path

import transformers

from parity.tiny.checkpoint import checkpoint
from parity.tiny.write import write


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m parity.tiny", description="Build tiny checkpoints, bit for bit.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where <model_type>/ is written")
    parser.add_argument("model_type", nargs="*", help="default: every model type that DIR holds already")
    arguments = parser.parse_args()
    there = sorted(path.parent.name for path in arguments.out.glob("*/config.json"))
    if not arguments.model_type and not there:
        parser.error(f"{arguments.out} holds no checkpoint yet: name the model types to build")
    for model_type in arguments.model_type:
        if model_type not in transformers.CONFIG_MAPPING:
            close = get_close_matches(model_type, list(transformers.CONFIG_MAPPING), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            parser.error(f"transformers {transformers.__version__} has no model type {model_type!r}{hint}")
    transformers.logging.disable_progress_bar()
    for model_type in arguments.model_type or there:
        try:
            write(arguments.out / model_type, *checkpoint(model_type))
        except (OSError, ValueError) as error:
            parser.error(f"{arguments.out / model_type} cannot be written: {error}")
        print(f"wrote {arguments.out / model_type}")


if __name__ == "__main__":
    main()
