"""OneTrainer on latentcache: OneTrainer's scripts/train.py plus one call.

Run it in OneTrainer's environment and folder: `python onetrainer_install.py --config-path config.json`. Nothing is
changed on disk. The first run encodes everything, later runs only what is new.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from latentcache.integrations import onetrainer

parser = argparse.ArgumentParser()
parser.add_argument("--config-path", required=True)
parser.add_argument("--cache-dir", default="latents", help="may be shared by all runs; OneTrainer never clears it")


def main() -> None:
    from modules.util import create
    from modules.util.callbacks.TrainCallbacks import TrainCallbacks
    from modules.util.commands.TrainCommands import TrainCommands
    from modules.util.config.TrainConfig import TrainConfig

    arguments = parser.parse_args()
    config = TrainConfig.default_values()
    config.from_dict(json.loads(Path(arguments.config_path).read_text(encoding="utf-8")))
    commands = TrainCommands()
    trainer = create.create_trainer(config, TrainCallbacks(), commands)

    # The additional call: OneTrainer's data loaders now create a LatentCacheModule in place of mgds' DiskCache. `model`
    # lets the cache move every part back to its device after encoding.
    undo = onetrainer.install(
        model=lambda: trainer.model, cache_dir=arguments.cache_dir, should_stop=commands.get_stop_command
    )
    trainer.start()
    try:
        trainer.train()
    finally:
        trainer.end()
        undo()


if __name__ == "__main__":
    main()
