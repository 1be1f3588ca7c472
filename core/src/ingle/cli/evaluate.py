"""``ingle eval``: what quantising cost, against a reference."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ingle.errors import ConfigError
from ingle.quantize.evaluation import EvaluationConfig


def evaluate(
    models: list[str],
    config: EvaluationConfig,
    *,
    kv_cache_dtype: Annotated[tuple[str, ...], Parameter(negative=())] = ("auto",),
    json: Annotated[str | None, Parameter(negative=(), allow_leading_hyphen=True)] = None,
    plot: Annotated[str | None, Parameter(negative=())] = None,
) -> None:
    """Compare models with a reference: size, perplexity, KL divergence, top-1 agreement.

    Each is loaded by this engine, one at a time, and reads the same text in windows. KL is the mean
    of KL(reference || model) over the predicted tokens, in nats, with a 95 % bootstrap interval;
    top-1 the share of tokens for which both find the same one likeliest. Bits per weight are the
    stored bits of the layers' linears, scales and all, without embeddings and output head.

    Args:
        models: Folders or hub ids, quantised or not.
        kv_cache_dtype: KV-cache format of the models; given several times, each model is measured
            with each. The reference has `auto`.
        json: A file to write the results to, as a list of objects; `-` prints them.
        plot: A file to draw KL against bits per weight in: `.svg`, or `.png` where matplotlib is
            installed.
    """
    from ingle.quantize.evaluation import evaluations
    from ingle.quantize.quality_plot import check_plot_path, write_plot
    from ingle.quantize.quality_table import format_table, to_json

    _check_folder("--json", json)
    if plot is not None:
        check_plot_path(Path(plot))
    found = list(evaluations(models, kv_cache_dtype, config))
    text = json_module.dumps(to_json(found), indent=2)
    print(format_table(found), file=sys.stderr if json == "-" else sys.stdout)
    if json == "-":
        print(text)
    elif json is not None:
        Path(json).write_text(text + "\n", encoding="utf-8")
    if plot is not None:
        write_plot(found, Path(plot))


def _check_folder(flag: str, path: str | None) -> None:
    """Before minutes of work, not after them."""
    if path not in (None, "-") and not Path(str(path)).parent.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {Path(str(path)).parent}.")
