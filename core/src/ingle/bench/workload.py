"""What a benchmark computes."""

from __future__ import annotations

from dataclasses import dataclass

from ingle.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is measured. Prompts are random tokens and differ between repeats.

    Attributes:
        prompt_tokens: Tokens before what is decoded.
        output_tokens: Tokens decoded.
        prefill_tokens: Tokens of the prompt whose own speed is measured; fewer where the model's
            context is shorter.
        batch: Sequences decoded together, several numbers with commas: `1,4,16`. Those that the
            engine would not run together are left out.
        repeats: Measurements of each kind, after one that is thrown away.
    """

    prompt_tokens: int = 128
    output_tokens: int = 128
    prefill_tokens: int = 512
    batch: str = "1,4,16"
    repeats: int = 5

    def __post_init__(self) -> None:
        least = {"prompt_tokens": 1, "output_tokens": 2, "prefill_tokens": 2, "repeats": 1}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value < smallest:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} must be at least {smallest}, got {value}.")
        _ = self.batches

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes, rising, 1 always among them.

        Raises:
            ConfigError: When one is no number or below 1.
        """
        try:
            sizes = {int(size) for size in self.batch.split(",")}
        except ValueError:
            sizes = {0}
        if min(sizes) < 1:
            raise ConfigError(
                f"--batch must be numbers from 1 on with commas between, such as 1,4,16; got "
                f"{self.batch!r}."
            )
        return tuple(sorted({1, *sizes}))
