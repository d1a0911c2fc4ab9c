"""Parquet files that Hugging Face `datasets` loads, with a dataset card: `data/<split>-00000.parquet`, `README.md`.

A tensor is three columns: its bytes, row by row and little-endian, its shape and its dtype. The sides of latents differ
from bucket to bucket, and nested lists of numbers take several times the room and time of bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from latentcache.errors import ConfigError
from latentcache.interop.reports import ExportReport
from latentcache.interop.shards import ShardExport, ShardRow
from latentcache.loading.cache import LatentCache
from latentcache.utils.progress import Progress

_ROW_GROUP_BYTES = 32 << 20
_CARD = """# {name}

VAE latents and text embeddings of {num_samples:,} samples, exported by {written_by}. No image is in it.

**Latents are {latents}.** Scaling factor {scaling_factor}, shift factor {shift_factor}{statistics}.

| what | value |
|---|---|
| samples, latents, texts | {num_samples:,}, {num_images:,}, {num_texts:,} |
| latents are the posterior's | {output} |
| dtypes | {dtypes} |
| VAE | {vae} |
| preparation of the images | {preparation} |
| text encoders | {text_encoders} |

Sizes are (height, width). Tensors are bytes, and columns next to them have shape and dtype:

```python
import datasets, torch

for row in datasets.load_dataset(FOLDER, split="{split}"):
    dtype = getattr(torch, row["latents_dtype"])
    latents = torch.frombuffer(bytearray(row["latents"]), dtype=dtype).reshape(row["latents_shape"])
```

The licence is for the publisher to state: it depends on that of the images and captions, and on that of the models.
"""


def export(
    cache: LatentCache,
    name: str,
    folder: str | Path,
    *,
    scaled: bool = False,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 256 << 20,
    seed: int | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Write the manifest `name` as parquet files to the new `folder`, and a dataset card made from the manifest.

    Latents are the mean of the moments, or with `seed` a draw. See `ShardExport` for the rest. Raises ConfigError
    without pyarrow.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigError("parquet files need pyarrow: pip install 'latentcache[parquet]'") from error
    run = ShardExport(
        "parquet",
        cache,
        name,
        folder,
        scaled=scaled,
        dtype=dtype,
        shard_bytes=shard_bytes,
        seed=seed,
        progress=progress,
    )
    split = run.manifest.role
    schema = pa.schema(_columns(run))
    for number, rows in enumerate(run.shards()):
        # Numbers do not shrink, and statistics of bytes are of no use.
        options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
        with (
            run.sealed(f"data/{split}-{number:05}.parquet") as file,
            pq.ParquetWriter(file, schema, **options) as writer,
        ):
            group: list[dict[str, Any]] = []
            num_bytes = 0
            for row in rows:
                group.append(_cells(row))
                num_bytes += row.num_bytes
                if num_bytes >= _ROW_GROUP_BYTES:
                    writer.write_table(pa.Table.from_pylist(group, schema))
                    group, num_bytes = [], 0
            if group:
                writer.write_table(pa.Table.from_pylist(group, schema))
    if run.num_samples:
        run.write_small("README.md", _card(run, run.finish({}), split))
    return run.report


def _columns(run: ShardExport) -> list[tuple[str, Any]]:
    """The columns with their types; further captions and flipped latents only where a sample has them."""
    import pyarrow as pa

    sides = pa.list_(pa.int32())
    geometry = pa.struct(
        [(name, sides) for name in ("original_size", "resized_size", "crop_top_left", "target_size")]
        + [("flip", pa.bool_())]
        + ([("num_frames", pa.int32())] if run.family.has_clips else [])
    )
    columns = [("sample_id", pa.string()), ("caption", pa.string()), ("captions", pa.list_(pa.string()))]
    columns.append(("geometry", geometry))
    if "latents_flipped" in (fields := run.fields()):
        columns.append(("geometry_flipped", geometry))
    for field in fields:
        columns += [(field, pa.binary()), (f"{field}_shape", sides), (f"{field}_dtype", pa.string())]
    columns += [("scaled", pa.bool_()), ("scaling_factor", pa.float64()), ("shift_factor", pa.float64())]
    return [*columns, ("output", pa.string()), ("keys", pa.string())]


def _cells(row: ShardRow) -> dict[str, Any]:
    cells = row.values | {"keys": json.dumps(row.values["keys"])}
    for field, array in row.tensors.items():
        cells |= {field: array.tobytes(), f"{field}_shape": array.shape, f"{field}_dtype": array.dtype.name}
    return cells


def _cell(stated: Any) -> str:
    """A statement in a cell of the card's table: in one line, and without an end of the cell."""
    text = stated if isinstance(stated, str) else json.dumps(stated)
    return " ".join(text.split()).replace("|", "\\|")


def _card(run: ShardExport, description: Mapping[str, Any], split: str) -> bytes:
    """README.md: a head for `datasets`, and a text for people."""
    files = [{"split": split, "path": f"data/{split}-*.parquet"}]
    head = {
        "license": "unknown",
        "pretty_name": run.manifest.name,
        "tags": ["latents", "text-embeddings", "latentcache"],
        "configs": [{"config_name": "default", "data_files": files}],
    }
    declaration = description["declaration"]
    facts = {name: _cell(declaration[name]) for name in ("vae", "preparation", "text_encoders")}
    text = _CARD.format_map(
        {
            **declaration,
            **facts,
            "name": run.manifest.name,
            "split": split,
            "statistics": ", mean and std as in latentcache.json" if declaration["mean"] else "",
            "written_by": description["written_by"],
            "latents": description["latents"],
            "num_samples": run.num_samples,
            "num_images": run.report.num_images,
            "num_texts": run.report.num_texts,
            "dtypes": ", ".join(f"{field} {' and '.join(names)}" for field, names in description["dtypes"].items()),
        }
    )
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n{text}".encode()
