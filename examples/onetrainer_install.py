"""OneTrainer on latentcache: its scripts/train.py with one more call.

Run it in OneTrainer's environment and folder: `python onetrainer_install.py --config-path config.json`. Nothing of
OneTrainer is changed on disk. The first start encodes; every later one encodes what is new.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from latentcache.integrations import onetrainer

parser = argparse.ArgumentParser()
parser.add_argument("--config-path", required=True)
parser.add_argument("--cache-dir", default="latents", help="may be shared by all runs; OneTrainer never empties it")


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

    # The one call. From here on OneTrainer's data loaders make a LatentCacheModule where they made mgds' DiskCache.
    # `model` lets the cache put every part back on the device where it was, after each time that it encoded.
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
